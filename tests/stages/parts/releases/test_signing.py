"""Signed releases: others' tools verify them, and one that was altered is refused before a byte of it is loaded."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor

from pipeline.upkeep.checking import Digests, check
from scoring.profile import Profile
from stages.parts.base.errors import ConfigError, NotTrusted
from stages.parts.base.files import sha256_of
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import SERVERS, endpoint, stop
from stages.parts.releases.listing import catalogue
from stages.parts.releases.provenance import BOM, PROVENANCE
from stages.parts.releases.signing import (
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    SIGNATURE,
    check_trust,
    sign,
    signer_of,
    verify,
)
from stages.select.selection import select
from tests.samples import MODEL, measured_store
from tests.serving import ROLLOUT, SERVING, environment, publish, stage, stand_in_variant

AUTHORITY: Final = """
[ca]
default_ca = own
[own]
database = index
new_certs_dir = .
default_md = sha256
policy = any
rand_serial = yes
unique_subject = no
[any]
O = optional
CN = supplied
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[signer]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
"""


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A private key and its public key, as ``openssl ecparam -genkey`` and ``openssl ec -pubout`` write them."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def certify(folder: Path, name: str, by: str = "", *, use: str = "authority", until: str = "2046") -> tuple[Path, Path]:
    """A private key and its certificate, made by openssl, signed by the key of *by*; without it, by its own. The file
    of the certificate goes on with those of the authorities below the root."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, check=True)

    key, certificate, request = (folder / f"{name}.{end}" for end in ("key", "pem", "csr"))
    (folder / "ca.cnf").write_text(AUTHORITY)
    (folder / "index").touch()
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-new", *curve, "-keyout", str(key), "-out", str(request), "-subj", f"/O=Example/CN={name}")
    signer = ("-cert", f"{by}.pem", "-keyfile", f"{by}.key") if by else ("-selfsign", "-keyfile", str(key))
    dates = ("-startdate", "20200101000000Z", "-enddate", f"{until}0101000000Z")
    command = ("ca", "-config", "ca.cnf", "-batch", "-notext", "-extensions", use)
    openssl(*command, *signer, *dates, "-in", str(request), "-out", str(certificate))
    if by not in ("", "root"):
        certificate.write_text(certificate.read_text() + (folder / f"{by}.pem").read_text())
    return key, certificate


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path, "ours")


