"""``make demo``: the main job on a small model, from a Hub's download to an answered chat completion.

Everything is real but the Hub, which is a server of ours on this machine that speaks its protocol.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

import httpx

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.machine.hardware import processor
from stages.parts.machine.process import Contained
from tests.demo import DEMO, MODEL
from tests.hub.server import HubServer

STORE: Final = Path(".slipway")
QUESTION: Final = "What is a list?"
ANSWER_TOKENS: Final = 48


def main() -> int:
    with HubServer() as hub:
        hub.add_repo(MODEL, DEMO / "model")
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "pipeline", "run", MODEL]
        command += ["--config", str(DEMO / "slipway.yaml"), "--store", str(STORE)]
        if (here := processor()) and not here.avx512:  # gptq is left out here, and the run says why
            command += ["--set", "optimize.variants=[fp16, gptq, int8]"]
        with Contained(command, environment=environment) as run:
            status = run.wait()
    if status != 0:
        return status
    served = endpoint(ModelStore(STORE, MODEL))
    assert served is not None, "the run ended well, so its endpoint must be up"
    ask(served.url)
    return 0


def ask(url: str) -> None:
    """One chat completion, as any OpenAI client would ask for it."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    answer = response.json()["choices"][0]["message"]["content"].strip()
    print(f"\nasked     {QUESTION}\nanswered  {' '.join(answer.split())}")
    print(f"""
ask it yourself:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'
stop it:
  make demo-stop""")


if __name__ == "__main__":
    sys.exit(main())
