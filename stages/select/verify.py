"""Verify that a published decision follows from what was measured, by computing everything again from the raw samples.

Everything that was changed since is found and named at once: a sample (by the digest of its file, and by every figure
that it affects), a file of a variant, a digest, a number in a document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from scoring.names import PRODUCTION, variant_of
from stages.parts.base.errors import DamagedModel, NoWinner, SlipwayError
from stages.parts.base.files import read_object, sha256_of
from stages.parts.model.adapter import FOLDER, adapters_in
from stages.parts.records.acquired import ACQUIRED, Acquired, files_digest
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import RULES
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.capacity import RULE, capacity_of
from stages.parts.samples.figures import goodput_of, load_of, pooled_load, task_score
from stages.parts.samples.lines import Samples, read_samples
from stages.select.decision import decide
from stages.select.stored import ANSWERS, DECISION, MEASUREMENTS, Asked, StoredDecision, differences, read_stored

NOT_COMPARED: Final = {"run", "release", "decided_at", "wording", "slipway", "standing.forced"}
"""Fields of a decision that do not follow from the measurements."""
REPORT: Final = "report.json"
PUBLISHED: Final = ("production_metrics.json", "candidate_metrics.json")
OVER_STARTS: Final = re.compile(r"\.intervals\.|capacity\.(low|high)$")
ROUNDED: Final = 0.005
"""How far, as a share, the recorded ends of intervals over starts may be off: rules before 11 rounded Student's t."""


@dataclass
class Verification:
    """What was compared, and what does not agree."""

    winner: str | None = None
    """The recomputed decision."""
    nobody: str | None = None
    """Why no variant can be chosen, as recomputed."""
    replayed_by: str = ""
    """The version of Slipway by whose rules it was decided, if these are not ours."""
    compared: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a later run has replaced, or an earlier rule gave: it cannot be compared any more, which is no fault."""
    not_recomputed: list[str] = field(default_factory=list)
    """Figures that have no samples."""


def verify(run: Path) -> Verification:
    """Recompute the decision of a run, by its folder in the store; writes nothing. Raises the errors of
    ``read_stored``."""
    stored, verification = read_stored(run), Verification()
    evaluations: dict[str, Evaluation] = {}
    samples: dict[str, Samples] = {}
    for name, evaluation in stored.evaluations.items():
        check_samples(stored, evaluation, verification)
        check_weights(stored, evaluation, verification)
        try:
            samples[name] = read_samples(stored.samples_path(name), evaluation)
        except DamagedModel as error:
            verification.findings.append(str(error))
        else:
            evaluations[name] = check_evaluation(evaluation, samples[name], verification)
    asked = check_answers(stored, verification)
    if len(samples) == len(stored.evaluations) and bool(asked) == bool(stored.answers):
        check_decision(stored, evaluations, samples, asked, verification)
        check_report(stored, evaluations, verification)
    return verification


def check_samples(stored: StoredDecision, evaluation: Evaluation, verification: Verification) -> None:
    """Compare the digests of the files of samples: in the run's folder, and in the store if they belong to this run."""
    name = evaluation.variant
    current, paths = stored.store.evaluation(name), [stored.samples_path(name)]
    document = read_object(current)
    if document and document.get("key") == evaluation.key and not _measured_again(current, evaluation):
        paths.append(current.with_suffix(SAMPLES_SUFFIX))
        if document != read_object(stored.folder / MEASUREMENTS / f"{name}.json"):
            verification.findings.append(f"{stored.shown(current)} is not what {stored.folder.name} decided by")
    for path in paths:
        _check_digest(stored, path, evaluation.samples_sha256, verification)


def check_answers(stored: StoredDecision, verification: Verification) -> Asked | None:
    """Compare the answers of a reference that was asked only with their digest and their figures; None if there are
    none, or if they can't be read."""
    try:
        asked = stored.asked()
    except DamagedModel as error:
        verification.findings.append(str(error))
        return None
    if asked is None:
        return None
    answers, path = asked.answers, stored.samples_path(ANSWERS)
    _check_digest(stored, path, answers.samples_sha256, verification)
    verification.findings += [
        f"answers of {answers.variant}: {score.task} is {score.value}, the samples give {computed.value}"
        for score in answers.quality
        if (computed := task_score(score, asked.samples)) and computed != score
    ]
    return asked


def _check_digest(stored: StoredDecision, path: Path, recorded: str, verification: Verification) -> None:
    verification.compared.append(stored.shown(path))
    if (sha256 := _sha256(path)) != recorded:
        verification.findings.append(
            f"samples were changed: {stored.shown(path)} has sha256 {sha256[:12]}…, {recorded[:12]}… was recorded"
        )