@pytest.fixture
def release(tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that select published where there is a key."""
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    monkeypatch.setenv(KEY_VARIABLE, str(keys[0]))
    store = measured_store(tmp_path / "store")
    select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    return store.production.resolve()


def test_what_is_published_with_a_key_is_signed_and_the_upstream_tool_accepts_it(
    release: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    verify(release, keys[1])
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(release)]
    command += ["--signature", str(release / SIGNATURE), "--public_key"]
    accepted = subprocess.run([*command, str(keys[1])], capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    _, other = key_pair(tmp_path, "theirs")
    assert subprocess.run([*command, str(other)], capture_output=True, check=False).returncode != 0
    assert check(ModelStore(release.parents[2], MODEL), Digests()).unreferenced == ()


def test_provenance_and_a_bill_of_materials_are_signed_with_it_and_valid(
    release: Path, keys: tuple[Path, Path]
) -> None:
    statement = json.loads((release / PROVENANCE).read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    json_format.ParseDict(statement["predicate"], Provenance())  # an unknown field is an error
    for descriptor in [*statement["subject"], *statement["predicate"]["buildDefinition"]["resolvedDependencies"]]:
        ResourceDescriptor.copy_from_pb(json_format.ParseDict(descriptor, ResourceDescriptor().pb)).validate()
    assert verify(release, keys[1]) == statement["predicate"]
    (source,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": "c" * 40}
    assert source["uri"] == f"git+http://hub.example/{MODEL}@{'c' * 40}"
    run = statement["predicate"]["runDetails"]
    assert run["metadata"]["invocationId"] == "run-1"
    assert run["builder"]["version"]["torch"] == "2.13.0"
    described = {each["name"]: each["digest"]["sha256"] for each in [*statement["subject"], *run["byproducts"]]}
    files = {path.name for path in release.iterdir()} - {SIGNATURE, PROVENANCE, BOM}
    assert described == {name: sha256_of(release / name) for name in files}
    bill = (release / BOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill) is None
    model = json.loads(bill)["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == ("machine-learning-model", MODEL, release.name)
    assert {each["type"] for each in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]} >= {"quality"}


def test_a_bill_of_other_files_is_refused_although_it_is_signed(release: Path, keys: tuple[Path, Path]) -> None:
    bill = json.loads((release / BOM).read_text())
    bill["components"][0]["hashes"][0]["content"] = "0" * 64
    for content, message in ((json.dumps(bill), "has other files than"), ("{", "is not valid"), ("[]", "is not valid")):
        (release / BOM).write_text(content)
        sign(release, keys[0])
        with pytest.raises(NotTrusted, match=message):
            verify(release, keys[1])
    (release / BOM).unlink()
    sign(release, keys[0])
    with pytest.raises(NotTrusted, match="is not valid"):
        verify(release, keys[1])
    (release / PROVENANCE).unlink()  # as an older version published it
    sign(release, keys[0])
    assert verify(release, keys[1]) == {}


def test_a_key_in_the_variable_itself_signs_and_the_signer_is_shown(release: Path, keys: tuple[Path, Path]) -> None:
    signer = hashlib.sha256(keys[1].read_bytes()).hexdigest()
    assert signer_of(release) == signer
    store = ModelStore(release.parents[2], MODEL)
    assert [row.signer for row in catalogue(store)] == [signer]
    (release / SIGNATURE).unlink()
    assert signer_of(release) == ""
    sign(release, keys[0].read_text())
    verify(release, keys[1])
    assert signer_of(release) == signer
    command = [sys.executable, "-m", "pipeline", "verify", MODEL, "--key", str(keys[1]), "--store", str(store.root)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"made of {MODEL} at {'c' * 40} by slipway" in " ".join(shown.split())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The certificate of an authority, with what it certified beside it: ``team``, and by this ``release`` and ``old``,
    which is no longer valid."""
    _, root = certify(tmp_path, "root")
    certify(tmp_path, "team", "root")
    certify(tmp_path, "release", "team", use="signer")
    certify(tmp_path, "old", "team", use="signer", until="2021")
    return root


def test_a_release_signed_with_a_certificate_is_verified_by_the_root_alone(
    tmp_path: Path, root: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = root.with_name("release.key"), root.with_name("release.pem")
    monkeypatch.setenv(KEY_VARIABLE, key.read_text())
    monkeypatch.setenv(CERTIFICATE_VARIABLE, f"subject=CN = release\n{certificate.read_text()}")
    store = measured_store(tmp_path / "store")
    select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    release = store.production.resolve()
    verify(release, root)
    _, other = certify(tmp_path, "other")
    for name in (other, root.with_name("team.pem"), certificate):  # without its root, no certificate is trusted
        with pytest.raises(NotTrusted, match=f"is not what {name.name} signed: unable to get"):
            verify(release, name)
    with pytest.raises(NotTrusted, match="signed with a certificate, not a key, or the reverse"):
        verify(release, keys[1])
    command = [sys.executable, "-m", "model_signing", "verify", "certificate", str(release)]
    command += ["--signature", str(release / SIGNATURE), "--certificate_chain"]
    for trusted, status in ((root, 0), (other, 1)):
        assert subprocess.run([*command, str(trusted)], capture_output=True, check=False).returncode == status
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-fingerprint", "-sha256"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fingerprint = shown.partition("=")[2].strip().replace(":", "").lower()
    assert signer_of(release) == f"{fingerprint} CN=release,O=Example"
    bundle = json.loads((release / SIGNATURE).read_text())
    bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][0]["rawBytes"] = "MIIB"
    (release.parent / SIGNATURE).write_text(json.dumps(bundle))
    assert signer_of(release.parent) == ""
    weights = release / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(NotTrusted, match=r"Hash mismatch for .*model\.safetensors"):
        verify(release, root)


def test_a_certificate_replaces_a_key_by_the_command_and_what_signed_is_shown(release: Path, root: Path) -> None:
    with pytest.raises(NotTrusted, match="signed with a certificate, not a key, or the reverse"):
        verify(release, root)
    command, where = [sys.executable, "-m", "pipeline"], ["--store", str(release.parents[2])]
    signer = ["--key", str(root.with_name("release.key")), "--certificate", str(root.with_name("release.pem"))]
    subprocess.run([*command, "sign", MODEL, *signer, *where], check=True)
    verified = [*command, "verify", MODEL, "--key", str(root), *where]
    shown = subprocess.run(verified, capture_output=True, text=True, check=True).stdout
    assert f"is what {root} signed ({signer_of(release)[:16]}… CN=release,O=Example)" in " ".join(shown.split())


def test_a_certificate_counts_as_it_was_on_its_first_day_and_only_if_it_may_sign(release: Path, root: Path) -> None:
    sign(release, root.with_name("old.key"), root.with_name("old.pem"))
    verify(release, root)
    sign(release, root.with_name("team.key"), root.with_name("team.pem"))
    with pytest.raises(NotTrusted, match="cannot be used for signing"):
        verify(release, root)


def test_certificates_that_can_not_be_used_are_named(release: Path, root: Path, keys: tuple[Path, Path]) -> None:
    key, certificate = root.with_name("release.key"), root.with_name("release.pem")
    for unusable in (root, root.with_name("missing.pem"), keys[1]):
        with pytest.raises(ConfigError, match="no key to sign with"):
            sign(release, key, unusable)
    with_key = root.with_name("both.pem")
    for public in (root, keys[1]):
        with_key.write_bytes(public.read_bytes() + key.read_bytes())
        with pytest.raises(ConfigError, match="also holds a private one"):
            verify(release, with_key)
    with_key.write_text(certificate.read_text().replace("MII", "MIX"))
    with pytest.raises(ConfigError, match="no key to verify with"):
        verify(release, with_key)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "production_metrics.json", "variant.json", BOM])
