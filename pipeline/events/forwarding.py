"""Forwarding of pushes to the EventSource of Argo Events, which asks for a Bearer token."""

from __future__ import annotations

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from pipeline.events.push import Push
from stages.parts.base.errors import ClusterRefused, ClusterUnavailable


class Forwarder:
    """Posts pushes to *url*. Failed requests are repeated; none starts later than *patience_s* after the first."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        self.url, self.patience_s = url, patience_s
        headers = {"Authorization": f"Bearer {token}"}
        # No proxy and no .netrc from the environment: they would see the token, or replace it.
        self._client = httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False)

    async def send(self, push: Push) -> None:
        """Return once the push is in the event bus.

        Raises:
            ClusterUnavailable: there was no answer, or a temporary error, until the end.
            ClusterRefused: the EventSource does not accept the token or the address.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ClusterUnavailable),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(0.1, max=2.0),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                await self._try(push)

    async def _try(self, push: Push) -> None:
        try:
            answer = await self._client.post(self.url, json=push.document())
        except httpx.TransportError as error:
            raise ClusterUnavailable(f"the EventSource does not answer: {type(error).__name__}") from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise ClusterUnavailable(f"the EventSource answers {answer.status_code}")
        if not answer.is_success:
            raise ClusterRefused(f"the EventSource refuses events of this receiver ({answer.status_code})")

    async def close(self) -> None:
        await self._client.aclose()
