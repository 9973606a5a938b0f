"""The keys of a cluster's clients: each is an entry of the Secret that ``clients.yaml`` names, under the client's name.

Envoy Gateway follows the Secrets, so that a change holds within seconds, without a restart.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Final

from pipeline.cluster.gateway import ENVOY_GATEWAY, ClusterClients, of, read_clients
from pipeline.cluster.objects import LABELS
from pipeline.runs.checks import CheckResult
from pipeline.settings.platform import Clients, Platform
from stages.parts.base.errors import ConfigError, NotInstalled, UnknownName
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import SECRETS, Object
from stages.parts.cluster.refusals import Absent
from stages.parts.endpoint.clients import new_key
from stages.rollout.kserve.kept import served_modes
from stages.rollout.kserve.objects import API_SECRET

WHAT: Final = "clients"


def holders(cluster: Cluster, known: ClusterClients) -> dict[str, str]:
    """The Secret with each key, by the client's name: also the names of those that ``clients.yaml`` names no more."""
    found = {name: _read(cluster, name) for name in known.secrets}
    # Envoy Gateway takes the first of several.
    return {client: name for name in reversed(found) for client in (found[name] or {}).get("data") or {}}


def add(cluster: Cluster, known: ClusterClients, name: str) -> str:
    """Make the first key of a client, and return it.

    Raises:
        UnknownName: ``clients.yaml`` does not name it.
        ConfigError: it has a key.
    """
    client = known.named(name)
    if name in holders(cluster, known):
        raise ConfigError(
            f"there is a client {name!r}", hint=f"for a new key: slipway clients rotate {name} --engine argo"
        )
    return _put(cluster, client.secret, name)


def rotate(cluster: Cluster, known: ClusterClients, name: str) -> str:
    """Give a client another key, and return it. The old one is refused within seconds.

    Raises:
        UnknownName: it has no key.
    """
    return _put(cluster, _holder(cluster, known, name), name)


def remove(cluster: Cluster, known: ClusterClients, name: str) -> None:
    """Remove a client's key.

    Raises:
        UnknownName: it has none.
    """
    secret = _holder(cluster, known, name)
    cluster.merge(SECRETS, secret, {"data": {name: None}})


def check(cluster: Cluster, platform: Platform, asked: Clients) -> CheckResult:
    """Whether the gateway does what ``clients.yaml`` says."""
    install = f"slipway install --platform {platform.name}"
    try:
        wrong = list(_not_in_force(cluster, of(platform.namespace, asked)))
        known = read_clients(asked)
    except (ConfigError, NotInstalled) as error:
        return CheckResult(what=WHAT, state="missing", found=str(error), hint=error.hint)
    if wrong:
        hint = f"{install}; where Envoy Gateway refuses, docs/endpoint.md says what it needs"
        return CheckResult(what=WHAT, state="missing", found="; ".join(wrong), hint=hint)
    if _read(cluster, API_SECRET):
        hint = f"kubectl -n {platform.namespace} delete secret {API_SECRET}; the next release needs no key"
        found = f"the Secret {API_SECRET}: vLLM asks for its key, which the gateway does not send"
        return CheckResult(what=WHAT, state="missing", found=found, hint=hint)
    held = holders(cluster, known)
    if keyless := [client.name for client in known.clients if client.name not in held]:
        hint = f"slipway clients add {keyless[0]} --engine argo"
        return CheckResult(what=WHAT, state="warning", found=f"without a key: {', '.join(keyless)}", hint=hint)
    if unserved := sorted(set(known.models) - _served(cluster)):
        hint = "clients may ask them once they are served; or their names are wrong"
        return CheckResult(what=WHAT, state="warning", found=f"not served: {', '.join(unserved)}", hint=hint)
    return CheckResult(what=WHAT, state="ok", found=", ".join(client.name for client in known.clients))


def _not_in_force(cluster: Cluster, documents: list[Object]) -> Iterator[str]:
    """What is not there, or was refused.

    Raises:
        NotInstalled: the cluster has no such kind.
    """
    for body in documents:
        metadata = body["metadata"]
        said = f"{body['kind']} {metadata['namespace']}/{metadata['name']}"
        try:
            there = cluster.get(cluster.kind(body["apiVersion"], body["kind"]), metadata["name"], metadata["namespace"])
        except Absent:
            yield f"no {said}"
            continue
        ancestors = there.get("status", {}).get("ancestors", []) if body["apiVersion"] == ENVOY_GATEWAY else []
        conditions = [each for ancestor in ancestors for each in ancestor.get("conditions", [])]
        refused = [
            condition for condition in conditions if condition["type"] == "Accepted" and condition["status"] != "True"
        ]
        yield from {f"{said}: {each.get('message', each['reason'])}": None for each in refused}


def _served(cluster: Cluster) -> set[str]:
    try:
        return set(served_modes(cluster, cluster.namespace))
    except Absent:  # no KServe
        return set()


def _holder(cluster: Cluster, known: ClusterClients, name: str) -> str:
    found = holders(cluster, known)
    if name not in found:
        raise UnknownName("client", name, known=found)
    return found[name]


def _put(cluster: Cluster, secret: str, name: str) -> str:
    key = new_key()
    data = {name: base64.b64encode(key.encode()).decode()}
    try:
        cluster.merge(SECRETS, secret, {"data": data})
    except Absent:
        metadata = {"name": secret, "labels": dict(LABELS)}
        cluster.create(
            SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
        )
    return key


def _read(cluster: Cluster, name: str) -> Object | None:
    try:
        return cluster.get(SECRETS, name)
    except Absent:
        return None
