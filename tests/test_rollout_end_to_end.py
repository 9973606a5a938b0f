"""Rollouts on one machine with real vLLM servers, Envoy, and clients that ask all the while.

A release whose weights were damaged after it was measured, which answers fluently and wrongly, is tried first; then a
good one, which is promoted; then traffic goes back and forth between the two.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from stages import releases
from stages.errors import RolledBack
from stages.evaluate.probes import record_probes
from stages.releases import PROBES
from stages.rollout.drills import Answers, RollbackDrill, answers, drill_rollback
from stages.rollout.journal import Journal
from stages.rollout.local.target import OneMachine
from stages.rollout.machine import roll_out
from stages.rollout.plan import DEPLOY
from stages.rollout.settings import Rollout
from stages.rollout.steady import SteadyLoad
from stages.rollout.target import Counters
from stages.serve.endpoint import Endpoint, endpoint, stop
from stages.settings import Serving, Workload
from stages.store import STORE_VARIABLE, ModelStore, swap_link, write_json
from tests.serving import DEMO, MODEL, REPOSITORY, SERVING, living, processes_with

pytestmark = pytest.mark.e2e
API_KEY = "key-that-every-client-has"
STABLE, GARBAGE, GOOD = "0001-base-000000000001", "0002-gptq-000000000002", "0003-fp16-000000000003"
USERS = 2
PAUSE_S = 4.0
"""Of the one user while a server starts. vLLM's worker keeps a core busy for a second after each request: with more,
two cores would have little left to start another server with."""
ROLLBACK_LIMIT_S = 30.0
WORKLOAD = Workload(
    name="small", prompt_tokens=16, output_tokens=16, concurrency=USERS, requests=8, quality_tasks=("none",)
)
# Three servers and the clients share two cores: what this shows is the moving of traffic, not latencies.
SETTINGS = Rollout(
    steps=(50, 100),
    step_s=3,
    min_requests=20,
    step_timeout_s=120,
    poll_s=0.5,
    ttft_ratio=5,
    ttft_slack_ms=2000,
    tpot_ratio=5,
    tpot_slack_ms=500,
    speed_ratio=0,
)


@dataclass(frozen=True)
class Played:
    """What happened."""

    store: ModelStore
    refusal: RolledBack
    after_the_refusal: Endpoint
    meanwhile: Answers
    """Of the clients, from the first canary's start to the second one's promotion."""
    journal: Journal
    """Of the good release's rollout."""
    after_the_promotion: Endpoint
    counted: Counters
    drill: RollbackDrill
    last: Endpoint


def released(store: ModelStore, name: str) -> Path:
    folder = store.releases / name
    shutil.copytree(DEMO / "model", folder)
    return folder


def damage(folder: Path) -> None:
    """Move the embeddings by half their rows: every word now means another one."""
    path = folder / "model-00001-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    low, high = (start + each for each in header["model.embed_tokens.weight"]["data_offsets"])
    middle = (low + high) // 2
    data[low:high] = data[middle:high] + data[low:middle]
    path.write_bytes(data)


