"""A steady load of streamed completions, as clients send them, and the outcome of each request."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from stages.parts.endpoint.envoy_config import RELEASE_HEADER
from stages.parts.vllm.client import credentials, trusting

VOCABULARY: Final = range(100, 1000)
"""Token ids that every tokenizer has. Each request draws new ones, so that no cache answers for the model."""
REQUEST_TIMEOUT_S: Final = 300.0
PAUSE_AFTER_FAILURE_S: Final = 0.1
DATA: Final = "data: "
DONE: Final = "[DONE]"


@dataclass(frozen=True)
class Access:
    """How clients reach a model's endpoint."""

    url: str
    """Base URL, without ``/v1``."""
    model: str
    api_key: str = ""
    via: str = ""
    """Base URL to send requests to instead, where the host name in *url* can't be resolved; it is sent as the Host
    header."""
    certificate: str | None = None
    """See ``trusting``."""

    @property
    def completions_url(self) -> str:
        return f"{(self.via or self.url).rstrip('/')}/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        return credentials(self.api_key) | ({"Host": urlsplit(self.url).netloc} if self.via else {})


@dataclass(frozen=True)
class Reply:
    """The outcome of one request. Times are from ``time.monotonic()``."""

    sent_s: float
    ended_s: float
    first_token_s: float | None
    tokens: int
    release: str
    """The release that answered: from the proxy's header or, on a cluster, the answer's fingerprint. Empty: none."""
    error: str
    """Empty if the answer was complete."""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1000 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        if self.first_token_s is None or self.tokens < 2:
            return None
        return 1000 * (self.ended_s - self.first_token_s) / (self.tokens - 1)


class SteadyLoad:
    """Keeps *concurrency* requests in flight while its block runs; at the end each is allowed to finish.

    Args:
        pause_s: each user's pause between an answer and the next request; fewer requests are then in flight.
    """

    def __init__(
        self, access: Access, *, concurrency: int, prompt_tokens: int, output_tokens: int, pause_s: float = 0.0
    ) -> None:
        self._access, self._pause_s = access, pause_s
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._ending = threading.Event()
        self._replies: list[Reply] = []
        self._users = [threading.Thread(target=self._keep_asking, args=(n,)) for n in range(concurrency)]

    def replies(self) -> list[Reply]:
        """The outcomes of all requests that have ended so far."""
        return list(self._replies)

    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies() if reply.error]

    def __enter__(self) -> Self:
        for user in self._users:
            user.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for user in self._users:
            user.join()

    def _keep_asking(self, user: int) -> None:
        draw = random.Random(user)
        with httpx.Client(
            trust_env=False, timeout=REQUEST_TIMEOUT_S, verify=trusting(self._access.certificate)
        ) as client:
            while not self._ending.is_set():
                prompt = draw.choices(VOCABULARY, k=self._prompt_tokens)
                reply = ask(client, self._access, prompt, self._output_tokens)
                self._replies.append(reply)
                self._ending.wait(max(self._pause_s, PAUSE_AFTER_FAILURE_S if reply.error else 0.0))


def ask(
    client: httpx.Client, access: Access, prompt: list[int], output_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S
) -> Reply:
    """Send a completion of token ids, and read its stream. Whatever is not complete within *timeout_s* is an error."""
    body = {
        "model": access.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s, stream = time.monotonic(), _Stream()
    try:
        with client.stream(
            "POST", access.completions_url, json=body, headers=access.headers, timeout=timeout_s
        ) as reply:
            stream.read(reply, sent_s + timeout_s)
    except httpx.HTTPError as failure:
        stream.error = f"{type(failure).__name__}: {failure}"
    except ValueError as failure:
        stream.error = f"an event is not JSON: {failure}"
    return Reply(sent_s, time.monotonic(), stream.first_s, stream.tokens, stream.release, stream.error)


@dataclass
class _Stream:
    """What a streamed answer has shown so far."""

    first_s: float | None = None
    tokens: int = 0
    release: str = ""
    error: str = "it was cut off"

    def read(self, reply: httpx.Response, deadline_s: float) -> None:
        self.release = reply.headers.get(RELEASE_HEADER, "")
        if not reply.is_success:
            self.error = f"{reply.status_code} {reply.read().decode(errors='replace')[:200]}"
            return
        reported = ""
        for data in (line.removeprefix(DATA) for line in reply.iter_lines() if line.startswith(DATA)):
            if data == DONE:
                self.error = reported
                continue
            if time.monotonic() > deadline_s:
                self.error = "it took too long"
                return
            event: dict[str, Any] = json.loads(data)
            self.release = self.release or event.get("system_fingerprint") or ""
            reported = reported or str(event.get("error") or "")  # vLLM ends a failed stream with [DONE], too
            if event.get("choices"):
                self.first_s, self.tokens = self.first_s or time.monotonic(), self.tokens + 1
