"""What Envoy Gateway takes so that each client of a cluster's endpoints has its own key, models and limits.

Policies select the routes that lead to the endpoints, Slipway's and KServe's, and leave them as they are: a canary
keeps its share. The policies hold no key: each is an entry of the Secret that ``clients.yaml`` names, under the name of
its client. Envoy Gateway follows the Secrets, so that a change holds within seconds, without a restart.

Fields and their meaning: https://gateway.envoyproxy.io/docs/api/extension_types/
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Final

from pipeline.cluster.clients_file import MONEY_PARTS, ClusterClients, read_clients
from pipeline.cluster.gateway_usage import ENVOY_GATEWAY, NAMESPACE, PROXY, proxy, script
from pipeline.cluster.objects import labelled
from pipeline.runs.tables import Finding, missing, ok, warning
from pipeline.settings.platform import ClientSettings, Platform
from stages.parts.base.errors import ConfigError, NotInstalled, UnknownName
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import SECRETS, Object
from stages.parts.endpoint.clients import new_key
from stages.parts.endpoint.door import CLIENT_HEADER, CODES, KINDS
from stages.parts.endpoint.routing import OFFERED
from stages.rollout.kserve.detect import served_modes
from stages.rollout.kserve.objects import API_SECRET, ENDPOINT, PART_OF, endpoint_name

POLICY: Final = "slipway-endpoints"
"""The SecurityPolicy; the same as in ``manifests/envoy-gateway``, which it replaces: a route obeys one only."""
LIMITS: Final = "slipway-clients"
"""What counts requests and tokens."""
LONGEST_BODY: Final = "64Mi"
"""As on one machine; without it, Envoy Gateway's own limit is 32 KiB."""
CERTIFICATE: Final = "slipway-endpoints"
NETWORK_POLICY: Final = "endpoints-answer-the-cluster"
"""The one of ``manifests/base`` that it replaces: policies add to each other, and that one lets everybody in."""
OWNER: Final = "gateway.envoyproxy.io/owning-gateway-"
"""How the labels of a proxy's pod begin that say whose it is."""
ROUTE: Final[Object] = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute"}
GROUP: Final = "serving.kserve.io/routing-group"
"""The label of KServe's routes in mode ``llm``, to which it gives no labels of ours."""
MESSAGES: Final = {
    401: "an API key is required: Authorization: Bearer KEY",
    403: "the client may not ask this",
    429: "the client's limit of requests or tokens per minute is reached",
}
BY_JWT: Final = "a token of {} is required: Authorization: Bearer TOKEN"
MONTH_OVER: Final = "the client's budget of tokens or money per month is used up"
HEADERS: Final = {
    401: {"name": "www-authenticate", "value": "Bearer"},
    # The rate-limit service counts by the minutes of the clock.
    429: {"name": "retry-after", "value": "%CEL(60 - request.time.getSeconds())%"},
}
NO_RETRY: Final = {"name": "x-should-retry", "value": "false"}
"""Stops OpenAI's clients, which would try again at once."""
NOT_WITHIN_MINUTES: Final = {
    "name": "x-ratelimit-reset",
    "value": {"type": "RegularExpression", "value": "[0-9]{3,}"},
}
"""What the rate-limit filter says if the limit that is reached is that of a month: how many seconds remain."""