def test_one_altered_byte_is_refused(release: Path, keys: tuple[Path, Path], name: str) -> None:
    content = (release / name).read_bytes()
    (release / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(NotTrusted, match=name):
        verify(release, keys[1])


def test_another_key_a_further_file_a_missing_one_and_a_broken_signature_are_refused(
    release: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(NotTrusted, match=r"is not what theirs\.pub signed"):
        verify(release, key_pair(tmp_path, "theirs")[1])
    (release / ".gitattributes").write_text("")
    with pytest.raises(NotTrusted, match="Extra files"):
        verify(release, keys[1])
    (release / ".gitattributes").unlink()
    verify(release, keys[1])
    (release / "config.json").unlink()
    with pytest.raises(NotTrusted, match="Missing files"):
        verify(release, keys[1])
    for broken in ("", "{}", "[1]", json.dumps({"dsseEnvelope": None}), "\x00"):
        (release / SIGNATURE).write_text(broken)
        with pytest.raises(NotTrusted, match="is not what"):
            verify(release, keys[1])


def test_keys_that_can_not_be_used_are_named(release: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    for unusable in (tmp_path / "missing.pem", release / "config.json"):
        with pytest.raises(ConfigError, match="no key to sign with"):
            sign(release, unusable)
        with pytest.raises(ConfigError, match="no key to verify with"):
            verify(release, unusable)
    verify(release, keys[1])


def test_the_policy_decides_what_becomes_of_an_unsigned_release(
    release: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (release / SIGNATURE).unlink()
    check_trust(release, AskedServing())
    check_trust(release, AskedServing(signing="warn", verification_key=str(keys[1])))
    assert "is not signed" in capsys.readouterr().err
    with pytest.raises(NotTrusted, match="is not signed"):
        check_trust(release, AskedServing(signing="require", verification_key=str(keys[1])))
    with pytest.raises(ValueError, match="needs a verification_key"):
        AskedServing(signing="require")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ModelStore]:
    served = ModelStore(tmp_path / "served", MODEL)
    yield served
    stop(served)


def test_an_endpoint_that_requires_it_serves_only_what_is_signed(served: ModelStore, keys: tuple[Path, Path]) -> None:
    release = publish(served, 1, stand_in_variant(served, "fp16"))
    required = SERVING | {"signing": "require", "verification_key": str(keys[1])}
    flags = ["--serving", json.dumps(required), "--rollout", json.dumps(ROLLOUT)]
    variables = environment(served, stand_in=True)
    refused = stage("serve", *flags, variables=variables)
    assert f"{release} is not signed" in refused.stderr
    assert refused.returncode != 0
    assert not (served.path / SERVERS / f"{release}.log").exists(), "vLLM was started"
    command = [sys.executable, "-m", "pipeline"]
    where = ["--store", str(served.root)]
    signed = subprocess.run([*command, "sign", MODEL, "--key", str(keys[0]), *where], check=False)
    assert signed.returncode == 0
    assert stage("serve", *flags, variables=variables).returncode == 0
    assert endpoint(served)
    stop(served)
    weights = served.releases / release / "model.safetensors"
    weights.write_bytes(b"Weights")
    altered = stage("serve", *flags, variables=variables)
    assert altered.returncode != 0
    assert "Hash mismatch for 'model.safetensors'" in altered.stderr
    assert endpoint(served) is None
    said = subprocess.run([*command, "verify", MODEL, "--key", str(keys[1]), *where], capture_output=True, check=False)
    assert said.returncode == 46