def cast(folder: Path) -> None:
    """The same weights in float16."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        save_file({name: each.to(torch.float16) for name, each in load_file(path).items()}, path, {"format": "pt"})


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    store = ModelStore(tmp_path_factory.mktemp("rollout") / "store", MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_API_KEY", API_KEY)
        patch.setenv(STORE_VARIABLE, str(store.root))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]))
        try:
            yield play(store)
        finally:
            family = processes_with(str(store.path))
            stop(store)
            assert not living(family)


def play(store: ModelStore) -> Played:
    folders = [released(store, name) for name in (STABLE, GARBAGE, GOOD)]
    damage(store.releases / GARBAGE)
    cast(store.releases / GOOD)
    swap_link(store.production, Path("releases") / STABLE)
    target = OneMachine(store, MODEL, Serving.model_validate(SERVING))
    target.deploy(STABLE)
    recorded = [each.model_dump(mode="json") for each in record_probes(target.url(STABLE), MODEL, API_KEY)]
    for folder in folders:  # as they were measured: the damage came later
        write_json(folder / PROBES, recorded)
    with load(target, users=1, pause_s=PAUSE_S) as thin:
        with pytest.raises(RolledBack) as refusal:
            roll_out(store, target, GARBAGE, SETTINGS)
        after_the_refusal = existing(store)
        roll_out(store, target, GOOD, SETTINGS, until=DEPLOY)
    with load(target, users=USERS) as steady:
        journal = roll_out(store, target, GOOD, SETTINGS)
        after_the_promotion = existing(store)
    counted = target.counters(GOOD)
    drill = drill_rollback(store, target, WORKLOAD, SETTINGS, print)
    return Played(
        store=store,
        refusal=refusal.value,
        after_the_refusal=after_the_refusal,
        meanwhile=answers([*thin.replies(), *steady.replies()]),
        journal=journal,
        after_the_promotion=after_the_promotion,
        counted=counted,
        drill=drill,
        last=existing(store),
    )


def load(target: OneMachine, *, users: int, pause_s: float = 0.0) -> SteadyLoad:
    url = target.endpoint()
    return SteadyLoad(url, MODEL, API_KEY, concurrency=users, prompt_tokens=16, output_tokens=16, pause_s=pause_s)


def existing(store: ModelStore) -> Endpoint:
    found = endpoint(store)
    assert found
    return found


def test_a_release_that_answers_wrongly_never_gets_a_request_and_is_withdrawn(played: Played) -> None:
    assert GARBAGE in str(played.refusal)
    assert "agree" in str(played.refusal)
    assert played.meanwhile.releases.get(GARBAGE, 0) == 0
    assert (played.after_the_refusal.release, played.after_the_refusal.canary) == (STABLE, None)


def test_a_good_release_is_promoted_step_by_step(played: Played) -> None:
    assert played.journal.state == "promoted"
    assert [each.percent for each in played.journal.transitions if each.state == "observing"] == [50, 100]
    assert (played.after_the_promotion.release, played.after_the_promotion.standby) == (GOOD, STABLE)
    assert played.meanwhile.releases[GOOD] > 0


def test_no_client_noticed(played: Played) -> None:
    assert played.meanwhile.errors == ()
    assert played.meanwhile.failed == 0
    assert played.meanwhile.releases[STABLE] > 20


def test_vllms_own_metrics_are_understood(played: Played) -> None:
    assert played.counted.answered >= played.meanwhile.releases[GOOD]
    assert played.counted.failed == 0
    assert played.counted.output_tokens >= 16 * played.meanwhile.releases[GOOD]
    assert played.counted.in_flight_s > 0
    assert played.counted.ttft_s.counts[-1] >= played.meanwhile.releases[GOOD]
    assert played.counted.tpot_s.counts[-1] >= played.meanwhile.releases[GOOD]


def test_a_rollback_under_load_takes_seconds_and_fails_no_request(played: Played) -> None:
    assert (played.drill.release, played.drill.previous, played.drill.warm) == (GOOD, STABLE, True)
    assert played.drill.failures() == []
    assert played.drill.rollback_s < ROLLBACK_LIMIT_S
    assert played.drill.answers.failed == 0
    assert played.drill.answers.releases[STABLE] > 0
    assert played.drill.answers.releases[GOOD] > 0
    assert played.last.release == GOOD
    assert releases.current_release(played.store) == GOOD
    assert [each.kind for each in releases.history(played.store)][-2:] == ["rollback", "rollback"]


def test_an_openai_client_streams_through_the_proxy_with_the_key_alone(played: Played) -> None:
    with openai.OpenAI(base_url=f"{played.last.url}/v1", api_key=API_KEY) as client:
        events = client.completions.create(model=MODEL, prompt="A list", max_tokens=8, stream=True)
        assert len(list(events)) >= 2
    with (
        openai.OpenAI(base_url=f"{played.last.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_the_servers_listen_on_this_machine_alone(played: Played) -> None:
    supervisor = psutil.Process(played.last.pid)
    listening = {
        each.laddr.ip
        for process in supervisor.children(recursive=True)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1"}