def of(namespace: str, settings: ClientSettings, image: str) -> list[Object]:
    """Make every object, for the endpoints in *namespace*. *image*: of what takes in the usage. Raises: as
    ``read_clients``."""
    clients = read_clients(settings)
    objects = [labelled("v1", "Secret", name, namespace, type="Opaque") for name in clients.secrets]
    objects += [_network_policy(namespace, settings), _security_policy(namespace, clients)]
    # Requests and tokens per minute, over all routes together, and OpenAI's errors.
    messages = MESSAGES | ({401: BY_JWT.format(clients.tokens.issuer)} if clients.tokens else {})
    refusals = [_refusal(status, message) for status, message in messages.items()]
    if any(client.tokens_per_month or client.money_per_month for client in clients.clients):
        # Of two that fit, the first holds.
        month = _refusal(429, MONTH_OVER, NO_RETRY)
        refusals.insert(0, month | {"match": month["match"] | {"responseHeaders": [NOT_WITHIN_MINUTES]}})
    traffic: Object = {"responseOverride": refusals}
    if limits := _limits(clients):
        traffic["rateLimit"] = {"type": "Global", "global": {"rules": limits}}
    objects.append(_policy("BackendTrafficPolicy", LIMITS, namespace, traffic))
    if any(client.cache_salt for client in clients.clients):
        traffic["requestBuffer"] = {"limit": LONGEST_BODY}  # to which the salt is added
    if settings.usage_secret or any(client.needs_script for client in clients.clients):
        lua = {"lua": [{"type": "Inline", "inline": script(clients)}]}
        objects.append(_policy("EnvoyExtensionPolicy", LIMITS, namespace, lua))
    if settings.usage_secret:
        objects.append(proxy(namespace, settings, image))
    if settings.issuer:  # of a listener of the Gateway, whose namespace the certificate shares
        spec = {
            "secretName": f"{CERTIFICATE}-tls",
            "dnsNames": list(settings.hosts),
            "issuerRef": {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": settings.issuer},
            "privateKey": {"rotationPolicy": "Always"},
        }
        gateway_namespace, _, _ = settings.gateway.partition("/")
        objects.append(labelled("cert-manager.io/v1", "Certificate", CERTIFICATE, gateway_namespace, spec=spec))
    return objects


def _security_policy(namespace: str, clients: ClusterClients) -> Object:
    """Let in who has a key or a token, to the models and routes that it may use. Envoy says who it is in a header,
    which no client can set, and takes the key from the request."""
    free = [client.identity for client in clients.clients if not client.models]
    rules = _rules(free, "") if free else []
    for model in clients.models:
        names = [client.identity for client in clients.clients if model in client.models]
        # KServe's usual templates give an endpoint these hosts; older versions of Slipway did without the digest.
        starts = dict.fromkeys((endpoint_name(model, namespace), endpoint_name(model, "")))
        hosts = (f"request.host.startsWith('{start}{sign}{namespace}.')" for start in starts for sign in "-.")
        rules += _rules(names, " || ".join(hosts))
    spec: Object = {"authorization": {"defaultAction": "Deny", "rules": rules}}
    if clients.tokens:
        issuer = {
            "name": "issuer",
            "issuer": clients.tokens.issuer,
            "audiences": list(clients.tokens.audiences),
            "remoteJWKS": {"uri": clients.tokens.jwks_uri},
            "claimToHeaders": [{"claim": clients.tokens.claim, "header": CLIENT_HEADER}],
        }
        spec["jwt"] = {"providers": [issuer]}
    else:
        spec["apiKeyAuth"] = {
            "credentialRefs": [{"name": name} for name in clients.secrets],
            "extractFrom": [{"headers": ["Authorization"]}],  # as it is, or after "Bearer "
            "forwardClientIDHeader": CLIENT_HEADER,
            "sanitize": True,
        }
    return _policy("SecurityPolicy", POLICY, namespace, spec)


def _rules(names: list[str], hosts: str) -> list[Object]:
    """Allow *names* what endpoints offer, on all hosts or on those for which the expression *hosts* is true."""
    principal = {"headers": [{"name": CLIENT_HEADER, "values": names}]}
    allow = {"action": "Allow", "principal": principal} | ({"cel": hosts} if hosts else {})
    return [
        allow | {"operation": {"methods": [method], "path": {"type": "Exact", "value": path}}}
        for path, method in OFFERED.items()
    ]


def _network_policy(namespace: str, settings: ClientSettings) -> Object:
    """Let the gateway's proxies, rollouts, KServe's schedulers and Prometheus reach endpoints. Nodes always reach their
    own pods, so that probes need nothing."""
    owner, _, gateway = settings.gateway.partition("/")
    proxies = {f"{OWNER}namespace": owner, f"{OWNER}name": gateway}
    stages = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["rollout", "ending"]}
    sources: list[Object] = [
        {"namespaceSelector": _namespace(settings.proxies), "podSelector": {"matchLabels": proxies}},
        {"podSelector": {"matchLabels": PART_OF, "matchExpressions": [stages]}},
        {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "llminferenceservice-router-scheduler"}}},
    ]
    if settings.prometheus:
        sources.append({"namespaceSelector": _namespace(settings.prometheus)})
    spec = {
        "podSelector": {"matchExpressions": [{"key": ENDPOINT, "operator": "Exists"}]},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": sources}],
    }
    return labelled("networking.k8s.io/v1", "NetworkPolicy", NETWORK_POLICY, namespace, spec=spec)


