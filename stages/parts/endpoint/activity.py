"""What the endpoints on this machine do at the moment, by release and by client, from what is counted anyway: vLLM's
metrics, Envoy's access log, and the door's count of requests under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scoring.percentiles import p95
from stages.parts.base.errors import TransientError
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import access_log
from stages.parts.endpoint.access_log import LoggedRequest, LogReader
from stages.parts.endpoint.clients import NOBODY
from stages.parts.endpoint.door import UNDER_WAY, WINDOW_S
from stages.parts.endpoint.endpoint import SERVERS, Endpoint, serving_here
from stages.parts.endpoint.envoy import DOOR_SOCKET, Admin
from stages.parts.records.rollout import Counters, together
from stages.parts.vllm.client import read_metrics
from stages.parts.vllm.prometheus import read_counters, read_tokens


class ActivityReader:
    """Looks at the endpoints of the store at *root* again and again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before: dict[tuple[str, str], tuple[float, Counters, tuple[int, int]]] = {}
        self._logs: dict[str, LogReader] = {}
        self._ended: dict[str, list[LoggedRequest]] = {}
        """The requests of each model that have ended in the last minute."""

    def look(self) -> dict[str, list[dict[str, Any]]]:
        """Return a row for each release, whose rates are since the last look, and one for each client of a model."""
        running = serving_here(self._root)
        releases = [(each, release) for each in running for release in dict.fromkeys(s.release for s in each.servers)]
        return {
            "releases": [self._of_release(each, release) for each, release in releases],
            "clients": [client for each in running for client in self._of_clients(each.model)],
        }

    def _of_release(self, running: Endpoint, release: str) -> dict[str, Any]:
        servers, counted = running.replicas(release), []
        for server in servers:
            with contextlib.suppress(TransientError, ValueError):  # it is not up
                text = read_metrics(server.url, release)
                counted.append((read_counters(text, f"{server.pid} on {server.url}"), read_tokens(text)))
        share = {running.release: 100 - running.percent, running.canary: running.percent}.get(release, 0)
        row: dict[str, Any] = {"model": running.model, "release": release, "share": f"{share} %"}
        row["up"] = f"{len(counted)}/{len(servers)}"
        if not counted:
            return row
        at, now = time.monotonic(), together([counters for counters, _ in counted])
        read, written = map(sum, zip(*(tokens for _, tokens in counted), strict=True))
        row |= {"running": round(now.running), "waiting": round(now.waiting), "kv_cache_used": round(now.cache_used, 3)}
        former = self._before.get((running.model, release))
        self._before[running.model, release] = (at, now, (read, written))
        if former is None or now.restarted_since(former[1]):
            return row
        more, seconds = now.since(former[1]), at - former[0]
        return row | {
            "requests_per_s": round((more.answered + more.refused + more.failed) / seconds, 1),
            "ttft_mean_ms": round(1000 * more.ttft_s / more.ttft_count) if more.ttft_count else None,
            "tokens_in_per_s": round((read - former[2][0]) / seconds),
            "tokens_out_per_s": round((written - former[2][1]) / seconds),
        }

    def _of_clients(self, model: str) -> Iterator[dict[str, Any]]:
        folder, since, at_once = ModelStore(self._root, model).path / SERVERS, time.time() - WINDOW_S, {}
        log = self._logs.setdefault(model, LogReader(folder / access_log.NAME))
        ended = [*self._ended.get(model, ()), *log.requests()]
        self._ended[model] = [request for request in ended if request.at + request.duration_ms / 1000 > since]
        with contextlib.suppress(TransientError):
            at_once = Admin(folder, DOOR_SOCKET).ask("GET", UNDER_WAY).json()
        for client in sorted({*at_once, *(request.client or NOBODY for request in self._ended[model])}):
            requests = [request for request in self._ended[model] if (request.client or NOBODY) == client]
            ttft_ms = p95(request.ttft_ms for request in requests if request.output_tokens)
            yield {
                "model": model,
                "client": client,
                "at_once": at_once.get(client, 0),
                "requests_per_min": len(requests),
                "not_answered": sum(not 200 <= request.status < 300 for request in requests),
                "tokens_in_per_min": sum(request.prompt_tokens or 0 for request in requests),
                "tokens_out_per_min": sum(request.output_tokens or 0 for request in requests),
                "ttft_p95_ms": ttft_ms and round(ttft_ms),
            }
