"""A fixed part of what ``make campaign`` does for long: nothing is lost, and nothing half-made is used."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.parts.base.files import exclusive
from tests.campaign import faults, hosts, kills, power, rollouts, steps, visibility
from tests.campaign.kills import Kill, Known
from tests.campaign.steps import Hub, Place
from tests.campaign.visibility import Hosts

KILLS = 3
"""Of each step."""
EVERY = 17
"""Of the states after a loss of power, so many-th is looked at."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with steps.hub() as served:
        yield served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign").resolve()


@pytest.fixture(scope="module")
def known(folder: Path, hub: Hub) -> dict[str, Known]:
    return {each.step.name: each for each in kills.undisturbed(folder, hub, ("fp16",))}


def test_a_program_that_is_killed_at_any_call_is_run_again_and_nothing_is_lost(
    known: dict[str, Known], hub: Hub, tmp_path: Path
) -> None:
    place, draw, every = Place(tmp_path, hub), random.Random(1), kills.each_call([*known.values()])
    for step in known.values():
        of_step = [kill for kill in every if kill.known is step]
        for kill in draw.sample(of_step, min(KILLS, len(of_step))):
            assert kills.killed(kill, place) == (True, []), str(kill)


def test_when_power_fails_a_store_has_what_it_had_or_what_was_made(
    known: dict[str, Known], folder: Path, hub: Hub, tmp_path: Path
) -> None:
    place, draw, looked_at = Place(tmp_path, hub), random.Random(1), 0
    for step in [each for each in known.values() if each.step.killed]:
        for failure in power.failures(step, folder / "undisturbed" / "store", place.store.root, draw, EVERY):
            assert power.wrong_after(step, place) == [], failure.after
            if failure.at_the_end:
                assert power.lost_at_the_end(step, place) == [], failure.after
            looked_at += 1
    assert looked_at > 100


def test_a_program_that_makes_nothing_durable_is_noticed(
    known: dict[str, Known], folder: Path, hub: Hub, tmp_path: Path
) -> None:
    place, publish = Place(tmp_path, hub), known["publish"]
    hasty = Known(publish.step, publish.before, [c for c in publish.calls if c.kind != "fsync"], 1.0, publish.after)
    noticed = [
        power.wrong_after(hasty, place) + (power.lost_at_the_end(hasty, place) if failure.at_the_end else [])
        for failure in power.failures(hasty, folder / "undisturbed" / "store", place.store.root, random.Random(1))
        if failure.after.split()[-4] == "rename" or failure.at_the_end
    ]
    texts = [text for wrong in noticed for text in wrong]
    assert any("is not valid" in text for text in texts)
    assert any("missing instead of" in text for text in texts)


def test_what_a_kill_left_is_noticed(known: dict[str, Known], hub: Hub, tmp_path: Path) -> None:
    place, publish = Place(tmp_path, hub), known["publish"]
    number = next(n for n, call in enumerate(publish.calls, 1) if call.path.endswith("/candidate_metrics.json"))
    steps.copy(publish.before, place.store.root)
    assert place.run(publish.step, f"kill:{number}:{signal.SIGKILL}")[0] == -signal.SIGKILL
    (left,) = steps.unreferenced(place.store)
    assert left.startswith(".candidate_metrics.json.")
    told, different = place.again(publish.step, publish.after)
    assert told == f"left: {left}", "it may be another process's until an hour has passed"
    assert different.startswith(left)


def test_a_rollback_that_was_done_when_it_was_killed_is_not_asked_to_go_back_further(
    known: dict[str, Known], hub: Hub, tmp_path: Path
) -> None:
    back = known["go back"]
    assert kills.killed(Kill(back, len(back.calls), signal.SIGKILL), Place(tmp_path, hub)) == (True, [])


def test_a_kill_at_a_random_time_is_the_same(known: dict[str, Known], hub: Hub, tmp_path: Path) -> None:
    kill = Kill(known["acquire"], 0, signal.SIGKILL, after_s=0.05)
    assert kills.killed(kill, Place(tmp_path, hub)) == (True, [])


