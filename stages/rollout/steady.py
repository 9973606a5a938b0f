"""A steady load of streamed completions, as clients send them, and what became of each request."""

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
from stages.parts.engine.client import credentials

VOCABULARY: Final = range(100, 1000)
"""Token ids that every tokenizer has; drawn anew for each request, so that no cache answers for the model."""
REQUEST_TIMEOUT_S: Final = 300.0
PAUSE_AFTER_FAILURE_S: Final = 0.1
DATA: Final = "data: "
DONE: Final = "[DONE]"


@dataclass(frozen=True)
class Reply:
    """One request."""

    sent_s: float
    """``time.monotonic()``, as all times of one load."""
    ended_s: float
    first_token_s: float | None
    tokens: int
    release: str
    """That answered, as the proxy says or, on a cluster, the answer's fingerprint; empty if none did."""
    error: str
    """Empty if the answer came to its end."""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1000 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        if self.first_token_s is None or self.tokens < 2:
            return None
        return 1000 * (self.ended_s - self.first_token_s) / (self.tokens - 1)


class SteadyLoad:
    """As many requests in flight as *concurrency*, from entering the block until it is left; each then ends.

    Args:
        url: base of the endpoint, without ``/v1``.
        via: base URL to send to instead, where the name in *url* is not known; it is then the Host.
        pause_s: of each user between an answer and the next request; fewer are then in flight.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str,
        *,
        concurrency: int,
        prompt_tokens: int,
        output_tokens: int,
        pause_s: float = 0.0,
        via: str = "",
    ) -> None:
        self._url, self._model = f"{(via or url).rstrip('/')}/v1/completions", model
        self._headers = credentials(api_key) | ({"Host": urlsplit(url).netloc} if via else {})
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._pause_s = pause_s
        self._ending = threading.Event()
        self._replies: list[Reply] = []
        self._users = [threading.Thread(target=self._ask_again_and_again, args=(n,)) for n in range(concurrency)]

    def replies(self) -> list[Reply]:
        """Those that have ended so far."""
        return list(self._replies)

    def failed(self) -> list[Reply]:
        return [each for each in self.replies() if each.error]

    def __enter__(self) -> Self:
        for each in self._users:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for each in self._users:
            each.join()

    def _ask_again_and_again(self, user: int) -> None:
        draw = random.Random(user)
        with httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
            while not self._ending.is_set():
                reply = self._ask(client, draw.choices(VOCABULARY, k=self._prompt_tokens))
                self._replies.append(reply)
                self._ending.wait(max(self._pause_s, PAUSE_AFTER_FAILURE_S if reply.error else 0.0))

    def _ask(self, client: httpx.Client, prompt: list[int]) -> Reply:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        sent_s, first_s, tokens, release = time.monotonic(), None, 0, ""
        error, said = "it was cut off", ""
        try:
            with client.stream("POST", self._url, json=body, headers=self._headers) as reply:
                release = reply.headers.get(RELEASE_HEADER, "")
                if not reply.is_success:
                    error = f"{reply.status_code} {reply.read().decode(errors='replace')[:200]}"
                else:
                    for data in (line.removeprefix(DATA) for line in reply.iter_lines() if line.startswith(DATA)):
                        if data == DONE:
                            error = said
                            continue
                        event: dict[str, Any] = json.loads(data)
                        release = release or event.get("system_fingerprint") or ""
                        said = said or str(event.get("error") or "")  # vLLM ends a failed stream with [DONE] too
                        if event.get("choices"):
                            first_s, tokens = first_s or time.monotonic(), tokens + 1
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Reply(sent_s, time.monotonic(), first_s, tokens, release, error)
