from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.demo import DEMO, MODEL
from tests.end_to_end.command_line import TOKEN, VARIANTS, Pipeline, processes_naming, wait_until_gone
from tests.hub.server import HubServer


@pytest.fixture(scope="session")
def demo_hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.tokens[TOKEN] = {MODEL}
        server.add_repo(MODEL, DEMO / "model", private=True)
        yield server


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory, demo_hub: HubServer) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("store"), demo_hub)
    yield made
    made.call("serve", MODEL, "--stop")
    assert processes_naming(str(made.root)) == []


@pytest.fixture(scope="session")
def finished(pipeline: Pipeline) -> dict[str, Any]:
    """What ``slipway run --json`` printed, after two runs that were killed: while quantizing, and after a block."""
    pipeline.killed_when(f"optimize-{VARIANTS[1]}", "")
    wait_until_gone(str(pipeline.root))
    pipeline.killed_when("evaluate", "after block 1")
    wait_until_gone(str(pipeline.root))
    assert not (pipeline.store.production).exists()
    ended = pipeline.run("--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