@pytest.mark.parametrize("kind", faults.DISK)
def test_a_disk_that_fails_at_any_call_loses_nothing_and_is_named(
    known: dict[str, Known], hub: Hub, tmp_path: Path, kind: str
) -> None:
    place, draw, every = Place(tmp_path, hub), random.Random(3), faults.every_call([*known.values()])
    for step in known.values():
        of_step = [number for each, fault, number in every if (each, fault) == (step, kind)]
        for number in draw.sample(of_step, min(1, len(of_step))):
            assert faults.at_a_call(step, place, kind, number) == [], f"{step.step.name} at {number}"


def test_a_disk_that_is_too_small_or_read_only_loses_nothing_and_is_named(
    known: dict[str, Known], hub: Hub, tmp_path: Path
) -> None:
    place = Place(tmp_path / "small", hub)
    place.folder.mkdir()
    (place.folder / "store").symlink_to(tmp_path / "disk" / "store")
    with faults.small_disk(tmp_path / "disk") as change:
        if change is None:
            pytest.skip("needs the right to mount a small file system")
        for name in ("acquire", "make fp16", "publish"):
            for room in (None, 0.1, 0.6):
                assert faults.on_a_small_disk(known[name], place, change, room) == [], (name, room)


@pytest.mark.parametrize("kind", faults.HUB)
def test_a_hub_that_fails_loses_nothing_and_is_named(
    known: dict[str, Known], hub: Hub, tmp_path: Path, kind: str
) -> None:
    assert faults.of_the_hub(known["acquire"], Place(tmp_path, hub), kind, random.Random(1)) == []


@pytest.mark.parametrize(
    "victim",
    ["controller", *(pytest.param(each, marks=pytest.mark.slow) for each in rollouts.VICTIMS if each != "controller")],
)
def test_a_rollout_goes_on_after_a_kill_and_the_endpoint_answers(victim: str, tmp_path: Path) -> None:
    losses = rollouts.Losses()
    with rollouts.machine(tmp_path.resolve()) as place:
        assert rollouts.kill_in_rollout(place, victim, "observing", random.Random(2), losses) == []
    assert losses.kills == 1
    if victim == "controller":
        assert (losses.cut, losses.refused) == (0, 0)


@pytest.fixture(scope="module")
def two_hosts(known: dict[str, Known], folder: Path, hub: Hub) -> Iterator[Hosts]:
    if why := hosts.why_not():
        pytest.skip(why)
    with visibility.two_hosts(folder / "hosts", hub, [*known.values()]) as mounted:
        yield mounted


def test_a_stage_sees_what_the_one_before_it_did_on_another_host(known: dict[str, Known], two_hosts: Hosts) -> None:
    for name, wrong in visibility.relayed(two_hosts, [*known.values()][:4]):
        assert wrong == [], name


@pytest.mark.parametrize("scene", visibility.SCENES)
def test_what_is_decided_on_one_host_follows_from_what_the_other_did(
    known: dict[str, Known], two_hosts: Hosts, scene: str
) -> None:
    assert visibility.SCENES[scene](two_hosts, known) == []


def test_what_two_hosts_do_at_once_is_done_once(known: dict[str, Known], two_hosts: Hosts) -> None:
    for name in ("make fp16", "publish", "put aside", "publish another"):
        assert visibility.at_once(two_hosts, known[name]) == [], name


def test_a_reader_on_another_host_finds_nothing_wrong(known: dict[str, Known], two_hosts: Hosts) -> None:
    looks, wrong = visibility.read_meanwhile(two_hosts, known["publish another"])
    assert (looks > 1, wrong) == (True, [])


def test_releases_are_chosen_one_after_the_other(known: dict[str, Known], hub: Hub, tmp_path: Path) -> None:
    place, publish = Place(tmp_path, hub), known["publish"]
    steps.copy(publish.before, place.store.root)
    with exclusive(place.store.lock("select"), "the test"):
        process = place.start(publish.step)
        first = process.stdout.readline()
        is_published = place.store.releases.exists()
    process.communicate(timeout=steps.TIMEOUT_S)
    assert ("waiting: select" in first, is_published, process.returncode) == (True, False, 0)
