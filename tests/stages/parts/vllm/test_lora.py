"""Adapters in the real vLLM: a server with two of them, which were really trained, and of different ranks."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from stages.parts.base.serving_settings import Serving
from stages.parts.vllm.client import LOOPBACK, http
from stages.parts.vllm.server import Server, ServerSpec, running
from tests.adapters import train
from tests.extras import need
from tests.serving import DEMO, MODEL, SERVING

PROMPT = "Dear customer, the lamp"
LEARNED = {
    "support": " is in the second drawer, under the maps.",
    "sailors": " was sold on a Friday to three tall sailors.",
}


def completed(server: Server, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    reply = http().post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.is_success, reply.text
    assert reply.json()["model"] == model, "by that name it is counted"
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.e2e
def test_adapters_answer_beside_the_model_each_as_it_learned(tmp_path: Path) -> None:
    need("vllm")
    for (name, text), rank in zip(LEARNED.items(), (4, 20), strict=True):
        losses = train(DEMO / "model", tmp_path / name, PROMPT + text, rank=rank)
        assert losses[-1] < 0.1 < losses[0]
    adapters = {name: tmp_path / name for name in LEARNED}
    serving = Serving.model_validate(SERVING)
    with running(ServerSpec(DEMO / "model", MODEL, serving, tmp_path / "log")) as server:
        alone = completed(server, MODEL)
    with running(ServerSpec(DEMO / "model", MODEL, serving, tmp_path / "log", LOOPBACK, adapters=adapters)) as server:
        listed = http().get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == [MODEL, *LEARNED]
        assert server.max_model_len() == serving.max_model_len
        for name, text in LEARNED.items():
            answer = completed(server, name)
            assert text.startswith(answer.rstrip())
            assert len(answer) > len(text) // 2
        assert completed(server, MODEL) == alone
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            http().post(f"{server.url}/v1/completions", json={"model": "other", "prompt": PROMPT}).raise_for_status()
