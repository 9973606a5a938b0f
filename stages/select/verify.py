"""Does a published decision follow from what was measured? Everything is computed again from the raw samples alone.

Whatever was changed since is found and named, all of it at once: a sample (its file's digest, and each number that it
moves), a file of a variant, a digest, a number in a document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel, NoWinner, SlipwayError
from stages.parts.base.store import ModelStore, sha256_of
from stages.parts.records.acquired import files_digest
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.figures import goodput_of, load_of, pooled_load, task_score
from stages.parts.samples.lines import Samples, read_samples
from stages.select.decision import decide
from stages.select.stored import DECISION, MEASUREMENTS, StoredDecision, read_stored

TOLERANCE: Final = 1e-9
"""Relative: sums in another order differ in their last digits."""
ELSEWHERE: Final = {"run", "release", "decided_at"}
"""Of a decision, what does not follow from the measurements."""
REPORT: Final = "report.json"
PUBLISHED: Final = ("production_metrics.json", "candidate_metrics.json")


@dataclass
class Verdict:
    """What was compared, and what does not agree."""

    winner: str | None = None
    """As recomputed."""
    nobody: str | None = None
    """Why there is no winner, as recomputed."""
    compared: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a later run replaced: it is no longer here to be compared, and that is no fault."""
    not_recomputed: list[str] = field(default_factory=list)
    """Numbers for which there are no samples."""


def verify(run: Path) -> Verdict:
    """Recompute the decision of a run, by its folder in the store; writes nothing.

    Raises:
        MissingRun: the run ended before it came to a decision.
        DamagedModel: what it kept can't be read at all.
    """
    given, verdict = read_stored(run), Verdict()
    store = ModelStore(run.parents[2], given.basis.base.model)
    evaluations: dict[str, Evaluation] = {}
    samples: dict[str, Samples] = {}
    for name, evaluation in given.evaluations.items():
        check_samples(store, given, evaluation, verdict)
        check_weights(store, evaluation, verdict)
        try:
            samples[name] = read_samples(given.samples_path(name), evaluation)
            evaluations[name] = check_evaluation(evaluation, samples[name], verdict)
        except DamagedModel as error:
            verdict.findings.append(str(error))
    if len(samples) == len(given.evaluations):
        check_decisions(store, given, evaluations, samples, verdict)
    return verdict


def check_samples(store: ModelStore, given: StoredDecision, evaluation: Evaluation, verdict: Verdict) -> None:
    """The files by their digests: those kept in the run's folder, and those in the store if they are this run's."""
    name = evaluation.variant
    places = [given.samples_path(name)]
    standing = store.evaluation(name)
    text = _text(standing)
    if text and f'"{evaluation.key}"' in text and not _measured_anew(standing, evaluation):
        places.append(standing.with_suffix(SAMPLES_SUFFIX))
        if text != _text(given.folder / MEASUREMENTS / f"{name}.json"):
            verdict.findings.append(f"{_shown(store, standing)} is not what {given.folder.name} decided by")
    for path in places:
        verdict.compared.append(_shown(store, path))
        try:
            found = sha256_of(path)
        except OSError as error:
            verdict.findings.append(f"{_shown(store, path)} can't be read: {error.strerror}")
            continue
        if found != evaluation.samples_sha256:
            verdict.findings.append(
                f"samples were changed: {_shown(store, path)} has sha256 {found[:12]}…, "
                f"{evaluation.samples_sha256[:12]}… was measured"
            )


def _measured_anew(standing: Path, evaluation: Evaluation) -> bool:
    """Whether a later measurement under the same conditions stands there, with samples of its own."""
    try:
        found = Evaluation.read(standing)
    except DamagedModel:
        return False
    if found is None or found.started_at <= evaluation.started_at:
        return False
    return _sha256(standing.with_suffix(SAMPLES_SUFFIX)) == found.samples_sha256 != evaluation.samples_sha256


def check_weights(store: ModelStore, evaluation: Evaluation, verdict: Verdict) -> None:
    """Every file of the variant, and of the releases made of it, against the manifest whose digest was measured. A
    variant that was made anew since has other weights; those of a release stay."""
    suffix = f"-{evaluation.variant}-{evaluation.variant_digest[:12]}"
    standing = store.optimized(evaluation.variant)
    releases = sorted(path for path in store.releases.glob("*") if path.name.endswith(suffix))
    for folder in (standing, *releases):
        where = _shown(store, folder)
        try:
            variant = Variant.read(folder / VARIANT)
        except DamagedModel as error:
            verdict.findings.append(str(error))
            continue
        if variant is None:
            verdict.findings.append(f"{where} has no {VARIANT}, so its weights can't be checked")
            continue
        whole = files_digest(variant.files) == variant.digest
        if folder == standing and whole and variant.digest != evaluation.variant_digest:
            kept = f"; checked in {', '.join(_shown(store, each) for each in releases)}" if releases else ""
            verdict.notes.append(
                f"the weights that were measured are no longer in {where}: it was made anew on "
                f"{variant.created_at:%Y-%m-%d %H:%M} UTC{kept}"
            )
            continue
        verdict.compared.append(where)
        if not whole or variant.digest != evaluation.variant_digest:
            verdict.findings.append(
                f"{_shown(store, folder / VARIANT)} is of another variant than the one that was measured: digest "
                f"{files_digest(variant.files)[:12]}…, measured {evaluation.variant_digest[:12]}…"
            )
        for file in variant.files:
            if (found := _sha256(folder / file.path)) != file.sha256:
                path = _shown(store, folder / file.path)
                verdict.findings.append(f"{path} was changed: sha256 {found[:12]}…, recorded {file.sha256[:12]}…")


