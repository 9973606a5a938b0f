"""Logs in to a cluster: by kubeconfig files, or by the service account of a pod.

The official client does this, too; importing it takes seconds. lightkube 1.0 knows neither several files, nor programs
of ``client.authentication.k8s.io/v1``, nor ``tls-server-name`` and ``proxy-url``; its watches ask for no bookmarks.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stages.parts.base.errors import AccessDenied, ConfigError

if TYPE_CHECKING:
    from urllib3 import PoolManager

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EARLY_S: Final = 30.0
"""A token is replaced that long before it expires."""
TOKEN_S: Final = 120.0
"""How long a program may take to give a token: it may ask a person."""
FILES: Final = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""The fields of a kubeconfig's entries that name files, relative to the kubeconfig."""
SHARED: Final = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
"""The fields of a cluster that a program may ask for."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Login:
    """How requests reach a cluster, and as whom."""

    host: str
    """Base URL."""
    pool: PoolManager
    authorization: Callable[[], str]
    """Returns the header's present value; empty for none."""


def in_cluster() -> tuple[Login, str]:
    """Log in as the service account of this pod, and return its namespace, too; raise OSError or KeyError if it has
    none."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    pool = _pool(url, {"certificate-authority": str(SERVICE_ACCOUNT / "ca.crt")}, {})
    return Login(url, pool, _from_file(SERVICE_ACCOUNT / "token")), (SERVICE_ACCOUNT / "namespace").read_text().strip()


def by_kubeconfig(paths: Sequence[Path], context: str | None) -> tuple[Login, str]:
    """Log in to *context* or the current one. Returns its namespace, too. Where several files have an entry, the first
    counts. Raises ConfigError if there is no such context, or a file is not valid; AccessDenied if the program that
    gives the token fails."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        files = [(path.parent, yaml.load(path.read_bytes(), loader)) for path in paths]  # noqa: S506
        current = next((file["current-context"] for _, file in files if file.get("current-context")), None)
        chosen = _entry(files, "context", context or current)
        cluster = _entry(files, "cluster", chosen["cluster"])
        user = _entry(files, "user", chosen["user"]) if chosen.get("user") else {}
        url = str(cluster["server"]).rstrip("/")
        authorization, certificate = _credentials(user, cluster)
        login = Login(url, _pool(url, cluster, {**user, **certificate}), authorization)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"can't connect to a cluster: {type(error).__name__}: {' '.join(str(error).split())}",
            hint="set KUBECONFIG, or --context to one that 'kubectl config get-contexts' lists",
        ) from error
    return login, str(chosen.get("namespace") or "default")


def _entry(files: Sequence[tuple[Path, Entry]], kind: str, name: str | None) -> Entry:
    """Find a context, cluster or user, and make the paths of its files absolute."""
    for folder, file in files:
        for entry in file.get(f"{kind}s") or ():
            if entry["name"] == name:
                fields: dict[str, Any] = entry[kind] or {}
                places = {field: str(folder / fields[field]) for field in FILES if fields.get(field)}
                return fields | places | {"folder": folder}
    raise ValueError(f"there is no {kind} {name!r}" if name else f"no {kind} is set")


def _pool(url: str, cluster: Entry, user: Entry) -> PoolManager:
    import urllib3

    options: dict[str, Any] = {
        "server_hostname": cluster.get("tls-server-name"),
        "ca_certs": _file(cluster, "certificate-authority"),
        "cert_file": _file(user, "client-certificate"),
        "key_file": _file(user, "client-key"),
    }
    options = {name: value for name, value in options.items() if value} | {"cert_reqs": "CERT_REQUIRED"}
    if cluster.get("insecure-skip-tls-verify"):
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        options["cert_reqs"] = "CERT_NONE"
    scheme, host = urlsplit(url).scheme, urlsplit(url).netloc
    if proxy := cluster.get("proxy-url") or (None if proxy_bypass(host) else getproxies().get(scheme)):
        return urllib3.ProxyManager(str(proxy), **options)
    return urllib3.PoolManager(**options)


def _file(entry: Entry, name: str) -> str | None:
    """Return the file that is named, or write the data that stand in its place to one that only this user may read."""
    if data := entry.get(f"{name}-data"):
        folder = Path(tempfile.mkdtemp(prefix="slipway-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / name).write_bytes(base64.b64decode(data))
        return str(folder / name)
    return entry.get(name)


def _credentials(user: Entry, cluster: Entry) -> tuple[Callable[[], str], dict[str, bytes]]:
    """Return what gives the header's value, and the client's certificate if a program gives one."""
    if user.get("username"):
        basic = base64.b64encode(f"{user['username']}:{user['password']}".encode()).decode()
        return lambda: f"Basic {basic}", {}
    provided = (user.get("auth-provider") or {}).get("config") or {}  # kubectl alone renews it
    if token := user.get("token") or provided.get("id-token") or provided.get("access-token"):
        return lambda: f"Bearer {token}", {}
    if path := user.get("tokenFile"):
        return _from_file(Path(path)), {}
    if not (program := user.get("exec")):
        return lambda: "", {}
    kept, until = _ask(program, cluster, user["folder"])

    def authorization() -> str:
        nonlocal kept, until
        if time.time() >= until:
            kept, until = _ask(program, cluster, user["folder"])
        return f"Bearer {kept['token']}" if kept.get("token") else ""

    pem = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
    encoded = {name: base64.b64encode(kept[field].encode()) for name, field in pem.items() if kept.get(field)}
    return authorization, encoded


def _from_file(path: Path) -> Callable[[], str]:
    """Read the token anew for each request: a pod's is replaced from time to time."""
    path.read_text()  # raises now if there is none
    return lambda: f"Bearer {path.read_text().strip()}"


def _ask(program: Entry, cluster: Entry, folder: Path) -> tuple[Entry, float]:
    """Ask a program, such as a cloud's, for a credential. Returns until when it is valid, too.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """
    spec: dict[str, Any] = {"interactive": sys.stdin.isatty()}
    if program.get("provideClusterInfo"):
        spec["cluster"] = {field: cluster[field] for field in SHARED if cluster.get(field)}
        if authority := cluster.get("certificate-authority"):
            spec["cluster"]["certificate-authority-data"] = base64.b64encode(Path(authority).read_bytes()).decode()
    request = {"apiVersion": program["apiVersion"], "kind": "ExecCredential", "spec": spec}
    variables = {variable["name"]: variable["value"] for variable in program.get("env") or ()}
    command = str(program["command"])
    command = str(folder / command) if "/" in command else command
    try:
        ended = subprocess.run(
            [command, *(program.get("args") or ())],
            env=os.environ | variables | {"KUBERNETES_EXEC_INFO": json.dumps(request)},
            stdout=subprocess.PIPE,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,
            text=True,
            timeout=TOKEN_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise AccessDenied(
            f"the kubeconfig's program {command} gave no token: {lines[-1] if lines else 'it said nothing'}",
            hint="log in to the cluster again, or see what the program says by itself",
        ) from error
    credential = json.loads(ended.stdout)["status"]
    expires = credential.get("expirationTimestamp")
    return credential, datetime.fromisoformat(expires).timestamp() - EARLY_S if expires else float("inf")
