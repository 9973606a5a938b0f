"""The keys of a cluster's clients: each is an entry of the Secret that ``clients.yaml`` names, under the client's name.

Envoy Gateway follows the Secrets, so that a change holds within seconds, without a restart.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

from pipeline.cluster import gateway
from pipeline.cluster.gateway import ClusterClients
from pipeline.cluster.objects import labelled
from pipeline.runs.checks import Finding, missing, ok, warning
from pipeline.settings.platform import ClientSettings, Platform
from stages.parts.base.errors import ConfigError, NotInstalled, UnknownName
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import SECRETS, Object
from stages.parts.endpoint.clients import new_key
from stages.rollout.kserve.detect import served_modes
from stages.rollout.kserve.objects import API_SECRET


def holders(cluster: Cluster, clients: ClusterClients) -> dict[str, str]:
    """Return the Secret with each key, by the client's name, with clients that ``clients.yaml`` no longer names."""
    secrets = {name: cluster.find(SECRETS, name) for name in clients.secrets}
    # Envoy Gateway takes the first of several.
    return {client: name for name in reversed(secrets) for client in (secrets[name] or {}).get("data") or {}}


def add(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    """Make the first key of a client that ``clients.yaml`` names, and return it. Raises: UnknownName, ConfigError."""
    secret = clients.named(name).secret
    if name in holders(cluster, clients):
        raise ConfigError(
            f"there is a client {name!r}", hint=f"for a new key: slipway clients rotate {name} --engine argo"
        )
    return _put(cluster, secret, name)


def rotate(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    """Give a client another key, and return it; the old one is refused within seconds. Raises: UnknownName."""
    return _put(cluster, _holder(cluster, clients, name), name)


def remove(cluster: Cluster, clients: ClusterClients, name: str) -> None:
    """Remove a client's key. Raises: UnknownName: it has none."""
    cluster.merge(SECRETS, _holder(cluster, clients, name), {"data": {name: None}})


def _holder(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    secrets = holders(cluster, clients)
    if name not in secrets:
        raise UnknownName("client", name, known=secrets)
    return secrets[name]


def _put(cluster: Cluster, secret: str, name: str) -> str:
    key = new_key()
    data = {name: base64.b64encode(key.encode()).decode()}
    try:
        cluster.merge(SECRETS, secret, {"data": data})
    except Absent:
        cluster.create(SECRETS, labelled("v1", "Secret", secret, cluster.namespace, type="Opaque", data=data))
    return key


def check(cluster: Cluster, platform: Platform, settings: ClientSettings) -> Finding:
    """Check that the gateway does what ``clients.yaml`` says."""
    try:
        wrong = list(_not_in_force(cluster, gateway.of(platform.namespace, settings)))
        clients = gateway.read_clients(settings)
    except (ConfigError, NotInstalled) as error:
        return missing(str(error), error.hint)
    if wrong:
        hint = f"slipway install --platform {platform.name}; where Envoy Gateway refuses, see docs/endpoint.md"
        return missing("; ".join(wrong), hint)
    if cluster.find(SECRETS, API_SECRET):
        text = f"the Secret {API_SECRET}: vLLM asks for its key, which the gateway does not send"
        hint = f"kubectl -n {platform.namespace} delete secret {API_SECRET}; the next release needs no key"
        return missing(text, hint)
    names, secrets = [client.name for client in clients.clients], holders(cluster, clients)
    if keyless := [name for name in names if name not in secrets]:
        return warning(f"without a key: {', '.join(keyless)}", f"slipway clients add {keyless[0]} --engine argo")
    try:
        served = set(served_modes(cluster, cluster.namespace))
    except Absent:  # no KServe
        served = set()
    if unserved := sorted(set(clients.models) - served):
        hint = "clients may ask them once they are served; or their names are wrong"
        return warning(f"not served: {', '.join(unserved)}", hint)
    return ok(", ".join(names))


def _not_in_force(cluster: Cluster, documents: list[Object]) -> Iterator[str]:
    """Name what is not there, or was refused. Raises: NotInstalled: the cluster has no such kind."""
    for document in documents:
        metadata = document["metadata"]
        title = f"{document['kind']} {metadata['namespace']}/{metadata['name']}"
        kind = cluster.kind(document["apiVersion"], document["kind"])
        current = cluster.find(kind, metadata["name"], metadata["namespace"])
        if current is None:
            yield f"no {title}"
        elif document["apiVersion"] == gateway.ENVOY_GATEWAY:
            ancestors = current.get("status", {}).get("ancestors", [])
            conditions = (condition for ancestor in ancestors for condition in ancestor.get("conditions", []))
            yield from {
                f"{title}: {condition.get('message', condition['reason'])}": None
                for condition in conditions
                if condition["type"] == "Accepted" and condition["status"] != "True"
            }