def check_evaluation(evaluation: Evaluation, samples: Samples, verdict: Verdict) -> Evaluation:
    """The evaluation as the samples give it; what its document says otherwise is a finding."""
    scores = [(each, task_score(each, samples)) for each in evaluation.quality]
    slo = evaluation.goodput
    again = evaluation.model_copy(
        update={
            "load": pooled_load(samples.rounds),
            "rounds": tuple(map(load_of, samples.rounds)),
            "sweep": tuple(map(load_of, samples.sweep)),
            "goodput": goodput_of(samples.rounds, slo.ttft_ms, slo.tpot_ms) if slo else None,
            "quality": tuple(made or told for told, made in scores),
        }
    )
    verdict.not_recomputed += [f"{evaluation.variant}: {told.task}" for told, made in scores if made is None]
    found = list(differences(evaluation.model_dump(mode="json"), again.model_dump(mode="json")))
    verdict.findings += [
        f"evaluation of {evaluation.variant}: {path} is {told}, the samples give {made}" for path, told, made in found
    ]
    return again if found else evaluation


def check_decisions(
    store: ModelStore,
    given: StoredDecision,
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Samples],
    verdict: Verdict,
) -> None:
    """Every document that holds the decision, against the one that is made again."""
    try:
        made = decide(given.basis, evaluations, samples)
    except NoWinner as error:
        if given.decision:
            verdict.findings.append(f"nobody can be chosen ({error}), but {given.decision.winner} was published")
        verdict.nobody = str(error)
        return
    except SlipwayError as error:
        verdict.findings.append(str(error))
        return
    verdict.winner = made.winner
    again = made.model_dump(mode="json")
    for where, told in documents(store, given):
        verdict.compared.append(where)
        if told is None:
            verdict.findings.append(f"{where} is missing, or can't be read")
            continue
        verdict.findings += [
            f"{where}: {path} is {said}, recomputed {found}"
            for path, said, found in differences(told, again)
            if path not in ELSEWHERE
        ]
        digest = evaluations[made.winner].variant_digest
        if not str(told.get("release")).endswith(f"-{made.winner}-{digest[:12]}"):
            verdict.findings.append(
                f"{where}: release is {told.get('release')}, not one of {made.winner} {digest[:12]}"
            )
    report = _json(given.folder / REPORT) or {}
    for told in report.get("evaluations", []):
        if (name := told.get("variant")) in evaluations:
            again = evaluations[name].model_dump(mode="json")
            verdict.findings += [
                f"{_shown(store, given.folder / REPORT)}: evaluation of {name}: {path} is {said}, recomputed {found}"
                for path, said, found in differences(told, again)
            ]


def documents(store: ModelStore, given: StoredDecision) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Where the decision stands, and what stands there: in the run's folder, its report, its release, and what is, or
    was to be, in production, if that is by this decision."""
    decision = _json(given.folder / DECISION)
    yield _shown(store, given.folder / DECISION), decision
    report = _json(given.folder / REPORT)
    if report is not None and report.get("decision") is not None:
        yield _shown(store, given.folder / REPORT), report["decision"]
    release = str((decision or {}).get("release"))
    places = [store.path / name for name in PUBLISHED] + [store.releases / release / PUBLISHED[0]]
    for path in places:
        told = _json(path)
        ours = told and decision and (told.get("key") == decision.get("key") or told.get("run") == decision.get("run"))
        if ours or (path.exists() and told is None):
            yield _shown(store, path), told


def differences(told: Any, made: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Every place where two documents differ: its path, and both values as text. Numbers are equal within
    ``TOLERANCE``; the entries of a list are named by their variant or task, if they have one."""
    if isinstance(told, list) and isinstance(made, list):
        told, made = _by_name(told), _by_name(made)
    if isinstance(told, dict) and isinstance(made, dict):
        for key in [*told, *(key for key in made if key not in told)]:
            yield from differences(told.get(key, ABSENT), made.get(key, ABSENT), f"{path}.{key}" if path else str(key))
    elif not _equal(told, made):
        yield path, _text_of(told), _text_of(made)


ABSENT: Final = object()


def _by_name(entries: list[Any]) -> dict[str, Any]:
    names = [
        str(each.get("variant") or each.get("task") or number) if isinstance(each, dict) else str(number)
        for number, each in enumerate(entries)
    ]
    unique = len(set(names)) == len(names)
    return {
        name if unique else str(number): entry for number, (name, entry) in enumerate(zip(names, entries, strict=True))
    }


def _equal(told: Any, made: Any) -> bool:
    numbers = (int, float)
    if isinstance(told, numbers) and isinstance(made, numbers) and not isinstance(told, bool):
        return math.isclose(told, made, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(told == made)


def _text_of(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"({error.strerror})"


def _shown(store: ModelStore, path: Path) -> str:
    return str(path.relative_to(store.path)) if path.is_relative_to(store.path) else str(path)
