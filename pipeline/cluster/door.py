"""Whether clients reach nothing of vLLM but what endpoints offer: every route is asked for, as clients ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from pipeline.runs.tables import Finding, missing, off, ok, warning
from pipeline.settings.config import RunConfig, kserve_settings
from stages.parts.base.errors import AccessDenied, SlipwayError
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.endpoint.routing import HEALTH
from stages.rollout.kserve.detect import served_modes, target_on

GATEWAYS: Final = Kind("gateway.networking.k8s.io/v1", "Gateway", "gateways")
CLOSED: Final = Path(__file__).with_name("closed_routes.txt").read_text(encoding="utf-8").split()
"""Routes of vLLM that endpoints do not offer. Each is asked for by GET, which changes nothing: where it has only
another method, vLLM says so with 405."""
REFUSED: Final = frozenset({401, 403, 404})
TIMEOUT_S: Final = 5.0


def check(cluster: Cluster, config: RunConfig) -> Finding:
    """Ask every endpoint of the namespace for every route."""
    if not (models := sorted(served_modes(cluster, cluster.namespace))):
        return off("no endpoint yet, so nothing was asked")
    answered, unasked = dict[str, list[str]](), dict[str, str]()
    # Certificates may be for other names: nothing secret is sent.
    with httpx.Client(timeout=TIMEOUT_S, verify=False) as client:  # noqa: S501
        for model in models:
            try:
                base, host = _reached(client, _addresses(cluster, config, model))
                statuses = {path: client.get(base + path, headers=host).status_code for path in CLOSED}
                if paths := [f"{path} ({status})" for path, status in statuses.items() if status not in REFUSED]:
                    answered[model] = paths
            except (SlipwayError, httpx.HTTPError) as error:
                unasked[model] = str(error)
    if answered:
        hint = "slipway install; then, for each model: slipway rollout start MODEL --engine argo, for pods with a door"
        return missing("; ".join(f"{name} answers {', '.join(paths)}" for name, paths in answered.items()), hint)
    if unasked:
        hint = "--set kserve.gateway_url=http://… where an endpoint's name can't be resolved"
        return warning("; ".join(f"{model} was not asked: {why}" for model, why in unasked.items()), hint)
    return ok(f"{len(CLOSED)} routes of vLLM are closed: {', '.join(models)}")


def _addresses(cluster: Cluster, config: RunConfig, model: str) -> Iterator[tuple[str, str]]:
    """Yield base URLs at which an endpoint may be reached, each with its host name."""
    settings = kserve_settings(config)
    target = target_on(cluster, ModelStore(Path(), model), AskedServing(), settings)
    url = target.client_url()
    host = urlsplit(url).netloc
    if settings.gateway_url:
        yield settings.gateway_url.rstrip("/"), host
        return
    yield url, host
    namespace, _, name = target.installation.gateway.rpartition("/")
    with contextlib.suppress(Absent, AccessDenied):
        for address in cluster.get(GATEWAYS, name, namespace).get("status", {}).get("addresses", []):
            yield f"http://{address['value']}", host


def _reached(client: httpx.Client, addresses: Iterator[tuple[str, str]]) -> tuple[str, dict[str, str]]:
    """Choose the first that answers: a gateway that does not know the host refuses everything. Raises HTTPError."""
    why: httpx.HTTPError = httpx.ConnectError("it has no address")
    for base, host in addresses:
        try:
            status = client.get(base + HEALTH, headers={"Host": host}).status_code
            if status in (200, 401):
                return base, {"Host": host}
            why = httpx.ProtocolError(f"{HEALTH} at {base} answers {status}")
        except httpx.HTTPError as error:
            why = httpx.ConnectError(f"{base}: {error}")
    raise why
