"""Where a release comes from: its provenance, an in-toto statement with SLSA's predicate, and its bill of materials, in
CycloneDX. Both are files of the release, and therefore signed with it.

https://slsa.dev/spec/v1.1/provenance and https://cyclonedx.org/docs/1.6/json
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import NotTrusted
from stages.parts.base.files import sha256_of, write_json
from stages.parts.model.adapter import FOLDER
from stages.parts.model.hub import COMMIT
from stages.parts.records.acquired import Acquired
from stages.parts.records.production import Production
from stages.parts.records.variant import Variant

PROVENANCE: Final = "provenance.json"
BOM: Final = "bom.cdx.json"
TYPES: Final = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://slsa.dev/provenance/v1"}
Json = dict[str, Any]


def write_origin(
    work: Path, base: Acquired | None, variant: Variant, adapters: Mapping[str, Acquired], decision: Production
) -> None:
    """Write both documents of the release in *work*, where all else is; *base* is None if the store has another one."""
    files = {file.path: file.sha256 for file in variant.files}
    for name, adapter in adapters.items():
        files |= {f"{FOLDER}/{name}/{file.path}": file.sha256 for file in adapter.files}
    hub, made = base.source if base else "", variant.parameters
    sources = [_source(decision.model, hub, decision.commit, decision.base_digest)]
    sources += [_source(each.model, each.source, each.commit, each.digest) for each in adapters.values()]
    if variant.published and "source" in made:  # of a repository of its own
        sources.append(_source(made["source"], hub, made["commit"], variant.digest))
    if variant.calibration_digest:
        sources.append(_hashed("calibration set", variant.calibration_digest))
    tools = {"slipway": decision.slipway, decision.engine.name: decision.engine.version, **variant.tool_versions}
    records = {path.relative_to(work).as_posix(): path for path in sorted(work.rglob("*.json"))}
    build = {
        "buildType": "urn:slipway:release:v1",
        "externalParameters": {"model": decision.model, "profile": decision.profile, "workload": decision.workload},
        "internalParameters": {"variant": decision.winner, "method": variant.method, **made},
        "resolvedDependencies": sources,
    }
    run = {
        "builder": {"id": "urn:slipway", "version": tools},
        "metadata": {"invocationId": decision.run or "", "finishedOn": decision.decided_at.isoformat()},
        "byproducts": [_hashed(name, sha256_of(path)) for name, path in records.items() if name not in files],
    }
    subject = [_hashed(name, sha256) for name, sha256 in sorted(files.items())]
    statement = {**TYPES, "subject": subject, "predicate": {"buildDefinition": build, "runDetails": run}}
    write_json(work / PROVENANCE, statement)
    write_json(work / BOM, _bill(decision, variant, adapters, files, tools))


def _hashed(name: str, sha256: str) -> Json:
    return {"name": name, "digest": {"sha256": sha256}}


def _source(name: str, origin: str, commit: str, digest: str) -> Json:
    """Describe a repository at a commit, or a directory, whose *digest* is that of all its files together."""
    described: Json = {"name": name, "annotations": {"commit": commit, "filesDigest": digest}}
    if COMMIT.fullmatch(commit):
        described["digest"] = {"gitCommit": commit}
    if origin:
        local = origin.startswith("local:")
        described["uri"] = f"file://{origin.removeprefix('local:')}" if local else f"git+{origin}/{name}@{commit}"
    return described


def _bill(
    decision: Production,
    variant: Variant,
    adapters: Mapping[str, Acquired],
    files: Mapping[str, str],
    tools: Mapping[str, str],
) -> Json:
    raw, units, kind = decision.chosen.raw, decision.units, {"type": "machine-learning-model"}
    figures = [{"type": name, "value": f"{value:g} {units.get(name, '')}".rstrip()} for name, value in raw.items()]
    model: Json = {
        **kind,
        "bom-ref": decision.release,
        "name": decision.model,
        "version": decision.release,
        "description": f"{variant.variant}: {variant.method}, {variant.bits} bits",
        "modelCard": {"quantitativeAnalysis": {"performanceMetrics": figures}},
        "pedigree": {"ancestors": [{**kind, "name": decision.model, "version": decision.commit}]},
    }
    if decision.license:
        model["licenses"] = [{"license": {"name": decision.license}}]
    parts: list[Json] = [
        {**kind, "bom-ref": name, "name": each.model, "version": each.commit} for name, each in adapters.items()
    ]
    parts += [
        {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256}]}
        for name, sha256 in sorted(files.items())
    ]
    used = [{"type": "application", "name": name, "version": version} for name, version in tools.items()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, decision.key)}",
        "version": 1,
        "metadata": {"timestamp": decision.decided_at.isoformat(), "tools": {"components": used}, "component": model},
        "components": parts,
        "dependencies": [{"ref": decision.release, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def check_origin(release: Path, signed: Mapping[str, str]) -> Json:
    """Compare both documents with the digests that were *signed*, by path; return the statement's predicate, which is
    empty for a release of a version that wrote none. Raises: NotTrusted: they do not describe what was signed."""
    if PROVENANCE not in signed and BOM not in signed:
        return {}
    try:
        statement, bill = (json.loads((release / name).read_bytes()) for name in (PROVENANCE, BOM))
        predicate: Json = statement["predicate"]
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        records = {each["name"]: each["digest"]["sha256"] for each in predicate["runDetails"]["byproducts"]}
        listed = {each["name"]: each["hashes"][0]["content"] for each in bill["components"] if each["type"] == "file"}
        described = subjects | records | {name: signed[name] for name in (PROVENANCE, BOM)}
        if described != signed or listed != subjects or not TYPES.items() <= statement.items():
            raise NotTrusted(f"{release.name} has other files than its {PROVENANCE} and {BOM} name")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotTrusted(f"{release.name}: {PROVENANCE} or {BOM} is not valid: {error}") from error
    return predicate