def _limits(clients: ClusterClients) -> list[Object]:
    limits = []
    for client in clients.clients:
        selector = {"headers": [{"name": CLIENT_HEADER, "type": "Exact", "value": client.identity}]}
        for limit, unit, counted in (
            (client.requests_per_minute, "Minute", None),
            (client.tokens_per_minute, "Minute", "tokens"),
            (client.tokens_per_month, "Month", "tokens"),
            (client.money_per_month and round(client.money_per_month * MONEY_PARTS), "Month", "money"),
        ):
            if not limit:
                continue
            # Shared by all routes: otherwise each path of each model would count by itself.
            rule: Object = {"clientSelectors": [selector], "shared": True, "limit": {"requests": limit, "unit": unit}}
            if counted:
                spent = {"from": "Metadata", "metadata": {"namespace": NAMESPACE, "key": counted}}
                rule["cost"] = {"request": {"from": "Number", "number": 0}, "response": spent}
            limits.append(rule)
    return limits


def _refusal(status: int, message: str, header: Object | None = None) -> Object:
    """Answer a refusal of the gateway's own with OpenAI's error body."""
    error = {"message": message, "type": KINDS[status], "param": None, "code": CODES[status]}
    body = {"type": "Inline", "inline": json.dumps({"error": error})}
    response: Object = {"contentType": "application/json", "body": body}
    if header := header or HEADERS.get(status):
        response["header"] = {"set": [header]}
    return {"match": {"statusCodes": [{"type": "Value", "value": status}]}, "source": "Local", "response": response}


def _policy(kind: str, name: str, namespace: str, spec: Object) -> Object:
    of_llm = {"matchExpressions": [{"key": GROUP, "operator": "Exists"}]}
    selectors = [ROUTE | {"matchLabels": PART_OF}, ROUTE | of_llm]
    return labelled(ENVOY_GATEWAY, kind, name, namespace, spec={"targetSelectors": selectors} | spec)


def _namespace(name: str) -> Object:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


def holders(cluster: Cluster, clients: ClusterClients) -> dict[str, str]:
    """Return the Secret with each key, by the client's name, with clients that ``clients.yaml`` no longer names."""
    secrets = {name: cluster.find(SECRETS, name) for name in clients.secrets}
    # Envoy Gateway takes the first of several.
    return {client: name for name in reversed(secrets) for client in (secrets[name] or {}).get("data") or {}}


def add(cluster: Cluster, clients: ClusterClients, name: str) -> str:
    """Make the first key of a client that ``clients.yaml`` names, and return it. Raises: UnknownName, ConfigError."""
    secret = clients.named(name).secret or ""
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
    clients.check_keys()
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
        wrong = list(_not_in_force(cluster, of(platform.namespace, settings, platform.image_of("serve"))))
        clients = read_clients(settings)
    except (ConfigError, NotInstalled) as error:
        return missing(str(error), error.hint)
    if wrong:
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
        elif document["apiVersion"] == ENVOY_GATEWAY:
            ancestors = current.get("status", {}).get("ancestors", [])
            conditions = (condition for ancestor in ancestors for condition in ancestor.get("conditions", []))
            yield from {
                f"{title}: {condition.get('message', condition['reason'])}": None
                for condition in conditions
                if condition["type"] == "Accepted" and condition["status"] != "True"
            }


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
