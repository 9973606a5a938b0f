"""A client that times completions as they are streamed: to the first token, and for each one after it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx

from stages.parts.vllm.client import Access

RELEASE_HEADER: Final = "x-slipway-release"
"""The header that names the release which answered, if the answer came through the endpoint of one machine."""
VOCABULARY: Final = range(100, 1000)
"""Token ids that every tokenizer has. Prompts are drawn of them, so that no cache answers for the model."""
REQUEST_TIMEOUT_S: Final = 300.0
DATA: Final = "data: "
DONE: Final = "[DONE]"


@dataclass
class Reply:
    """The outcome of one request. Times are from ``time.monotonic()``."""

    sent_s: float
    ended_s: float = 0.0
    first_token_s: float | None = None
    tokens: int = 0
    release: str = ""
    """The release that answered: from the proxy's header or, on a cluster, the answer's fingerprint."""
    error: str = "it was cut off"
    """Empty if the answer was complete."""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1000 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        if self.first_token_s is None or self.tokens < 2:
            return None
        return 1000 * (self.ended_s - self.first_token_s) / (self.tokens - 1)


def stream_completion(
    client: httpx.Client, access: Access, prompt: list[int], output_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S
) -> Reply:
    """Send a completion of token ids, and read its stream. Whatever is not complete within *timeout_s* is an error."""
    body = {"model": access.model, "prompt": prompt, "max_tokens": output_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    request = {"json": body, "headers": access.headers, "timeout": timeout_s}
    reply = Reply(sent_s=time.monotonic())
    try:
        with client.stream("POST", access.at("/v1/completions"), **request) as response:  # type: ignore[arg-type]
            _read(response, reply, reply.sent_s + timeout_s)
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    except ValueError as error:
        reply.error = f"an event is not JSON: {error}"
    reply.ended_s = time.monotonic()
    return reply


def _read(response: httpx.Response, reply: Reply, deadline_s: float) -> None:
    reply.release = response.headers.get(RELEASE_HEADER, "")
    if not response.is_success:
        reply.error = f"{response.status_code} {response.read().decode(errors='replace')[:200]}"
        return
    reported = ""
    for data in (line.removeprefix(DATA) for line in response.iter_lines() if line.startswith(DATA)):
        if data == DONE:
            reply.error = reported
            continue
        if time.monotonic() > deadline_s:
            reply.error = "it took too long"
            return
        event: dict[str, Any] = json.loads(data)
        reply.release = reply.release or event.get("system_fingerprint") or ""
        reported = reported or str(event.get("error") or "")  # vLLM ends a failed stream with [DONE], too
        if event.get("choices"):
            reply.first_token_s = reply.first_token_s or time.monotonic()
            reply.tokens += 1
