"""A release's counters from Prometheus, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from stages.parts.base.errors import TransientError
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.stage import GOOD


class Prometheus(ThreadingHTTPServer):
    """Answers every instant query with ``result``, or with ``status``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.result: list[dict[str, Any]] = []
        self.status = 200
        self.queries: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Prometheus

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        assert url.path == "/api/v1/query"
        self.server.queries.append(parse_qs(url.query)["query"][0])
        said = {"status": "success", "data": {"resultType": "vector", "result": self.server.result}}
        content = json.dumps(said).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with Prometheus() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def series(name: str, value: float, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "value": [1.7e9, str(value)]}


def test_counters_are_summed_over_all_pods_including_those_that_are_gone(
    standard: OnKServe, prometheus: Prometheus
) -> None:
    api = {"handler": "/v1/completions", "method": "POST"}
    for pod in ("a", "b"):
        prometheus.result += [
            series("http_requests_total", 10, pod=pod, status="2xx", **api),
            series("http_requests_total", 1, pod=pod, status="5xx", **api),
            series("http_requests_total", 99, pod=pod, status="2xx", handler="/health", method="GET"),
            series("vllm:request_generation_tokens_sum", 160, pod=pod),
            series("vllm:time_to_first_token_seconds_sum", 2.5, pod=pod),
            series("vllm:time_to_first_token_seconds_bucket", 8, pod=pod, le="0.1"),
            series("vllm:time_to_first_token_seconds_bucket", 10, pod=pod, le="+Inf"),
        ]
    found = standard.connect(prometheus=prometheus.url).counters(GOOD)
    assert (found.answered, found.failed, found.output_tokens, found.ttft_s) == (20, 2, 320, 5.0)
    assert (found.ttft_bounds, found.ttft) == ((0.1,), (16, 20))
    (query,) = prometheus.queries
    assert query.startswith('last_over_time({__name__=~"http_requests_total|vllm:')
    assert f'slipway_endpoint="{standard.name}",slipway_release="{GOOD}"' in query


def test_a_prometheus_without_series_is_a_transient_error(standard: OnKServe, prometheus: Prometheus) -> None:
    with pytest.raises(TransientError, match=f"Prometheus has no series of {GOOD}"):
        standard.connect(prometheus=prometheus.url).counters(GOOD)


def test_a_prometheus_that_fails_or_is_gone_is_a_transient_error(standard: OnKServe, prometheus: Prometheus) -> None:
    prometheus.status = 503
    with pytest.raises(TransientError, match="Prometheus does not answer: HTTPStatusError"):
        standard.connect(prometheus=prometheus.url).counters(GOOD)
    with pytest.raises(TransientError, match="Prometheus does not answer: ConnectError"):
        standard.connect(prometheus="http://127.0.0.1:9").counters(GOOD)
