"""slipway drill, on an endpoint of stand-in servers behind the real Envoy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.parts.base.errors import ConfigError, DrillFailed, Interrupted
from stages.parts.base.files import swap_link
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import SERVERS, endpoint
from stages.parts.endpoint.envoy import ROUTER, Admin
from stages.parts.records.drills import Drill, drilled
from stages.parts.releases.release import CANDIDATE, METRICS, current_release
from stages.rollout.drills import BY_NAME
from tests.serving import MODEL, ROLLOUT, SERVING, Said, environment, publish, stage, stand_in_variant, wait_until

FAST = ("--set", "workload.concurrency=3", "--set", "workload.prompt_tokens=8", "--set", "workload.output_tokens=8")


@dataclass(frozen=True)
class Served:
    store: ModelStore
    old: str
    new: str

    def drill(self, *arguments: str) -> Said:
        command = [sys.executable, "-m", "pipeline", "drill", arguments[0], MODEL, *arguments[1:], *FAST]
        variables = environment(self.store, stand_in=True)
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two releases, the second rolled out and the first one standing by."""
    store = ModelStore(tmp_path_factory.mktemp("drills") / "store", MODEL)
    old = publish(store, 1, stand_in_variant(store, "fp16", token_s=0.01))
    serve(store)
    new = publish(store, 2, stand_in_variant(store, "awq", token_s=0.01, another="model"))
    swap_link(store.production, Path("releases") / old)  # as select leaves it: what is new waits
    swap_link(store.path / CANDIDATE, Path("releases") / new)
    serve(store)
    yield Served(store, old, new)
    stage("serve", "--stop", variables=environment(store))


def serve(store: ModelStore) -> None:
    flags = ["--serving", json.dumps(SERVING), "--rollout", json.dumps(ROLLOUT)]
    said = stage("serve", *flags, variables=environment(store, stand_in=True))
    assert said.returncode == 0, said.stderr


def only(said: Said) -> Drill:
    """The only drill of a document."""
    (drill,) = json.loads(said.stdout)["drills"]
    return Drill.model_validate(drill)


def test_a_rollback_drill_goes_back_and_forward_without_a_failed_request(served: Served) -> None:
    said = served.drill("rollback", "--json")
    assert said.returncode == 0, said.stderr
    drill = only(said)
    assert drill.failures == ()
    assert (drill.release, drill.figures["previous"], drill.figures["warm"]) == (served.new, served.old, True)
    assert drill.answers.failed == 0
    assert set(drill.answers.releases) == {served.old, served.new}
    assert f"moving all traffic to {served.old}" in said.stderr
    found = endpoint(served.store)
    assert found
    assert found.release == current_release(served.store) == served.new


def test_a_load_drill_keeps_its_result(served: Served) -> None:
    said = served.drill("load", "--short", "--peak", "8")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("load          held")
    assert "load: held, after" in said.stderr
    (kept,) = [each for each in drilled(served.store, served.new) if each.drill == "load"]
    assert (kept.short, kept.figures["peak_per_s"], kept.answers.failed) == (True, 8, 0)


def test_without_a_peak_nothing_is_begun(served: Served) -> None:
    said = served.drill("all", "--short")
    assert (said.returncode, said.stdout) == (ConfigError.exit_code, "")
    assert "the peak is not known" in said.stderr
    assert "add --peak" in said.stderr
    assert {each.drill for each in drilled(served.store, served.new)} <= {"load", "rollback"}


def test_requests_are_those_that_the_release_was_measured_with_unless_a_workload_is_named(served: Served) -> None:
    record = served.store.releases / served.new / METRICS
    record.write_text(json.dumps({"workload": {"request_rate_per_s": 8.0, "output_tokens": 1}}))
    measured = only(served.drill("load", "--short", "--json"))
    assert (measured.figures["peak_per_s"], measured.figures["tpot_p95_ms"]) == (8, None), "of one token each"
    named = served.drill("load", "--short", "--workload", "chat")
    assert "the peak is not known" in named.stderr
    record.unlink()


def test_a_drill_that_fails_says_why_and_is_still_one_document_for_programs(served: Served) -> None:
    said = served.drill("kv-full", "--short", "--peak", "8", "--json")
    assert said.returncode == DrillFailed.exit_code
    (failure,) = only(said).failures
    assert "of the KV cache, so that nothing is shown" in failure
    assert failure in said.stderr


def test_an_interrupted_drill_ends_at_once_and_leaves_nothing_behind(served: Served) -> None:
    before = {each.drill for each in drilled(served.store, served.new)}
    command = [sys.executable, "-m", "pipeline", "drill", "slow-client", MODEL, "--peak", "8", *FAST]
    variables = environment(served.store, stand_in=True)
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    admin = Admin(served.store.path / SERVERS)
    in_flight = f"http.{ROUTER}.downstream_rq_active"
    wait_until(lambda: admin.stats(f"^{in_flight}$")[in_flight] > 20, "slow clients")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert "Traceback" not in said
    wait_until(lambda: admin.stats(f"^{in_flight}$")[in_flight] == 0, "no request")
    assert {each.drill for each in drilled(served.store, served.new)} == before


@pytest.mark.slow
def test_all_drills_are_done_and_those_that_are_not_possible_here_are_named(served: Served) -> None:
    said = served.drill("all", "--short", "--peak", "8", "--json")
    document = json.loads(said.stdout)
    failed = {each["drill"] for each in document["drills"] if each["failures"]}
    assert [each["drill"] for each in document["drills"]] == [name for name in BY_NAME if name != "scale"]
    assert failed == {"kv-full"}, "the stand-in has no KV cache"
    assert said.returncode == DrillFailed.exit_code
    assert list(document["not_possible"]) == ["scale"]
    crash = next(each for each in document["drills"] if each["drill"] == "crash")
    assert crash["answers"]["releases"][served.old] > 0, "the standby's"
    assert crash["answers"]["failed"] <= 3


def test_without_an_endpoint_there_is_nothing_to_drill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "drill", "crash", MODEL, "--store", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 33
    assert f"slipway serve {MODEL}" in said.stderr
