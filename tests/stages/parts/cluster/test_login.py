"""Logging in to a cluster by kubeconfigs of every kind."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.parts.base.errors import AccessDenied, ConfigError
from stages.parts.cluster import login
from stages.parts.cluster.api import Cluster, connect
from stages.parts.cluster.kinds import NAMESPACES
from tests.kubernetes import KubernetesServer

PROGRAM = """#!/bin/sh
echo asked >> {folder}/asked
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",' \\
     '"status": {{"token": "'$TOKEN'", "expirationTimestamp": "{expires}"}}}}'
"""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as server:
        yield server


def kubeconfig(folder: Path, url: str, user: dict[str, Any], **cluster: Any) -> Path:
    document = {
        "current-context": "own",
        "contexts": [{"name": "own", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"{url}/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(document))
    return path


def reached(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
    cluster = connect()
    cluster.patience_s = 0.0
    assert cluster.get(NAMESPACES, "default")["metadata"]["name"] == "default"
    assert cluster.namespace == "ml"
    return cluster


def program(folder: Path, expires: str) -> dict[str, Any]:
    path = folder / "token-program"
    path.write_text(PROGRAM.format(folder=folder, expires=expires))
    path.chmod(0o755)
    environment = [{"name": "TOKEN", "value": "let-me-in"}]
    return {"apiVersion": "client.authentication.k8s.io/v1", "command": "./token-program", "env": environment}


def test_a_token_in_the_kubeconfig_or_in_a_file_beside_it(server, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(f"{server.token}\n")
    for user in ({"token": server.token}, {"tokenFile": "token"}):
        reached(monkeypatch, kubeconfig(tmp_path, server.url, user))


@pytest.mark.parametrize(("expires", "times"), [("2999-01-01T00:00:00Z", 1), ("2001-01-01T00:00:00Z", 3)])
def test_a_program_is_asked_for_a_token_again_only_when_it_has_expired(server, tmp_path, monkeypatch, expires, times):
    cluster = reached(monkeypatch, kubeconfig(tmp_path, server.url, {"exec": program(tmp_path, expires)}))
    cluster.get(NAMESPACES, "default")
    assert (tmp_path / "asked").read_text().count("asked") == times


def test_a_program_that_gives_no_token_is_named_with_what_it_said(server, tmp_path, monkeypatch):
    path = tmp_path / "token-program"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url, {"exec": program(tmp_path, "")})))
    path.write_text("#!/bin/sh\necho your login has expired >&2; exit 1\n")
    with pytest.raises(AccessDenied, match="token-program gave no token: your login has expired"):
        connect()


def test_of_several_kubeconfigs_the_first_that_has_an_entry_counts(server, tmp_path, monkeypatch):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "token").write_text(server.token)
    first = kubeconfig(folders[0], "http://127.0.0.1:9", {"tokenFile": "token"})
    document = yaml.safe_load(first.read_text()) | {"clusters": []}
    first.write_text(yaml.safe_dump(document))
    reached(monkeypatch, first, kubeconfig(folders[1], server.url, {"token": "wrong"}))


@pytest.mark.parametrize("config", [{"id-token": "{token}"}, {"access-token": "{token}"}])
def test_a_token_that_kubectl_keeps_for_a_provider_is_used(server, tmp_path, monkeypatch, config):
    kept = {name: text.format(token=server.token) for name, text in config.items()}
    reached(monkeypatch, kubeconfig(tmp_path, server.url, {"auth-provider": {"name": "oidc", "config": kept}}))


def test_a_password_is_sent_as_basic_authorization(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url, {"username": "a", "password": "b"})))
    assert connect().login.authorization() == "Basic YTpi"


@pytest.mark.parametrize("by", ["environment", "kubeconfig"])
def test_a_proxy_is_asked_where_one_is_set(server, tmp_path, monkeypatch, by):
    """The test server takes what a client sends to a proxy: a whole URL."""
    proxied = {"proxy-url": server.url} if by == "kubeconfig" else {}
    if by == "environment":
        monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    path = kubeconfig(tmp_path, "http://cluster.example", {"token": server.token}, **proxied)
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert connect().login.pool.proxy.url == server.url
    monkeypatch.setenv("no_proxy", "cluster.example")
    assert (connect().login.pool.proxy is None) == (by == "environment")


def test_a_program_may_ask_for_the_cluster_and_give_a_certificate(server, tmp_path, monkeypatch):
    script = tmp_path / "token-program"
    credential = {"status": {"token": server.token, "clientCertificateData": "pem", "clientKeyData": "key"}}
    script.write_text(f"#!/bin/sh\necho $KUBERNETES_EXEC_INFO > {tmp_path}/info\necho '{json.dumps(credential)}'\n")
    script.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    user = {"exec": {"apiVersion": version, "command": "./token-program", "provideClusterInfo": True}}
    (tmp_path / "ca").write_text("authority")
    trusted = {"certificate-authority": "ca", "tls-server-name": "localhost"}
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url, user, **trusted)))
    options = connect().login.pool.connection_pool_kw
    assert [Path(options[name]).read_text() for name in ("cert_file", "key_file")] == ["pem", "key"]
    assert json.loads((tmp_path / "info").read_text())["spec"]["cluster"] == {
        "server": f"{server.url}/",
        "tls-server-name": "localhost",
        "certificate-authority-data": base64.b64encode(b"authority").decode(),
    }


@pytest.mark.parametrize("broken", ["current-context: nothing\ncontexts: []\n", "[]", "{"])
def test_a_kubeconfig_that_is_wrong_is_an_error_with_a_hint(tmp_path, monkeypatch, broken):
    (tmp_path / "config").write_text(broken)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="can't connect to a cluster") as wrong:
        connect()
    assert "KUBECONFIG" in wrong.value.hint


def test_a_pod_logs_in_as_its_service_account(tmp_path, monkeypatch):
    for name, content in (("token", "from-the-kubelet\n"), ("namespace", "ml"), ("ca.crt", "")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(login, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cluster = connect()
    assert (cluster.address, cluster.namespace) == ("https://[fd00::1]:443", "ml")
    assert cluster.login.authorization() == "Bearer from-the-kubelet"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = json.dumps({"metadata": {"name": "default"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[str]:
    """The address of a server that asks for a client's certificate; its own certificate is the authority, too."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "crt")]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    context.load_verify_locations(tmp_path / "crt")
    context.verify_mode = ssl.CERT_REQUIRED
    server = HTTPServer(("127.0.0.1", 0), Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("inline", [True, False])
def test_certificates_stand_in_the_kubeconfig_or_beside_it(secured, tmp_path, monkeypatch, inline):
    def given(name: str, file: str) -> dict[str, str]:
        data = base64.b64encode((tmp_path / file).read_bytes()).decode()
        return {f"{name}-data": data} if inline else {name: file}

    user = given("client-certificate", "crt") | given("client-key", "key")
    trusted = given("certificate-authority", "crt") | {"tls-server-name": "localhost"}
    reached(monkeypatch, kubeconfig(tmp_path, secured, user, **trusted))
    untrusted = kubeconfig(tmp_path, secured, user, **{"tls-server-name": "localhost"})
    with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        reached(monkeypatch, untrusted)
    insecure = kubeconfig(tmp_path, secured, user, **{"insecure-skip-tls-verify": True})
    reached(monkeypatch, insecure)
