"""What Envoy Gateway takes so that each client of a cluster's endpoints has its own key, models and limits.

Policies select the routes that lead to the endpoints, Slipway's and KServe's, and leave them as they are: a canary
keeps its share. The keys are in Secrets, where ``pipeline.cluster.client_keys`` puts them; the policies hold none.

Fields and their meaning: https://gateway.envoyproxy.io/docs/api/extension_types/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from pipeline.cluster.objects import LABELS, Document, made
from pipeline.settings.config import read_yaml
from pipeline.settings.platform import Clients
from pipeline.workflow.stage_templates import API_KEY, HUB_TOKEN
from stages.parts.base.errors import ConfigError, InvalidName, UnknownName
from stages.parts.base.settings import Settings, parse
from stages.parts.base.store import directory_name
from stages.parts.endpoint.clients import ANYBODY, DEFAULT, Allowed
from stages.parts.endpoint.door import CLIENT_HEADER, CODES, KINDS
from stages.parts.endpoint.offered import OFFERED
from stages.rollout.kserve.objects import ENDPOINT, endpoint_name

POLICY: Final = "slipway-endpoints"
"""The SecurityPolicy; the same as in ``manifests/envoy-gateway``, which it replaces: a route obeys one only."""
LIMITS: Final = "slipway-clients"
"""What counts requests and tokens."""
CERTIFICATE: Final = "slipway-endpoints"
NETWORK_POLICY: Final = "endpoints-answer-the-cluster"
"""The one of ``manifests/base`` that it replaces: policies add to each other, and that one lets everybody in."""
ENVOY_GATEWAY: Final = "gateway.envoyproxy.io/v1alpha1"
OWNER: Final = "gateway.envoyproxy.io/owning-gateway-"
"""How the labels of a proxy's pod begin that say whose it is."""
ROUTES: Final = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "matchLabels": LABELS}
GROUP: Final = "serving.kserve.io/routing-group"
LLM_ROUTES: Final = {
    "group": "gateway.networking.k8s.io",
    "kind": "HTTPRoute",
    "matchExpressions": [{"key": GROUP, "operator": "Exists"}],
}
"""KServe's routes in mode ``llm``, to which it gives no labels of ours."""
SCHEDULER: Final = {"app.kubernetes.io/component": "llminferenceservice-router-scheduler"}
NAMESPACE: Final = "slipway"
TOKENS: Final = "tokens"
"""Where in an answer's metadata, and under which name, its tokens are."""
MOST_RULES: Final = 256
"""Envoy Gateway takes no more limits in a policy, and no more names in a rule."""
ROLLOUT: Final = ("rollout", "ending")
MESSAGES: Final = {
    401: "an API key is required: Authorization: Bearer KEY",
    403: "the client may not ask this",
    429: "the client's limit of requests or tokens per minute is reached",
}
HEADERS: Final = {
    401: {"name": "www-authenticate", "value": "Bearer"},
    # The rate-limit service counts by the minutes of the clock.
    429: {"name": "retry-after", "value": "%CEL(60 - request.time.getSeconds())%"},
}
COUNT: Final = f"""\
-- Tells the tokens that an answer, whole or streamed, says it used. The most that it says: it may repeat what it was
-- asked, numbers of the client's own among it.
function envoy_on_response(handle)
  local most, rest = -1, ""
  for chunk in handle:bodyChunks() do
    local text = rest .. tostring(chunk:getBytes(0, chunk:length()))
    for said in text:gmatch('"total_tokens"%s*:%s*(%d+)') do
      local tokens = math.min(tonumber(said), 1000000000)
      if tokens > most then
        most = tokens
        handle:streamInfo():dynamicMetadata():set("{NAMESPACE}", "{TOKENS}", most)
      end
    end
    rest = text:sub(-64)
  end
end
"""


