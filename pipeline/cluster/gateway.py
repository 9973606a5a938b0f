"""What Envoy Gateway takes so that each client of a cluster's endpoints has its own key, models and limits.

Policies select the routes that lead to the endpoints, Slipway's and KServe's, and leave them as they are: a canary
keeps its share. The policies hold no key: each is an entry of the Secret that ``clients.yaml`` names, under the name of
its client. Envoy Gateway follows the Secrets, so that a change holds within seconds, without a restart.

The objects are in ``gateway.yaml.jinja``. Its policies see no tokens, so a script reads them from the answers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipeline.cluster.clients_file import MONEY_PARTS, ClusterClients, read_clients
from pipeline.cluster.objects import find, labelled
from pipeline.runs.tables import Finding, missing, ok, warning
from pipeline.settings.platform import ClientSettings, Platform
from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.templates import rendered
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import SECRETS, Object
from stages.parts.endpoint import access_log, door
from stages.parts.endpoint.clients import new_key
from stages.parts.endpoint.database import URL_VARIABLE
from stages.parts.endpoint.routing import OFFERED
from stages.rollout.kserve.detect import served_modes
from stages.rollout.kserve.objects import API_SECRET, endpoint_name
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.shared_address import ENVOY_GATEWAY, SHARED, list_host

TEMPLATE: Final = Path(__file__).with_name("gateway.yaml.jinja")
BUDGETS: Final = Path(__file__).with_name("budgets.yaml.jinja")
SCRIPT, SHARED_SCRIPT = Path(__file__).with_name("gateway.lua"), Path(__file__).with_name("shared.lua")
PROXY: Final = "slipway-usage"
"""The EnvoyProxy that keeps the usage."""


def of(namespace: str, settings: ClientSettings, image: str, kserve: KServe | None = None) -> list[Object]:
    """Make every object, for the endpoints in *namespace* and, if *kserve* names it, for the address of all models.
    *image*: of what takes in the usage. Raises: as ``read_clients``."""
    host = kserve.shared_host if kserve else None
    clients = read_clients(settings)
    limits = clients.limits
    # Policies alone do not count tokens, nor change what is forwarded.
    scripted = settings.usage_secret or any(counted != "requests" for *_, counted in limits)
    scripted = scripted or any(client.priority or client.cache_salt for client in clients.clients)
    return rendered(
        TEMPLATE,
        namespace=namespace,
        settings=settings,
        image=image,
        clients=clients,
        limits=limits,
        units={unit for _, _, unit, _ in limits},
        allowed=list(_allowed(namespace, clients)),
        shared=SHARED if host else None,
        host=host,
        list_host=list_host(host or ""),
        through=((kserve and kserve.shared_through) or f"{host}:80").split(":"),
        script=script(clients) if scripted else "",
        shared_script=shared_script(clients) if clients.models else "",
        offered=OFFERED,
        door=door,
        proxy=PROXY,
        access_log=access_log.NAME,
        url_variable=URL_VARIABLE,
    )


def budgets(namespace: str, settings: ClientSettings) -> list[Object]:
    """Make what prometheus-operator takes to tell whose budget of a month is used up; nothing if no client has one.
    Raises: as ``read_clients``."""
    return rendered(BUDGETS, namespace=namespace, settings=settings, limits=read_clients(settings).limits)


def _allowed(namespace: str, clients: ClusterClients) -> Iterator[tuple[list[str], str]]:
    """Yield who may ask, and which hosts, as an expression that is true for them; empty for all hosts."""
    if free := [client.identity for client in clients.clients if not client.models]:
        yield free, ""
    for model in clients.models:
        # KServe's usual templates give an endpoint these hosts; older versions of Slipway did without the digest.
        starts = dict.fromkeys((endpoint_name(model, namespace), endpoint_name(model, "")))
        hosts = (f"request.host.startsWith('{start}{sign}{namespace}.')" for start in starts for sign in "-.")
        yield [client.identity for client in clients.clients if model in client.models], " || ".join(hosts)


def script(clients: ClusterClients) -> str:
    """Make the Lua script, which has the clients' salts, but no keys."""
    everyone, prices = clients.clients, clients.prices
    paid = {"": prices.default, **prices.models} if prices else {}
    tables: dict[str, Any] = {
        "CLIENT": door.CLIENT_HEADER,
        "NAMES": {client.identity: client.name for client in everyone},
        "PRIORITIES": {client.identity: str(client.priority) for client in everyone if client.priority},
        "SALTS": {client.identity: client.cache_salt for client in everyone if client.cache_salt},
        "PRICES": {model: price.model_dump() for model, price in paid.items()} or None,
        "PARTS": MONEY_PARTS,
    }
    return _filled(SCRIPT, tables)


def shared_script(clients: ClusterClients) -> str:
    """Make the Lua script for the address of all models."""
    own = {client.identity: dict.fromkeys(client.models, True) for client in clients.clients if client.models}
    return _filled(SHARED_SCRIPT, {"CLIENT": door.CLIENT_HEADER, "MODELS": own})


def _filled(script: Path, tables: dict[str, Any]) -> str:
    return "".join(f"local {name} = {_lua(value)}\n" for name, value in tables.items()) + script.read_text("utf-8")


