"""slipway drill, on an endpoint of stand-in servers behind the real Envoy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.store import ModelStore, swap_link
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.releases.release import CANDIDATE, current_release
from tests.serving import MODEL, ROLLOUT, SERVING, Said, environment, publish, stage, stand_in_variant

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


def document(said: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_a_rollback_drill_goes_back_and_forward_without_a_failed_request(served: Served) -> None:
    said = served.drill("rollback", "--json")
    assert said.returncode == 0, said.stderr
    told = document(said)
    assert told["held"]
    assert (told["release"], told["previous"], told["warm"]) == (served.new, served.old, True)
    assert told["answers"]["failed"] == 0
    assert set(told["answers"]["releases"]) == {served.old, served.new}
    assert f"moving all traffic to {served.old}" in said.stderr
    found = endpoint(served.store)
    assert found
    assert found.release == current_release(served.store) == served.new


def test_a_load_drill_that_misses_its_latency_target_fails_and_says_by_how_much(served: Served) -> None:
    said = served.drill("load", "--peak", "2", "--seconds", "1", "--tpot-ms", "1")
    assert said.returncode == 44
    assert "TPOT p95" in said.stderr
    assert "allowed 1 ms" in said.stderr
    assert "4 requests in flight" in said.stderr


def test_a_failed_drill_is_still_one_document_for_programs(served: Served) -> None:
    said = served.drill("load", "--seconds", "1", "--ttft-ms", "0.001", "--json")
    assert said.returncode == 44
    told = document(said)
    assert (told["held"], told["concurrency"]) == (False, 6)


@pytest.mark.slow
def test_a_crash_drill_counts_what_failed_and_waits_for_the_recovery(served: Served) -> None:
    said = served.drill("crash", "--json")
    assert said.returncode == 0, said.stderr
    told = document(said)
    assert told["recovered_s"] > 0
    assert told["answers"]["failed"] <= 3
    assert told["answers"]["releases"][served.old] > 0, "the standby's"


def test_without_an_endpoint_there_is_nothing_to_drill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "drill", "crash", MODEL, "--store", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 33
    assert f"slipway serve {MODEL}" in said.stderr
