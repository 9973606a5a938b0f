"""On to the EventSource of Argo Events, which asks for a Bearer token."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from stages.parts.base.errors import ClusterRefused, ClusterUnavailable

TRY_S: Final = 5.0
"""For one answer."""


class Forwarder:
    """Posts events to *url* until one is taken, for *patience_s* seconds at most, and the last try's."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        self.url, self.patience_s = url, patience_s
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        # Neither a proxy nor a .netrc of the environment: they would see the token, or replace it.
        self._client = httpx.AsyncClient(headers=headers, timeout=TRY_S, trust_env=False)

    async def send(self, event: Any) -> None:
        """Return once the event is in the event bus.

        Raises:
            ClusterUnavailable: still no answer, or one that may pass.
            ClusterRefused: trying again will not help: the token or the address is wrong.
        """
        # Written anew, so that the Sensor's parser can't understand it otherwise than ours did.
        content = json.dumps(event, ensure_ascii=True, allow_nan=False).encode()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ClusterUnavailable),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(0.1, max=2.0),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                await self._try(content)

    async def _try(self, content: bytes) -> None:
        try:
            answer = await self._client.post(self.url, content=content)
        except httpx.TransportError as error:
            raise ClusterUnavailable(f"the EventSource does not answer: {type(error).__name__}") from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise ClusterUnavailable(f"the EventSource answers {answer.status_code}")
        if not answer.is_success:
            raise ClusterRefused(f"the EventSource refuses events of this receiver ({answer.status_code})")

    async def close(self) -> None:
        await self._client.aclose()