def _lua(value: Any) -> str:
    """Write a value for Lua, whose texts are of characters that need no escape."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'["{key}"] = {_lua(inner)}' for key, inner in value.items()) + "}"
    return "nil" if value is None else json.dumps(value)


def holders(cluster: Cluster, clients: ClusterClients) -> dict[str, str]:
    """Return the Secret with each key, by the client's name, with clients that ``clients.yaml`` no longer names."""
    secrets = {name: cluster.find(SECRETS, name) for name in clients.secrets}
    # Envoy Gateway takes the first of several.
    return {client: name for name in reversed(secrets) for client in (secrets[name] or {}).get("data") or {}}


def add(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    """Make the first key of a client that ``clients.yaml`` names, and return it. Raises: UnknownName, ConfigError."""
    secret = clients.named(name).secret or ""
    if name in holders(cluster, clients):
        hint = f"for a new key: slipway clients rotate {name} --engine argo"
        raise ConfigError(f"there is a client {name!r}", hint=hint)
    return _put(cluster, secret, name)


def rotate(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    """Give a client another key, and return it; the old one is refused within seconds. Raises: UnknownName."""
    return _put(cluster, _holder(cluster, clients, name), name)


def remove(cluster: Cluster, clients: ClusterClients, name: str) -> None:
    """Remove a client's key. Raises: UnknownName: it has none."""
    cluster.merge(SECRETS, _holder(cluster, clients, name), {"data": {name: None}})


def _holder(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    clients.check_keys()
    secrets = holders(cluster, clients)
    check_known("client", name, secrets)
    return secrets[name]


def _put(cluster: Cluster, secret: str, name: str) -> str:
    key = new_key()
    data = {name: base64.b64encode(key.encode()).decode()}
    try:
        cluster.merge(SECRETS, secret, {"data": data})
    except Absent:
        cluster.create(SECRETS, labelled("Secret", secret, cluster.namespace, type="Opaque", data=data))
    return key


def check(cluster: Cluster, platform: Platform, settings: ClientSettings) -> Finding:
    """Check that the gateway does what ``clients.yaml`` says. Raises: ConfigError, NotInstalled."""
    clients = read_clients(settings)
    if wrong := list(_not_in_force(cluster, of(platform.namespace, settings, platform.image_of("serve")))):
        hint = f"slipway install --platform {platform.name}; where Envoy Gateway refuses, see docs/endpoint.md"
        return missing("; ".join(wrong), hint)
    if cluster.find(SECRETS, API_SECRET):
        text = f"the Secret {API_SECRET}: vLLM asks for its key, which the gateway does not send"
        hint = f"kubectl -n {platform.namespace} delete secret {API_SECRET}; the next release needs no key"
        return missing(text, hint)
    if settings.usage_secret and (problem := _without_usage(cluster, settings)):
        return problem
    names, secrets = [client.name for client in clients.clients], holders(cluster, clients)
    if keyless := [name for name in names if not clients.tokens and name not in secrets]:
        return warning(f"without a key: {', '.join(keyless)}", f"slipway clients add {keyless[0]} --engine argo")
    if unserved := sorted(set(clients.models) - served_modes(cluster, cluster.namespace).keys()):
        hint = "clients may ask them once they are served; or their names are wrong"
        return warning(f"not served: {', '.join(unserved)}", hint)
    return ok(", ".join(names))


def _not_in_force(cluster: Cluster, documents: list[Object]) -> Iterator[str]:
    """Name what is not there, or was refused. Raises: NotInstalled: the cluster has no such kind."""
    for document in documents:
        title, current = find(cluster, document)
        if current is None:
            yield f"no {title}"
        elif document["apiVersion"] == ENVOY_GATEWAY:
            ancestors = current.get("status", {}).get("ancestors", [])
            conditions = (condition for ancestor in ancestors for condition in ancestor.get("conditions", []))
            refused = (each for each in conditions if each["type"] == "Accepted" and each["status"] != "True")
            yield from dict.fromkeys(f"{title}: {each.get('message', each['reason'])}" for each in refused)


def _without_usage(cluster: Cluster, settings: ClientSettings) -> Finding | None:
    """Tell why no usage is kept, as far as that may be seen."""
    gateway_namespace, _, name = settings.gateway.partition("/")
    gateway = cluster.find(cluster.kind("gateway.networking.k8s.io/v1", "Gateway"), name, gateway_namespace) or {}
    parameters = gateway.get("spec", {}).get("infrastructure", {}).get("parametersRef", {})
    if parameters.get("name") != PROXY:
        hint = f"its owner adds infrastructure.parametersRef, of an EnvoyProxy {PROXY} (docs/endpoint.md)"
        return missing(f"no usage is kept: the Gateway {settings.gateway} does not use EnvoyProxy {PROXY}", hint)
    if cluster.find(SECRETS, settings.usage_secret or "", settings.proxies) is None:
        hint = f"kubectl -n {settings.proxies} create secret generic {settings.usage_secret} --from-file=url"
        return missing(f"no Secret {settings.proxies}/{settings.usage_secret}: the gateway's pods don't start", hint)
    return None
