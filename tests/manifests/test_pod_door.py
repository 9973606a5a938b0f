"""The door in every endpoint's pod, before the application of the installed vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cluster.door import CLOSED
from pipeline.cluster.manifests import MANIFESTS
from stages.parts.endpoint.routing import OFFERED
from tests.routes import DEVELOPMENT, METHODS, registered

ASKED = """
import asyncio, json, sys
import httpx
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--middleware", "slipway_door.Door"])
app, (paths, methods) = build_app(arguments, ("generate",)), json.load(sys.stdin)
# Nothing below the door is asked: a route of vLLM would need its engine.
reached = []

async def below(scope, receive, send):
    reached.append((scope["path"], scope["method"]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def main():
    stack = app.build_middleware_stack()
    while type(stack).__name__ != "Door":
        stack = stack.app
    stack.app = below
    found = {}
    for forwarded in ("", "192.0.2.1"):
        reached.clear()
        headers = {"x-forwarded-for": forwarded} if forwarded else {}
        transport = httpx.ASGITransport(stack)
        async with httpx.AsyncClient(transport=transport, base_url="http://pod", headers=headers) as client:
            for path in paths:
                for method in methods:
                    answer = await client.request(method, path)
                    assert answer.status_code in (200, 404)
        found[forwarded] = list(reached)
    sent = []
    async def send(message):
        sent.append(message["type"])
    await stack({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
    print(json.dumps([found[""], found["192.0.2.1"], sent]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def code() -> str:
    text: str = yaml.safe_load((MANIFESTS / "kserve/door.yaml").read_text())["data"]["slipway_door.py"]
    return text


def test_the_installed_vllm_loads_the_door_which_lets_in_what_is_offered_and_nothing_else(
    code: str, tmp_path: Path
) -> None:
    (tmp_path / "slipway_door.py").write_text(code)
    (tmp_path / "asked.py").write_text(ASKED)
    paths = sorted({*registered(), *OFFERED})
    done = subprocess.run(
        [sys.executable, "-m", "asked"],
        input=json.dumps([paths, METHODS]),
        cwd=tmp_path,
        env=os.environ | DEVELOPMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    inside, forwarded, socket = json.loads(done.stdout.splitlines()[-1])
    assert {(path, method) for path, method in forwarded} == set(OFFERED.items())
    own = {("/metrics", "GET"), ("/version", "GET")}
    assert {(path, method) for path, method in inside} == {*OFFERED.items(), *own}
    assert socket == ["websocket.close"]


def test_doctor_asks_every_route_of_the_installed_vllm() -> None:
    """But for what lies below a mount, has a parameter, or is no route but tried by other tests."""
    below = re.compile(r"/v1/?|/static/.*|/metrics/.*|/adapters/.+|/v1/responses/response_id.*")
    assert {path for path in registered() if not below.fullmatch(path)} - {*CLOSED, *OFFERED} == set()
