"""Signatures of releases, in the format of OpenSSF's model-signing, whose own tools verify them, too.

``model.sig`` in a release's directory is a Sigstore bundle with an in-toto statement: the sha256 of every other file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import ConfigError, NotTrusted
from stages.parts.base.files import beside, fsync
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing
from stages.parts.releases.provenance import check_origin

SIGNATURE: Final = "model.sig"
KEY_VARIABLE: Final = "SLIPWAY_SIGNING_KEY"
"""The private key with which releases are signed, on the curve P-256, P-384 or P-521: the path of a PEM file or, in a
pod, the PEM itself."""
CERTIFICATE_VARIABLE: Final = "SLIPWAY_SIGNING_CERTIFICATE"
"""The key's X.509 certificate, if it has one, followed by those between it and its root; given as the key is."""


def sign_if_asked(release: Path) -> None:
    """Sign a release that is not signed yet, if there is a key. Raises: ConfigError: the key can't be used."""
    if (key := os.environ.get(KEY_VARIABLE)) and not (release / SIGNATURE).exists():
        sign(release, key, os.environ.get(CERTIFICATE_VARIABLE))


def sign(release: Path, private_key: str | Path, certificate: str | Path | None = None) -> None:
    """Sign all files of a release; an earlier signature is replaced. Reads every byte. Raises: ConfigError: the key
    can't be used, or is not the certificate's."""
    from model_signing import signing

    work = beside(release.parent / SIGNATURE)  # not in the release, where it would be signed
    config = signing.Config()
    with _file(private_key) as key, _file(certificate or "") as chain:
        try:
            if certificate:  # the first one in the file signs
                config.use_certificate_signer(private_key=key, signing_certificate=chain, certificate_chain=[chain])
            else:
                config.use_elliptic_key_signer(private_key=key)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{key} is no key to sign with: {error}", hint=f"see {KEY_VARIABLE}") from error
    try:
        config.set_hashing_config(_hashing(release)).sign(release, work)
        fsync(work)
        os.replace(work, release / SIGNATURE)
        fsync(release)
    finally:
        work.unlink(missing_ok=True)


def check_trust(release: Path, serving: AskedServing) -> None:
    """Verify a release before it is loaded, as ``serving.signing`` demands. Raises: NotTrusted, ConfigError."""
    if serving.signing == "off":
        return
    try:
        verify(release, Path(serving.verification_key or ""))
    except NotTrusted as error:
        if serving.signing == "require":
            raise
        say(f"warning: {error}")


def verify(release: Path, public_key: Path) -> dict[str, Any]:
    """Compare every byte of a release with its signature, and what it says of its origin with what was signed. Returns
    that: the predicate of its provenance, as ``check_origin``. *public_key* is as ``verifier`` takes it.

    Raises:
        NotTrusted: it is not signed, not by this key, or has other files than were signed or described.
        ConfigError: the key can't be used.
    """
    if not (release / SIGNATURE).is_file():
        raise NotTrusted(f"{release.name} is not signed", hint="if you trust it: slipway sign MODEL")
    config = verifier(public_key)
    try:
        config.set_hashing_config(_hashing(release)).verify(release, release / SIGNATURE)
        payload = json.loads(base64.b64decode(_bundle(release)["dsseEnvelope"]["payload"]))
        signed = {each["name"]: each["digest"] for each in payload["predicate"]["resources"]}
    except Exception as error:  # of whatever kind, since anything may stand in the file
        # The library looks for what a signature of the other kind lacks.
        other = "signed with a certificate, not a key, or the reverse" if isinstance(error, AttributeError) else ""
        raise NotTrusted(
            f"{release.name} is not what {public_key.name} signed: {other or str(error) or type(error).__name__}",
            hint="do not serve it: go back with slipway rollback, or restore a backup",
        ) from error
    return check_origin(release, signed)


def verifier(trusted: Path) -> Any:
    """Make what verifies with a public key or, if the file holds certificates, with these as the trusted roots. Raises:
    ConfigError: it is neither, or holds a private key."""
    from model_signing import verifying

    try:
        pem = trusted.read_bytes()
        if b"-----BEGIN CERTIFICATE-----" in pem:
            config = verifying.Config().use_certificate_verifier(certificate_chain=[trusted])
        else:
            config = verifying.Config().use_elliptic_key_verifier(public_key=trusted)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{trusted} is no key to verify with: {error}", hint="a public key or roots, PEM") from error
    if b"PRIVATE KEY-----" in pem:  # beside what was read
        raise ConfigError(f"{trusted} is no key to verify with: it also holds a private one", hint="take it out")
    return config


def signer_of(release: Path) -> str:
    """Read who signed a release, as it says itself: the sha256 of the public key as PEM or, of a certificate, its
    sha256 fingerprint and its subject. Empty if it is not signed."""
    from OpenSSL import crypto

    try:
        material = _bundle(release)["verificationMaterial"]
        if "publicKey" in material:
            return str(material["publicKey"]["hint"])
        der = base64.b64decode(material["x509CertificateChain"]["certificates"][0]["rawBytes"])
        subject = crypto.load_certificate(crypto.FILETYPE_ASN1, der).to_cryptography().subject.rfc4514_string()
        return f"{hashlib.sha256(der).hexdigest()} {''.join(filter(str.isprintable, subject))}"
    except (OSError, ValueError, LookupError, TypeError, crypto.Error):
        return ""


def _bundle(release: Path) -> Any:
    return json.loads((release / SIGNATURE).read_bytes())


@contextlib.contextmanager
def _file(key: str | Path) -> Iterator[Path]:
    """Yield the file of a key; one that is given as PEM is written to memory only."""
    if "-----BEGIN" not in str(key):
        yield Path(key)
        return
    with os.fdopen(os.memfd_create(KEY_VARIABLE), "wb", buffering=0) as file:
        file.write(str(key).encode())
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _hashing(release: Path) -> Any:
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[release / SIGNATURE], ignore_git_paths=False)
