"""TLS before an endpoint: the given certificate, and the next one as soon as it is there."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.endpoint.tls import Tls, tls_of
from stages.parts.vllm.client import Access, healthy
from stages.rollout.scene import SteadyLoad
from tests.serving import wait_until
from tests.stages.parts.endpoint.test_clients import MODEL, serving

Made = Callable[[str], Tls]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Writes a certificate of that name and its key, over those before."""

    def write(name: str) -> Tls:
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .sign(key, hashes.SHA256())
        )
        found = Tls(tmp_path / "tls.crt", tmp_path / "tls.key")
        found.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        found.key.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        return found

    return write


def shown(url: str) -> str:
    """The name in the certificate that the endpoint shows."""
    address = httpx.URL(url)
    pem = ssl.get_server_certificate((address.host, address.port or 0))
    return str(x509.load_pem_x509_certificate(pem.encode()).subject.rfc4514_string())


def test_the_endpoint_shows_the_given_certificate_and_answers_nothing_in_clear(tmp_path: Path, made: Made) -> None:
    tls = made("first")
    with serving(tmp_path, tls=tls) as front:
        assert shown(front.url) == "CN=first"
        assert healthy(front.url, str(tls.certificate))
        assert not healthy(front.url), "nobody trusts it without being told"
        with pytest.raises(httpx.HTTPError):
            httpx.get(front.url.replace("https", "http"))
        access = Access(front.url, MODEL, certificate=str(tls.certificate))
        load = SteadyLoad(access, 1, (2, 2))
        with load:
            wait_until(load.replies, "an answer")
        assert load.failed() == []


def test_a_certificate_that_was_replaced_is_shown_without_a_restart(tmp_path: Path, made: Made) -> None:
    tls = made("first")
    with serving(tmp_path, tls=tls) as front:
        assert shown(front.url) == "CN=first"
        key = tls.key.read_bytes()
        made("second")
        second = tls.key.read_bytes()
        tls.key.write_bytes(key)  # the certificate is there already, its key is not
        with pytest.raises(ConfigError, match="are no certificate and its key"):
            front.proxy.follow_certificate()
        assert shown(front.url) == "CN=first"
        tls.key.write_bytes(second)
        front.proxy.follow_certificate()
        wait_until(lambda: shown(front.url) == "CN=second", "the next certificate")
        tls.key.unlink()
        front.proxy.follow_certificate()
        assert shown(front.url) == "CN=second"


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_is_served(tmp_path: Path, made: Made) -> None:
    tls = made("first")
    paths = {"tls_certificate": str(tls.certificate), "tls_key": str(tls.key)}
    assert tls_of(Serving.model_validate(paths)) == tls
    tls.key.write_text("no key")
    with pytest.raises(ConfigError, match="are no certificate and its key"):
        tls_of(Serving.model_validate(paths))
    with pytest.raises(ValidationError, match="belong together"):
        Serving(tls_certificate=str(tls.certificate))
    with pytest.raises(ValidationError, match="tls_key"):
        Serving(tls_certificate=str(tls.certificate), tls_key="tls.key")


def test_other_machines_are_served_without_tls_only_if_that_is_wanted() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert tls_of(Serving(host=host)) is None
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.com"):  # noqa: S104
        with pytest.raises(ConfigError, match="in clear text"):
            tls_of(Serving(host=host))
        assert tls_of(Serving(host=host, plain_http=True)) is None
