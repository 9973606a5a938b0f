"""Logs in to a cluster in the usual ways without the official client, whose import takes a second or more.

Usual are one kubeconfig file with a token, a client certificate or a program that gives a token, and the service
account of a pod. For everything else, such as proxies, several files and old providers, ``read`` returns None.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from stages.parts.base.errors import AccessDenied

if TYPE_CHECKING:
    from urllib3 import PoolManager

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REREAD_S: Final = 60.0
"""A pod's token is replaced in its file from time to time."""
EARLY_S: Final = 30.0
"""A token is replaced so long before it expires."""
TOKEN_S: Final = 120.0
"""How long a program may take to give a token: it may ask a person."""


class Login:
    """The part of ``kubernetes.client.ApiClient`` that ``Cluster`` uses."""

    def __init__(self, host: str, pool: PoolManager, authorization: Callable[[], str]) -> None:
        """Args: authorization: the header's present value; empty for none."""
        self.configuration = SimpleNamespace(host=host)
        self.rest_client = SimpleNamespace(pool_manager=pool)
        self._authorization = authorization

    def update_params_for_auth(self, headers: dict[str, str], _: object, __: object) -> None:
        if value := self._authorization():
            headers["authorization"] = value


def in_cluster() -> tuple[Login, str]:
    """The service account of this pod, and its namespace.

    Raises:
        OSError, KeyError: it has none.
    """
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    place = f"[{host}]" if ":" in host else host
    token = _Kept(lambda: ((SERVICE_ACCOUNT / "token").read_text().strip(), time.time() + REREAD_S))
    token()
    authority = SERVICE_ACCOUNT / "ca.crt"
    login = Login(f"https://{place}:{port}", _pool({"ca_certs": str(authority)}), lambda: f"Bearer {token()}")
    return login, (SERVICE_ACCOUNT / "namespace").read_text().strip()


def read(path: Path, context: str | None) -> tuple[Login, str] | None:
    """The login of *context*, or of the current one, and its namespace. None: it is not one of the usual ones.

    Raises:
        AccessDenied: the program that gives the token fails.
    """
    import yaml

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")):
        return None
    try:
        document = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        chosen = _named(document["contexts"], context or document["current-context"])["context"]
        cluster = _named(document["clusters"], chosen["cluster"])["cluster"]
        user = _named(document["users"], chosen["user"])["user"] if chosen.get("user") else {}
        if {"auth-provider", "username"} & user.keys() or "proxy-url" in cluster:
            return None
        pool = _pool(_tls(cluster, user, path.parent))
        login = Login(str(cluster["server"]).rstrip("/"), pool, _authorization(user, path.parent))
        return login, str(chosen.get("namespace") or "default")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None  # the official client says what is wrong with it


def _named(listed: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = (each for each in listed if each["name"] == name)
    return found


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of urllib3 for the server's certificate and the client's own."""
    found = {
        "ca_certs": _file(cluster, "certificate-authority", folder),
        "cert_file": _file(user, "client-certificate", folder),
        "key_file": _file(user, "client-key", folder),
        "server_hostname": cluster.get("tls-server-name"),
    }
    if cluster.get("insecure-skip-tls-verify"):
        found["cert_reqs"] = "CERT_NONE"
    return {name: value for name, value in found.items() if value}


def _file(given: Mapping[str, Any], name: str, folder: Path) -> str | None:
    """The file that is named, or one with the data that stand in its place, which only this user may read."""
    if data := given.get(f"{name}-data"):
        place = Path(tempfile.mkdtemp(prefix="slipway-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        (place / name).write_bytes(base64.b64decode(data))
        return str(place / name)
    return str(folder / given[name]) if given.get(name) else None


def _pool(arguments: Mapping[str, Any]) -> PoolManager:
    import urllib3

    if arguments.get("cert_reqs") == "CERT_NONE":
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return urllib3.PoolManager(**{"cert_reqs": "CERT_REQUIRED", **arguments})


def _authorization(user: Mapping[str, Any], folder: Path) -> Callable[[], str]:
    if token := user.get("token"):
        return lambda: f"Bearer {token}"
    if name := user.get("tokenFile"):
        kept = _Kept(lambda: ((folder / name).read_text().strip(), time.time() + REREAD_S))
    elif program := user.get("exec"):
        kept = _Kept(lambda: _ask(program, folder))
    else:
        return lambda: ""
    kept()
    return lambda: f"Bearer {kept()}"


class _Kept:
    """A token that is asked for again when its time is over."""

    def __init__(self, ask: Callable[[], tuple[str, float]]) -> None:
        self._ask = ask
        self._token, self._until = "", 0.0

    def __call__(self) -> str:
        if time.time() >= self._until:
            self._token, self._until = self._ask()
        return self._token


def _ask(program: Mapping[str, Any], folder: Path) -> tuple[str, float]:
    """A token by a program, such as a cloud's, and until when it is valid.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """
    asks = {"apiVersion": program["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": sys.stdin.isatty()}}
    if program.get("provideClusterInfo"):
        raise ValueError("it wants to know about the cluster")
    given = {each["name"]: each["value"] for each in program.get("env") or ()}
    command = str(program["command"])
    command = str(folder / command) if "/" in command else command
    try:
        ended = subprocess.run(
            [command, *(program.get("args") or ())],
            env=os.environ | given | {"KUBERNETES_EXEC_INFO": json.dumps(asks)},
            stdout=subprocess.PIPE,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,
            text=True,
            timeout=TOKEN_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise AccessDenied(
            f"the kubeconfig's program {command} gave no token: {said[-1] if said else 'it said nothing'}",
            hint="log in to the cluster again, or see what the program says by itself",
        ) from error
    status = json.loads(ended.stdout)["status"]
    expires = status.get("expirationTimestamp")
    until = datetime.fromisoformat(expires).timestamp() - EARLY_S if expires else float("inf")
    return str(status["token"]), until
