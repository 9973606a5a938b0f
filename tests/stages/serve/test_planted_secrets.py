"""Planted secrets are found nowhere in what a run leaves: arguments, environments of children, logs, records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from stages.parts.base.program import without_secrets
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import endpoint, stop
from tests.hub.models import Stages, tiny_model
from tests.hub.server import HubServer
from tests.serving import MODEL, publish, stand_in_variant
from tests.stages.serve.test_serve import serve

TOKEN, KEY, CLOUD = "hf_planted-4711", "planted-key-of-the-endpoint", "planted-key-of-a-cloud"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    place = ModelStore(tmp_path / "store", MODEL)
    yield place
    stop(place)


def holds(path: Path, secrets: tuple[str, ...]) -> bool:
    content = path.read_bytes()
    return any(secret.encode() in content for secret in secrets)


def test_a_planted_token_and_a_clients_key_are_found_nowhere(hub: HubServer, store: ModelStore, tmp_path: Path) -> None:
    hub.add_repo("org/tiny", tiny_model(), gated=True)
    hub.allow(TOKEN, "org/tiny")
    stages, secrets = Stages(hub.url, tmp_path, {"SLIPWAY_RUN": "r1"}), {"HF_TOKEN": TOKEN}
    acquired = stages.acquire(stages.resolve(**secrets), **secrets)
    assert acquired.returncode == 0, acquired.stderr
    publish(store, 1, stand_in_variant(store, "fp16"))
    command = [sys.executable, "-m", "pipeline", "clients", "add", "search", "--model", MODEL]
    added = subprocess.run([*command, "--store", str(store.root)], capture_output=True, text=True, check=True)
    client = added.stdout.strip()
    planted = {"SLIPWAY_API_KEY": KEY, "HF_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": CLOUD, "SLIPWAY_RUN": "r1"}
    served = serve(store, **planted)
    assert served.returncode == 0, served.stderr
    running = endpoint(store)
    assert running
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {client}"}
    answered = httpx.post(f"{running.url}/v1/chat/completions", json=asked, headers=headers, timeout=60)
    assert answered.status_code == 200, answered.text
    supervisor = psutil.Process(running.pid)
    children = supervisor.children(recursive=True)
    assert len(children) >= 2, "Envoy and a server run"
    secrets_planted = (TOKEN, KEY, CLOUD, client)
    for process in [supervisor, *children]:
        arguments, variables = " ".join(process.cmdline()), process.environ()
        assert not [secret for secret in secrets_planted if secret in arguments]
        kept = {name for name, value in variables.items() if any(secret in value for secret in secrets_planted)}
        # vLLM reads the key of the endpoint, which the supervisor keeps, from its own variable.
        assert kept <= ({"SLIPWAY_API_KEY"} if process == supervisor else {"VLLM_API_KEY"}), arguments
    printed = acquired.stdout + acquired.stderr + served.stdout + served.stderr
    assert not [secret for secret in secrets_planted if secret in printed]
    stop(store)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and holds(path, secrets_planted)]
    assert left == []
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) > 20


def test_a_child_gets_no_secret_but_those_that_are_kept() -> None:
    variables = {"HF_TOKEN": TOKEN, "SLIPWAY_SIGNING_KEY": KEY, "PGPASSWORD": KEY, "PATH": "/bin", "TOKENIZERS": "1"}
    assert without_secrets(variables) == {"PATH": "/bin", "TOKENIZERS": "1"}
    assert without_secrets(variables, "PG") == {"PATH": "/bin", "TOKENIZERS": "1", "PGPASSWORD": KEY}
