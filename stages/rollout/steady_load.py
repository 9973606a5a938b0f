"""A steady load of streamed completions, as clients send them, and the outcome of each request."""

from __future__ import annotations

import random
import threading
from typing import Final, Self

import httpx

from stages.parts.vllm.client import Access, trusting
from stages.parts.vllm.streaming import REQUEST_TIMEOUT_S, VOCABULARY, Reply, stream_completion

PAUSE_AFTER_FAILURE_S: Final = 0.1


class SteadyLoad:
    """Keeps *concurrency* requests in flight while its block runs; at the end each is allowed to finish. Fewer are in
    flight if users pause for *pause_s* between an answer and the next request."""

    def __init__(
        self, access: Access, *, concurrency: int, prompt_tokens: int, output_tokens: int, pause_s: float = 0.0
    ) -> None:
        self._access, self._pause_s = access, pause_s
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._ending = threading.Event()
        self._replies: list[Reply] = []
        self._users = [threading.Thread(target=self._keep_asking, args=(n,)) for n in range(concurrency)]

    def replies(self) -> list[Reply]:
        """List the outcomes of all requests that have ended so far."""
        return list(self._replies)

    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies() if reply.error]

    def __enter__(self) -> Self:
        for user in self._users:
            user.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                reply = stream_completion(client, self._access, prompt, self._output_tokens)
                self._replies.append(reply)
                self._ending.wait(max(self._pause_s, PAUSE_AFTER_FAILURE_S if reply.error else 0.0))
