"""Doctor asks endpoints for every route of vLLM, as clients would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipeline.cluster.doctor import check_cluster
from pipeline.cluster.door import CLOSED
from pipeline.cluster.install import install
from stages.rollout.kserve.objects import endpoint_name
from tests.kubernetes.objects import Resource
from tests.pipeline.argo.argo_bench import definition, with_kserve
from tests.stages.parts.endpoint.test_offered_routes import listening


class Gateway(BaseHTTPRequestHandler):
    """A gateway that knows one host, and vLLM without a door behind it."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))
        status = 404
        if self.headers["Host"] == self.server.host:
            status = {"/health": 200, "/metrics": 200, "/invocations": 405}.get(self.path, 404)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gateway(host: str) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.asked, server.host = [], host  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def serving(server: Any, namespace: str) -> None:
    """An endpoint in mode standard."""
    server.register(Resource("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices"))
    annotations = {"slipway/model": "org/model", "serving.kserve.io/deploymentMode": "Standard"}
    labels = {"app.kubernetes.io/part-of": "slipway"}
    metadata = {"namespace": namespace, "labels": labels, "annotations": annotations}
    metadata["name"] = endpoint_name("org/model", namespace)
    body = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": metadata}
    server.put(body | {"spec": {"predictor": {}}, "status": {"url": "http://model.example.invalid"}})


def asked(there: Any, platform: Any, url: str | None) -> tuple[str, ...]:
    settings = platform.model_copy(update={"kserve": platform.kserve.model_copy(update={"gateway_url": url})})
    return tuple(check_cluster(there, settings)["door"])


def test_before_anything_is_served_nothing_is_asked(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    assert asked(there, platform, None)[:2] == ("off", "no endpoint yet, so nothing was asked")


def test_a_closed_door_is_proved_route_by_route_through_envoy(server, there, platform, tmp_path: Path):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    serving(server, there.namespace)
    with listening(tmp_path) as port:
        found = asked(there, platform, f"http://127.0.0.1:{port}")
    assert found[:2] == ("ok", f"{len(CLOSED)} routes of vLLM are closed: org/model")


def test_what_reaches_vllm_is_named_with_what_to_do(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    serving(server, there.namespace)
    with gateway("model.example.invalid") as there_is:
        url = f"http://127.0.0.1:{there_is.server_port}"
        state, found, hint = asked(there, platform, url)
        assert (state, found) == ("missing", "org/model answers /metrics (200), /invocations (405)")
        assert "slipway rollout start MODEL" in hint
        assert {path for _, path in there_is.asked} == {"/health", *CLOSED}
    with gateway("another.example") as stranger:
        state, found, hint = asked(there, platform, f"http://127.0.0.1:{stranger.server_port}")
        assert (state, "/health at" in found, "404" in found) == ("warning", True, True), "all is refused to a stranger"
        assert "kserve.gateway_url" in hint
    assert asked(there, platform, "http://127.0.0.1:1")[0] == "warning"


def test_the_gateways_own_address_is_asked_where_the_host_has_none(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    serving(server, there.namespace)
    server.register(Resource("gateway.networking.k8s.io/v1", "Gateway", "gateways"))
    with gateway("model.example.invalid") as there_is:
        metadata = {"name": "kserve-ingress-gateway", "namespace": "kserve"}
        body = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": metadata}
        server.put(body | {"status": {"addresses": [{"value": f"127.0.0.1:{there_is.server_port}"}]}})
        assert asked(there, platform, None)[0] == "missing"


def test_install_lets_envoy_gateway_refuse_what_is_not_offered_where_it_is(server, there, platform):
    with_kserve(server)
    server.register(Resource("gateway.envoyproxy.io/v1alpha1", "SecurityPolicy", "securitypolicies"))
    brought = install(there, platform, dry_run=False, force=False)
    assert "SecurityPolicy" not in {each.kind for each in brought}
    server.put(definition("securitypolicies.gateway.envoyproxy.io"))
    assert ("SecurityPolicy", "created") in {
        (each.kind, each.state) for each in install(there, platform, dry_run=False, force=False)
    }