class ClusterClient(Allowed):
    """One client in ``clients.yaml``."""

    secret: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
    """The Secret that holds its key, under its name."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.name in (DEFAULT, ANYBODY):
            raise ValueError(f"{self.name!r} can't be the name of a client: Slipway itself uses it")
        if self.requests_at_once or self.priority:
            raise ValueError("requests_at_once and priority are for one machine: Envoy Gateway has neither per client")
        if self.secret in (HUB_TOKEN.secret_name, API_KEY.secret_name):
            raise ValueError(f"the Secret {self.secret} is for something else: every entry would be a client's key")
        for model in self.models:
            try:
                directory_name(model)
            except InvalidName as error:
                raise ValueError(str(error)) from error
        return self


class ClusterClients(Settings):
    """``clients.yaml``, which a platform team keeps."""

    clients: tuple[ClusterClient, ...]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [client.name for client in self.clients]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"named twice: {', '.join(twice)}")
        if max(len(names), len(_limits(self))) > MOST_RULES:
            raise ValueError(f"Envoy Gateway takes {MOST_RULES} clients, and as many limits of all of them")
        return self

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(client.secret for client in self.clients))

    @property
    def models(self) -> tuple[str, ...]:
        """Those that are named; a client that names none may ask all."""
        return tuple(dict.fromkeys(model for client in self.clients for model in client.models))

    def named(self, name: str) -> ClusterClient:
        """Raises: UnknownName: there is no such client."""
        for client in self.clients:
            if client.name == name:
                return client
        raise UnknownName("client", name, known=[client.name for client in self.clients])


def read_clients(settings: Clients) -> ClusterClients:
    """Raises: ConfigError: the file is missing or wrong; every mistake at once."""
    path = Path(settings.file)
    found = parse(ClusterClients, read_yaml(path), str(path))
    if not found.clients:
        raise ConfigError(f"{path} names no client", hint="without cluster.clients, endpoints have one key for all")
    return found


def of(namespace: str, settings: Clients) -> list[Document]:
    """Every object, for the endpoints in *namespace*.

    Raises:
        ConfigError: the clients' file is missing or wrong.
    """
    known = read_clients(settings)
    keys = [made("v1", "Secret", name, namespace, type="Opaque") for name in known.secrets]
    found = [*keys, network_policy(namespace, settings), security_policy(namespace, known), limits(namespace, known)]
    if any(client.tokens_per_minute for client in known.clients):
        lua = {"type": "Inline", "inline": COUNT}
        found.append(_policy("EnvoyExtensionPolicy", LIMITS, namespace, {"lua": [lua]}))
    return [*found, *([certificate(settings)] if settings.issuer else [])]


def security_policy(namespace: str, known: ClusterClients) -> Document:
    """Let in who has a key, to the models and routes that it may use. Envoy takes the key from the request, and says
    the client's name in a header instead, which no client can set."""
    free = [client.name for client in known.clients if not client.models]
    rules = _rules(free, "") if free else []
    for model in known.models:
        rules += _rules([client.name for client in known.clients if model in client.models], _host(namespace, model))
    spec = {
        "apiKeyAuth": {
            "credentialRefs": [{"name": name} for name in known.secrets],
            "extractFrom": [{"headers": ["Authorization"]}],  # as it is, or after "Bearer "
            "forwardClientIDHeader": CLIENT_HEADER,
            "sanitize": True,
        },
        "authorization": {"defaultAction": "Deny", "rules": rules},
    }
    return _policy("SecurityPolicy", POLICY, namespace, spec)


def limits(namespace: str, known: ClusterClients) -> Document:
    """Requests and tokens per minute, over all routes together, and OpenAI's errors."""
    spec: Document = {"responseOverride": [_refusal(status) for status in MESSAGES]}
    if rules := _limits(known):
        spec["rateLimit"] = {"type": "Global", "global": {"rules": rules}}
    return _policy("BackendTrafficPolicy", LIMITS, namespace, spec)


