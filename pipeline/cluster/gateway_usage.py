"""What the gateway knows of each request: by whom it was, what it used, and where that is kept.

Envoy Gateway's policies see no tokens, so a script reads them from the answers. Envoy's access log, with the same lines
as on one machine, goes to a volume of the proxy's pod, where a second container takes it into PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.cluster.clients_file import MONEY_PARTS, ClusterClients
from pipeline.cluster.objects import labelled
from pipeline.settings.platform import ClientSettings
from stages.parts.cluster.kinds import Object
from stages.parts.endpoint import access_log
from stages.parts.endpoint.database import URL_VARIABLE
from stages.parts.endpoint.door import CLIENT_HEADER

ENVOY_GATEWAY: Final = "gateway.envoyproxy.io/v1alpha1"
SCRIPT: Final = Path(__file__).with_name("gateway.lua")
NAMESPACE: Final = "slipway"
"""Where in a request's metadata the script's figures are."""
FIELDS: Final = {
    "prompt_tokens": "prompt_tokens",
    "input_tokens": "prompt_tokens",
    "completion_tokens": "output_tokens",
    "output_tokens": "output_tokens",
    "cached_tokens": "cached_tokens",
    "total_tokens": "tokens",
}
"""Under which names they are, by those in the ``usage`` of an answer."""
PROXY: Final = "slipway-usage"
LOGS: Final = "/var/log/slipway"
IN_HOME: Final = "/cache/gateway"
"""The same folder, as the second container sees it: in its user's home, where the endpoint's name is beside it."""
LINE: Final = {
    "id": "%REQ(X-REQUEST-ID)%",
    "at": "%START_TIME(%s.%6f)%",
    "model": "%REQ(:AUTHORITY)%",  # of what was not answered, the host is known
    "answered": f"%DYNAMIC_METADATA({NAMESPACE}:model)%",
    "client": f"%DYNAMIC_METADATA({NAMESPACE}:client)%",
    "release": f"%DYNAMIC_METADATA({NAMESPACE}:release)%",
    "server": "%UPSTREAM_HOST%",
    "path": "%PATH(NQ):64%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "ttft_ms": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:ms)%",
    "duration_ms": "%DURATION%",
    "prompt_tokens": f"%DYNAMIC_METADATA({NAMESPACE}:prompt_tokens)%",
    "output_tokens": f"%DYNAMIC_METADATA({NAMESPACE}:output_tokens)%",
    "cached_tokens": f"%DYNAMIC_METADATA({NAMESPACE}:cached_tokens)%",
}
"""A line is an ``access_log.LoggedRequest``."""


def script(clients: ClusterClients) -> str:
    """Make the Lua script, which has the clients' salts, but no keys."""
    everyone, prices = clients.clients, clients.prices
    paid = {"": prices.default, **prices.models} if prices else None
    tables = {
        "CLIENT": json.dumps(CLIENT_HEADER),
        "NAMES": _table({client.identity: json.dumps(client.name) for client in everyone}),
        "PRIORITIES": _table({client.identity: f'"{client.priority}"' for client in everyone if client.priority}),
        "SALTS": _table({client.identity: json.dumps(client.cache_salt) for client in everyone if client.cache_salt}),
        "FIELDS": _table({name: json.dumps(field) for name, field in FIELDS.items()}),
        "PRICES": _table({name: f"{{{price.prompt}, {price.output}}}" for name, price in paid.items()})
        if paid
        else "nil",
        "PARTS": str(MONEY_PARTS),
    }
    return "".join(f"local {name} = {value}\n" for name, value in tables.items()) + SCRIPT.read_text(encoding="utf-8")


def _table(values: Mapping[str, str]) -> str:
    """Write a table of Lua. Every key, and what stands in quotes, is of characters that need no escape."""
    return "{" + ", ".join(f'["{key}"] = {value}' for key, value in values.items()) + "}"


def proxy(namespace: str, settings: ClientSettings, image: str) -> Object:
    """Make the EnvoyProxy for the Gateway, which its owner names in ``spec.infrastructure.parametersRef``."""
    gateway_namespace, _, _ = settings.gateway.partition("/")
    ours = {
        "type": "Route",
        "matches": [f"xds.route_name.startsWith('httproute/{namespace}/')"],
        "format": {"type": "JSON", "json": LINE},
        "sinks": [_file(f"{LOGS}/{access_log.NAME}")],
    }
    volume = {"name": PROXY, "emptyDir": {}}
    importer: dict[str, Any] = {
        "name": PROXY,
        "image": image,
        "restartPolicy": "Always",  # beside the proxy, and after its end until its last line is taken in
        "command": ["python", "-m", "stages.parts.endpoint.gateway_log", IN_HOME],
        "env": [
            {"name": URL_VARIABLE, "valueFrom": {"secretKeyRef": {"name": settings.usage_secret, "key": "url"}}},
        ],
        "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": PROXY, "mountPath": IN_HOME}],
    }
    deployment = {
        "pod": {"volumes": [volume]},
        "container": {"volumeMounts": [{"name": PROXY, "mountPath": LOGS}]},
        "initContainers": [importer],
    }
    spec = {
        # Besides, what Envoy Gateway logs without any setting.
        "telemetry": {"accessLog": {"settings": [ours, {"sinks": [_file("/dev/stdout")]}]}},
        "extraArgs": ["--file-flush-interval-msec", "1000"],
        "provider": {"type": "Kubernetes", "kubernetes": {"envoyDeployment": deployment}},
    }
    return labelled(ENVOY_GATEWAY, "EnvoyProxy", PROXY, gateway_namespace, spec=spec)


def _file(path: str) -> Object:
    return {"type": "File", "file": {"path": path}}
