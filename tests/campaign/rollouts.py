"""Kills in rollouts on one machine, of what takes part in them, while clients ask: the real Envoy and supervisor, and
stand-in servers."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psutil

from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import Endpoint, endpoint, stop
from stages.parts.records.rollout import Journal, read_journal
from stages.parts.releases import release as releases
from stages.parts.vllm.client import Access
from stages.rollout.scene import SteadyLoad
from tests.campaign.kills import processes_left
from tests.serving import MODEL, ROLLOUT, SERVING, environment, publish, stand_in_variant, wait_until

SETTINGS: Final = ROLLOUT | {"step_timeout_s": 60, "ttft_slack_ms": 5000, "tpot_slack_ms": 5000, "poll_s": 0.05}
"""On a busy machine the canary is not worse."""
STATES: Final = ("deploying", "starting", "shifting", "observing", "promoting", "promoted")
VICTIMS: Final = ("controller", "supervisor", "proxy", "stable server", "canary server", "guard")
USERS: Final = 4
TOKENS: Final = 10
TOKEN_S: Final = 0.005
ENDED: Final = (43, 75)
"""It was rolled back; or it has ended, and its supervisor was killed since."""
FEW_S: Final = 180
ANSWERS_S: Final = 30


@dataclass
class Losses:
    """What clients saw around the kills of one kind."""

    kills: int = 0
    requests: int = 0
    cut: int = 0
    """Answers that had begun."""
    refused: int = 0
    """Requests that nobody answered."""
    silent_s: list[float] = field(default_factory=list)
    """The longest time without a complete answer, of each kill."""


class Machine:
    """A store with two releases, one of which is served."""

    def __init__(self, folder: Path) -> None:
        self.store, self.runs = ModelStore(folder / "store", MODEL), 0
        with socket.create_server(("127.0.0.1", 0)) as free:  # clients know one address
            self.serving = SERVING | {"port": free.getsockname()[1]}
        made = [stand_in_variant(self.store, f"fp16-{number}", token_s=TOKEN_S) for number in (1, 2)]
        self.names = [publish(self.store, number, variant) for number, variant in enumerate(made, 1)]
        releases.promote(self.store, self.names[0])
        self.roll_out(self.names[0])

    def start(self, release: str, *more: str) -> subprocess.Popen[str]:
        given = ["--model", MODEL, "--release", release, "--serving", json.dumps(self.serving)]
        return subprocess.Popen(
            [sys.executable, "-m", "stages.rollout", *given, "--settings", json.dumps(SETTINGS), *more],
            env=environment(self.store, stand_in=True, **{RUN_VARIABLE: f"run-{self.runs}"}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def roll_out(self, release: str, *more: str) -> tuple[int, str]:
        with self.start(release, *more) as process:
            printed = process.communicate(timeout=FEW_S)[1]
        return process.returncode, printed

    def endpoint(self) -> Endpoint:
        running = endpoint(self.store)
        assert running
        return running

    def all_up(self) -> None:
        """Wait until what was killed before is up again, so that its losses are not counted with the next kill's. A
        server that was killed too often within minutes is not started again, so the endpoint is served anew."""
        wait_until(lambda: {each.state for each in self.endpoint().servers} <= {"up", "failed"}, "all servers")
        if any(each.state == "failed" for each in self.endpoint().servers):
            release = self.endpoint().release
            stop(self.store)
            self.runs += 1
            self.roll_out(release)

    def journal(self) -> Journal:
        journal = read_journal(self.store)
        assert journal
        return journal

    def pids(self, victim: str, controller: subprocess.Popen[str], canary: str) -> list[int]:
        """The processes to kill, none if the victim is not there."""
        if victim == "controller":
            return [controller.pid] if controller.poll() is None else []
        running = endpoint(self.store)
        if running is None:
            return []
        below = psutil.Process(running.pid).children(recursive=True)
        server = running.server(canary if victim != "stable server" else running.release)
        guard = server.pid if server and server.pid else 0
        return {
            "supervisor": [running.pid],
            "proxy": [each.pid for each in below if each.name() == "envoy"],
            "guard": [guard] if guard else [],
        }.get(victim, [each.pid for each in psutil.Process(guard).children()] if guard else [])


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    made = Machine(folder)
    try:
        yield made
    finally:
        stop(made.store)
        assert processes_left(folder) == []


def kill_in_rollout(place: Machine, victim: str, state: str, draw: random.Random, losses: Losses) -> list[str]:
    """Roll out the other release, kill *victim* once the rollout is in *state*, continue or give up. Returns what is
    wrong afterwards; an empty *state* means that it was not killed."""
    place.all_up()
    stable = place.endpoint().release
    (other,) = {*place.names} - {stable}
    place.runs += 1
    before = len(releases.history(place.store))
    gives_up = draw.random() < 0.3
    with SteadyLoad(Access(place.endpoint().url, MODEL), USERS, (4, TOKENS)) as load:
        controller = place.start(other)
        wait_until(lambda: reached(place.store, f"run-{place.runs}", state) or controller.poll() is not None, state)
        time.sleep(draw.uniform(0, 0.2))
        pids = place.pids(victim, controller, other)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        losses.kills += bool(pids)
        if victim != "controller" and not gives_up:
            controller.communicate(timeout=FEW_S)
        controller.kill()
        controller.communicate()
        wrong = ended(place, other, gives_up=gives_up)
        seen = len(load.replies())
        wait_until(lambda: sum(not reply.error for reply in load.replies()[seen:]) > USERS, "answers")
    replies = load.replies()
    losses.requests += len(replies)
    losses.cut += sum(bool(reply.error) and reply.first_token_s is not None for reply in replies)
    losses.refused += sum(bool(reply.error) and reply.first_token_s is None for reply in replies)
    answered = sorted(reply.ended_s for reply in replies if not reply.error)
    losses.silent_s.append(max(later - earlier for earlier, later in itertools.pairwise(answered)))
    moves = releases.history(place.store)[before:]
    if len(moves) != len({move.id for move in moves}) or not moves:
        wrong.append(f"the history has {[(move.release, move.result) for move in moves]}")
    return wrong


def reached(store: ModelStore, run: str, state: str) -> bool:
    journal = read_journal(store)
    return journal is not None and journal.run == run and (state in {each.state for each in journal.transitions})


def ended(place: Machine, other: str, *, gives_up: bool) -> list[str]:
    """Bring the rollout to an end, and see that something is served. Returns what is wrong."""
    wrong = []
    status, printed = place.roll_out(other, *(["--abort"] if gives_up else []))
    if status not in (0, *ENDED) and "promoted already" not in printed:
        wrong.append(f"{'giving up' if gives_up else 'continuing'} ended with {status}: {printed[-300:]}")
    if endpoint(place.store) is None:  # a supervisor that is killed is started by whoever serves next
        place.runs += 1
        status, printed = place.roll_out(releases.current_release(place.store) or other)
        if status:
            wrong.append(f"serving again ended with {status}: {printed[-300:]}")
    return wrong + wrong_now(place)


def wrong_now(place: Machine) -> list[str]:
    """What is wrong with what is served once no rollout is under way."""
    running, current, wrong = endpoint(place.store), releases.current_release(place.store), []
    if not place.journal().ended:
        wrong.append(f"the rollout is {place.journal().state}")
    if releases.candidate(place.store):
        wrong.append(f"{releases.candidate(place.store)} is still the candidate")
    if running is None or (running.release, running.canary) != (current, None):
        return [*wrong, f"{running and (running.release, running.canary)} is served, {current} is in production"]
    body, until_s = {"model": MODEL, "prompt": "x", "max_tokens": 2}, time.monotonic() + ANSWERS_S
    while time.monotonic() < until_s:  # what was killed last may still be starting again
        with suppress(httpx.HTTPError):
            if httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).is_success:
                return wrong
        time.sleep(0.1)
    return [*wrong, "the endpoint does not answer"]


def kinds(draw: random.Random) -> Iterator[tuple[str, str]]:
    """All victims in all states, each time in another order."""
    every = [(victim, state) for victim in VICTIMS for state in STATES]
    while True:
        yield from draw.sample(every, len(every))