def network_policy(namespace: str, settings: Clients) -> Document:
    """Let the gateway's proxies, rollouts, KServe's schedulers and Prometheus reach endpoints. Nodes always reach their
    own pods, so that probes need nothing."""
    owner, _, gateway = settings.gateway.partition("/")
    proxies = {f"{OWNER}namespace": owner, f"{OWNER}name": gateway}
    stages = {"key": "app.kubernetes.io/component", "operator": "In", "values": list(ROLLOUT)}
    sources: list[Document] = [
        {"namespaceSelector": _namespace(settings.proxies), "podSelector": {"matchLabels": proxies}},
        {"podSelector": {"matchLabels": LABELS, "matchExpressions": [stages]}},
        {"podSelector": {"matchLabels": SCHEDULER}},
    ]
    if settings.prometheus:
        sources.append({"namespaceSelector": _namespace(settings.prometheus)})
    spec = {
        "podSelector": {"matchExpressions": [{"key": ENDPOINT, "operator": "Exists"}]},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": sources}],
    }
    return made("networking.k8s.io/v1", "NetworkPolicy", NETWORK_POLICY, namespace, spec=spec)


def certificate(settings: Clients) -> Document:
    """For a listener of the Gateway, whose namespace it shares."""
    spec = {
        "secretName": f"{CERTIFICATE}-tls",
        "dnsNames": list(settings.hosts),
        "issuerRef": {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": settings.issuer},
        "privateKey": {"rotationPolicy": "Always"},
    }
    return made("cert-manager.io/v1", "Certificate", CERTIFICATE, settings.gateway.partition("/")[0], spec=spec)


def _rules(names: list[str], host: str) -> list[Document]:
    """Allow *names* what endpoints offer, on the hosts for which the expression *host* is true; empty: on all."""
    principal = {"headers": [{"name": CLIENT_HEADER, "values": names}]}
    allow = {"action": "Allow", "principal": principal} | ({"cel": host} if host else {})
    return [
        allow | {"operation": {"methods": [method], "path": {"type": "Exact", "value": path}}}
        for path, method in OFFERED.items()
    ]


def _host(namespace: str, model: str) -> str:
    """Whether a request is for *model*, by the host names that KServe's usual templates give its endpoint."""
    names = dict.fromkeys((endpoint_name(model, namespace), endpoint_name(model, "")))  # older versions': the latter
    return " || ".join(f"request.host.startsWith('{name}{sign}{namespace}.')" for name in names for sign in "-.")


def _limits(known: ClusterClients) -> list[Document]:
    rules = []
    for client in known.clients:
        whose = [{"headers": [{"name": CLIENT_HEADER, "type": "Exact", "value": client.name}]}]
        # Shared by all routes: otherwise each path of each model would count by itself.
        rule: Document = {"clientSelectors": whose, "shared": True}
        if client.requests_per_minute:
            rules.append(rule | {"limit": {"requests": client.requests_per_minute, "unit": "Minute"}})
        if client.tokens_per_minute:
            spent = {"from": "Metadata", "metadata": {"namespace": NAMESPACE, "key": TOKENS}}
            cost = {"request": {"from": "Number", "number": 0}, "response": spent}
            rules.append(rule | {"limit": {"requests": client.tokens_per_minute, "unit": "Minute"}, "cost": cost})
    return rules


def _refusal(status: int) -> Document:
    """OpenAI's error body for a refusal of the gateway's own."""
    error = {"message": MESSAGES[status], "type": KINDS[status], "param": None, "code": CODES[status]}
    body = {"type": "Inline", "inline": json.dumps({"error": error})}
    response: Document = {"contentType": "application/json", "body": body}
    if status in HEADERS:
        response["header"] = {"set": [HEADERS[status]]}
    return {
        "match": {"statusCodes": [{"type": "Value", "value": status}]},
        "source": "Local",
        "response": response,
    }


def _policy(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> Document:
    return made(ENVOY_GATEWAY, kind, name, namespace, spec={"targetSelectors": [dict(ROUTES), dict(LLM_ROUTES)]} | spec)


def _namespace(name: str) -> Document:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}