def _measured_again(current: Path, evaluation: Evaluation) -> bool:
    """Return whether the store holds a later measurement under the same conditions, or the same one continued, with its
    own samples."""
    later = Evaluation.read_if_intact(current)
    if later is None or (later.started_at, later.seconds) <= (evaluation.started_at, evaluation.seconds):
        return False
    return _sha256(current.with_suffix(SAMPLES_SUFFIX)) == later.samples_sha256 != evaluation.samples_sha256


def check_weights(stored: StoredDecision, evaluation: Evaluation, verification: Verification) -> None:
    """Compare every file of the variant, and of the releases made of it, with the manifest whose digest was measured.

    A variant that was made again since then has other weights; a release keeps those that were measured, and so does
    the one that was in production.
    """
    released, digest12 = variant_of(evaluation.variant) == PRODUCTION, evaluation.variant_digest[:12]
    suffix = f"-{digest12}" if released else f"-{variant_of(evaluation.variant)}-{digest12}"
    current = stored.store.optimized(evaluation.variant)
    releases = sorted(path for path in stored.store.releases.glob("*") if path.name.endswith(suffix))
    for folder in releases if released else (current, *releases):
        try:
            variant = Variant.read(folder / VARIANT)
        except DamagedModel as error:
            verification.findings.append(str(error))
            continue
        where, digest = stored.shown(folder), files_digest(variant.files) if variant else ""
        if variant is None:
            verification.findings.append(f"{where} has no {VARIANT}, so its weights cannot be checked")
        elif folder == current and digest == variant.digest != evaluation.variant_digest:
            checked = f"; checked in {', '.join(stored.shown(release) for release in releases)}" if releases else ""
            verification.notes.append(
                f"the weights that were measured are no longer in {where}: the variant was made again "
                f"on {variant.created_at:%Y-%m-%d %H:%M} UTC{checked}"
            )
        else:
            verification.compared.append(where)
            check_adapters(stored, folder, verification)
            verification.findings += [
                f"{where}/{file.path} was changed: sha256 {sha256[:12]}…, recorded {file.sha256[:12]}…"
                for file in variant.files
                if (sha256 := _sha256(folder / file.path)) != file.sha256
            ]
            if not digest == variant.digest == evaluation.variant_digest:
                verification.findings.append(
                    f"{where}/{VARIANT} belongs to another variant than the one that was measured: digest "
                    f"{digest[:12]}…, measured {evaluation.variant_digest[:12]}…"
                )


def check_adapters(stored: StoredDecision, release: Path, verification: Verification) -> None:
    """Compare every file of a release's adapters with its digest, and these with those that were measured."""
    measured = (read_object(release / PUBLISHED[0]) or {}).get("workload", {}).get("adapters", {})
    for name in sorted({*measured, *adapters_in(release)}):
        folder = release / FOLDER / name
        record = Acquired.read_if_intact(folder / ACQUIRED)
        verification.compared.append(stored.shown(folder))
        if record is None or not files_digest(record.files) == record.digest == measured.get(name):
            verification.findings.append(f"{stored.shown(folder)} is not the adapter that was measured")
        for file in record.files if record else ():
            if _sha256(folder / file.path) != file.sha256:
                verification.findings.append(f"{stored.shown(folder)}/{file.path} was changed")


def check_evaluation(evaluation: Evaluation, samples: Samples, verification: Verification) -> Evaluation:
    """Recompute the evaluation from the samples; every figure of the document that differs is a finding."""
    scores = [(score, task_score(score, samples)) for score in evaluation.quality]
    quality = tuple(computed or recorded for recorded, computed in scores)
    verification.not_recomputed += [f"{evaluation.variant}: {score.task}" for score, again in scores if again is None]
    slo, capacity = evaluation.goodput, evaluation.capacity
    if capacity and capacity.rule != RULE:
        verification.notes.append(
            f"the capacity of {evaluation.variant} follows by an earlier rule, and is not recomputed"
        )
    else:
        capacity = capacity_of(samples)
    recomputed = evaluation.model_copy(
        update={
            "quality": quality,
            "load": pooled_load(samples.rounds),
            "rounds": tuple(map(load_of, samples.rounds)),
            "capacity": capacity,
            "goodput": goodput_of(samples.rounds, slo.ttft_ms, slo.tpot_ms) if slo else None,
        }
    )
    before, after = evaluation.model_dump(mode="json"), recomputed.model_dump(mode="json")
    changed = [
        f"evaluation of {evaluation.variant}: {path} is {recorded}, the samples give {computed}"
        for path, recorded, computed in differences(before, after)
        if not (OVER_STARTS.search(path) and math.isclose(float(recorded), float(computed), rel_tol=ROUNDED))
    ]
    verification.findings += changed
    return recomputed if changed else evaluation


def check_decision(
    stored: StoredDecision,
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Samples],
    asked: Asked | None,
    verification: Verification,
) -> None:
    """Compare every document that holds the decision with the decision that is made again; if the rules are those of
    another version, with each other."""
    published = stored.decision.winner if stored.decision else None
    if stored.basis.rules != RULES:
        verification.replayed_by = stored.basis.slipway
        if published:
            verification.winner = published
            compare_documents(stored, read_object(stored.folder / DECISION) or {}, verification)
        return
    try:
        recomputed = decide(stored.basis, evaluations, samples, asked)
    except NoWinner as error:
        if published:
            verification.findings.append(f"no variant can be chosen ({error}), but {published} was published")
        verification.nobody = str(error)
    except SlipwayError as error:
        verification.findings.append(str(error))
    else:
        verification.winner = recomputed.winner
        compare_documents(stored, recomputed.model_dump(mode="json"), verification)


def compare_documents(stored: StoredDecision, expected: dict[str, Any], verification: Verification) -> None:
    """Compare every document that holds the decision with what it should be, and its release with the winner."""
    winner = str(expected.get("winner"))
    digest = stored.evaluations[winner].variant_digest[:12] if winner in stored.evaluations else ""
    for where, document in documents(stored):
        verification.compared.append(where)
        if document is None:
            verification.findings.append(f"{where} is missing, or cannot be read")
            continue
        pair = document, expected
        if document.get("wording") != expected.get("wording"):  # another version's sentences are not compared
            pair = _without_sentences(document), _without_sentences(expected)
        verification.findings += [
            f"{where}: {path} is {recorded}, recomputed {computed}"
            for path, recorded, computed in differences(*pair)
            if path not in NOT_COMPARED
        ]
        release = document.get("release")
        suffix = f"-{digest}" if variant_of(winner) == PRODUCTION else f"-{variant_of(winner)}-{digest}"
        if not str(release).endswith(suffix):
            verification.findings.append(f"{where}: release is {release}, not one of {winner} {digest}")


def _without_sentences(document: dict[str, Any]) -> dict[str, Any]:
    """Leave the reasons out; which candidates are excluded remains."""
    candidates = document.get("candidates")
    if isinstance(candidates, list) and all(isinstance(candidate, dict) for candidate in candidates):
        candidates = [candidate | {"excluded": candidate.get("excluded") is not None} for candidate in candidates]
    return document | {"reason": "", "notes": [], "candidates": candidates}


def check_report(stored: StoredDecision, evaluations: Mapping[str, Evaluation], verification: Verification) -> None:
    """Compare the evaluations in the run's report with the recomputed ones."""
    path = stored.folder / REPORT
    listed = (read_object(path) or {}).get("evaluations")
    for document in listed if isinstance(listed, list) else []:
        name = document.get("variant") if isinstance(document, dict) else None
        if not isinstance(name, str) or name not in evaluations:
            continue
        with suppress(ValidationError):  # with the fields that later versions have added
            document |= Evaluation.model_validate_json(json.dumps(document)).model_dump(mode="json")
        verification.findings += [
            f"{stored.shown(path)}: evaluation of {name}: {where} is {recorded}, recomputed {computed}"
            for where, recorded, computed in differences(document, evaluations[name].model_dump(mode="json"))
        ]


def documents(stored: StoredDecision) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield every place that holds the decision, with the document there, or None if that cannot be read: the run's
    folder, its report and its release, and the files of the production and candidate releases if they follow from this
    decision."""
    decision = read_object(stored.folder / DECISION)
    yield stored.shown(stored.folder / DECISION), decision
    report = read_object(stored.folder / REPORT)
    if report is not None and report.get("decision") is not None:
        yield stored.shown(stored.folder / REPORT), report["decision"]
    release = str((decision or {}).get("release"))
    for path in [stored.store.path / name for name in PUBLISHED] + [stored.store.releases / release / PUBLISHED[0]]:
        document = read_object(path)
        ours = document and decision and any(document.get(name) == decision.get(name) for name in ("key", "run"))
        if ours or (path.exists() and document is None):
            yield stored.shown(path), document


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"({error.strerror})"
