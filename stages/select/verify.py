"""Verify that a published decision follows from what was measured, by computing everything again from the raw samples.

Everything that was changed since is found and named at once: a sample (by the digest of its file, and by every figure
that it affects), a file of a variant, a digest, a number in a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from stages.parts.base.errors import DamagedModel, NoWinner, SlipwayError
from stages.parts.base.store import ModelStore, sha256_of
from stages.parts.records.acquired import files_digest
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Capacity, Evaluation, Smaller
from stages.parts.records.production import RULES
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.capacity import RULE, capacity_of
from stages.parts.samples.figures import goodput_of, load_of, pooled_load, task_score
from stages.parts.samples.lines import LoadSamples, Samples, read_samples
from stages.select.decision import decide
from stages.select.differences import differences
from stages.select.stored import DECISION, MEASUREMENTS, StoredDecision, read_stored

NOT_COMPARED: Final = {"run", "release", "decided_at", "wording", "slipway"}
"""Fields of a decision that do not follow from the measurements."""
LATER: Final = {"prompt_tokens_per_s"}
"""Fields that decisions by the same rules did not have at first."""
REPORT: Final = "report.json"
PUBLISHED: Final = ("production_metrics.json", "candidate_metrics.json")


@dataclass
class Verdict:
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
    """What a later run has replaced, or follows by an earlier rule: it cannot be compared any more, and that is no
    fault."""
    not_recomputed: list[str] = field(default_factory=list)
    """Figures that have no samples."""


def verify(run: Path) -> Verdict:
    """Recompute the decision of a run, by its folder in the store; writes nothing.

    Raises:
        MissingRun: the run ended before a decision.
        DamagedModel: the stored decision cannot be read at all.
    """
    stored, verdict = read_stored(run), Verdict()
    store = ModelStore(run.parents[2], stored.basis.base.model)
    evaluations: dict[str, Evaluation] = {}
    samples: dict[str, Samples] = {}
    for name, evaluation in stored.evaluations.items():
        check_samples(store, stored, evaluation, verdict)
        check_weights(store, evaluation, verdict)
        try:
            samples[name] = read_samples(stored.samples_path(name), evaluation)
        except DamagedModel as error:
            verdict.findings.append(str(error))
        else:
            evaluations[name] = check_evaluation(evaluation, samples[name], verdict)
    if len(samples) == len(stored.evaluations):
        check_decision(store, stored, evaluations, samples, verdict)
        check_report(store, stored, evaluations, verdict)
    return verdict


def check_samples(store: ModelStore, stored: StoredDecision, evaluation: Evaluation, verdict: Verdict) -> None:
    """Compare the digests of the files of samples: in the run's folder, and in the store if they belong to this run."""
    name = evaluation.variant
    paths = [stored.samples_path(name)]
    current = store.evaluation(name)
    text = _text(current)
    if text and f'"{evaluation.key}"' in text and not _measured_again(current, evaluation):
        paths.append(current.with_suffix(SAMPLES_SUFFIX))
        if text != _text(stored.folder / MEASUREMENTS / f"{name}.json"):
            verdict.findings.append(f"{_shown(store, current)} is not what {stored.folder.name} decided by")
    for path in paths:
        verdict.compared.append(_shown(store, path))
        try:
            found = sha256_of(path)
        except OSError as error:
            verdict.findings.append(f"{_shown(store, path)} cannot be read: {error.strerror}")
            continue
        if found != evaluation.samples_sha256:
            verdict.findings.append(
                f"samples were changed: {_shown(store, path)} has sha256 {found[:12]}…, "
                f"{evaluation.samples_sha256[:12]}… was measured"
            )


def _measured_again(current: Path, evaluation: Evaluation) -> bool:
    """Whether the store holds a later measurement under the same conditions, with its own samples."""
    try:
        found = Evaluation.read(current)
    except DamagedModel:
        return False
    if found is None or found.started_at <= evaluation.started_at:
        return False
    return _sha256(current.with_suffix(SAMPLES_SUFFIX)) == found.samples_sha256 != evaluation.samples_sha256


def check_weights(store: ModelStore, evaluation: Evaluation, verdict: Verdict) -> None:
    """Compare every file of the variant, and of the releases made of it, with the manifest whose digest was measured.

    A variant that was made again since then has other weights; a release keeps those that were measured.
    """
    suffix = f"-{evaluation.variant}-{evaluation.variant_digest[:12]}"
    current = store.optimized(evaluation.variant)
    releases = sorted(path for path in store.releases.glob("*") if path.name.endswith(suffix))
    for folder in (current, *releases):
        try:
            variant = Variant.read(folder / VARIANT)
        except DamagedModel as error:
            verdict.findings.append(str(error))
            continue
        if variant is None:
            verdict.findings.append(f"{_shown(store, folder)} has no {VARIANT}, so its weights cannot be checked")
        elif folder == current and _made_again(variant, evaluation):
            checked = f"; checked in {', '.join(_shown(store, release) for release in releases)}" if releases else ""
            verdict.notes.append(
                f"the weights that were measured are no longer in {_shown(store, folder)}: the variant was made again "
                f"on {variant.created_at:%Y-%m-%d %H:%M} UTC{checked}"
            )
        else:
            verdict.compared.append(_shown(store, folder))
            verdict.findings += wrong_files(store, folder, variant, evaluation)


def _made_again(variant: Variant, evaluation: Evaluation) -> bool:
    return files_digest(variant.files) == variant.digest != evaluation.variant_digest


def wrong_files(store: ModelStore, folder: Path, variant: Variant, evaluation: Evaluation) -> Iterator[str]:
    """A finding if the manifest is not the one that was measured, and for each file that is not as in the manifest."""
    digest = files_digest(variant.files)
    if not digest == variant.digest == evaluation.variant_digest:
        yield (
            f"{_shown(store, folder / VARIANT)} belongs to another variant than the one that was measured: digest "
            f"{digest[:12]}…, measured {evaluation.variant_digest[:12]}…"
        )
    for file in variant.files:
        if (found := _sha256(folder / file.path)) != file.sha256:
            path = _shown(store, folder / file.path)
            yield f"{path} was changed: sha256 {found[:12]}…, recorded {file.sha256[:12]}…"


def check_evaluation(evaluation: Evaluation, samples: Samples, verdict: Verdict) -> Evaluation:
    """The evaluation as it follows from the samples; every figure of the document that differs is a finding."""
    scores = [(each, task_score(each, samples)) for each in evaluation.quality]
    slo = evaluation.goodput
    recomputed = evaluation.model_copy(
        update={
            "load": pooled_load(samples.rounds, intervals=evaluation.load.e2el_ms.intervals is not None),
            "rounds": tuple(map(load_of, samples.rounds)),
            "capacity": _capacity(evaluation.capacity, samples.rounds, samples.trials),
            "goodput": goodput_of(samples.rounds, slo.ttft_ms, slo.tpot_ms) if slo else None,
            "smaller": _smaller(evaluation.smaller, samples),
            "quality": tuple(computed or recorded for recorded, computed in scores),
        }
    )
    verdict.not_recomputed += [f"{evaluation.variant}: {each.task}" for each, computed in scores if computed is None]
    if evaluation.capacity and evaluation.capacity.rule != RULE:
        verdict.notes.append(f"the capacity of {evaluation.variant} follows by an earlier rule, and is not recomputed")
    found = list(differences(evaluation.model_dump(mode="json"), recomputed.model_dump(mode="json")))
    verdict.findings += [
        f"evaluation of {evaluation.variant}: {path} is {recorded}, the samples give {computed}"
        for path, recorded, computed in found
    ]
    return recomputed if found else evaluation


def _capacity(
    recorded: Capacity | None, rounds: Sequence[LoadSamples], trials: Sequence[LoadSamples]
) -> Capacity | None:
    """The capacity as it follows from the samples; as recorded if that followed by another rule."""
    return recorded if recorded and recorded.rule != RULE else capacity_of(rounds, trials)


def _smaller(recorded: Smaller | None, samples: Samples) -> Smaller | None:
    """What was measured on fewer GPUs, as it follows from the samples."""
    if recorded is None or not samples.smaller_rounds:
        return recorded
    slo = recorded.goodput
    return recorded.model_copy(
        update={
            "load": pooled_load(samples.smaller_rounds),
            "rounds": tuple(map(load_of, samples.smaller_rounds)),
            "capacity": _capacity(recorded.capacity, samples.smaller_rounds, samples.smaller_trials),
            "goodput": goodput_of(samples.smaller_rounds, slo.ttft_ms, slo.tpot_ms) if slo else None,
        }
    )


def check_decision(
    store: ModelStore,
    stored: StoredDecision,
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Samples],
    verdict: Verdict,
) -> None:
    """Compare every document that holds the decision with the decision that is made again; if the rules are those of
    another version, with each other."""
    if stored.basis.rules != RULES:
        verdict.replayed_by = stored.basis.slipway
        if stored.decision:
            verdict.winner = stored.decision.winner
            compare_documents(store, stored, _json(stored.folder / DECISION) or {}, verdict)
        return
    try:
        recomputed = decide(stored.basis, evaluations, samples)
    except NoWinner as error:
        if stored.decision:
            verdict.findings.append(f"no variant can be chosen ({error}), but {stored.decision.winner} was published")
        verdict.nobody = str(error)
        return
    except SlipwayError as error:
        verdict.findings.append(str(error))
        return
    verdict.winner = recomputed.winner
    compare_documents(store, stored, recomputed.model_dump(mode="json"), verdict)


def compare_documents(store: ModelStore, stored: StoredDecision, expected: dict[str, Any], verdict: Verdict) -> None:
    """Compare every document that holds the decision with what it should be, and its release with the winner."""
    winner = str(expected.get("winner"))
    digest = stored.evaluations[winner].variant_digest[:12] if winner in stored.evaluations else ""
    for where, document in documents(store, stored):
        verdict.compared.append(where)
        if document is None:
            verdict.findings.append(f"{where} is missing, or cannot be read")
            continue
        verdict.findings += [
            f"{where}: {path} is {recorded}, recomputed {computed}"
            for path, recorded, computed in different_fields(document, expected)
        ]
        release = document.get("release")
        if not str(release).endswith(f"-{winner}-{digest}"):
            verdict.findings.append(f"{where}: release is {release}, not one of {winner} {digest}")


def different_fields(document: dict[str, Any], recomputed: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The fields of a decision that differ. Its sentences are compared only if this version worded them; otherwise only
    which candidates are excluded, and no reason."""
    if document.get("wording", 1) != recomputed.get("wording", 1):
        document, recomputed = without_sentences(document), without_sentences(recomputed)
    recomputed = {name: value for name, value in recomputed.items() if name in document or name not in LATER}
    return (difference for difference in differences(document, recomputed) if difference[0] not in NOT_COMPARED)


def without_sentences(document: dict[str, Any]) -> dict[str, Any]:
    candidates = document.get("candidates")
    if isinstance(candidates, list) and all(isinstance(candidate, dict) for candidate in candidates):
        candidates = [candidate | {"excluded": candidate.get("excluded") is not None} for candidate in candidates]
    return document | {"reason": "", "notes": [], "candidates": candidates}


def check_report(
    store: ModelStore, stored: StoredDecision, evaluations: Mapping[str, Evaluation], verdict: Verdict
) -> None:
    """Compare the evaluations in the run's report with the recomputed ones."""
    path = stored.folder / REPORT
    for document in (_json(path) or {}).get("evaluations", []):
        if (name := document.get("variant")) in evaluations:
            verdict.findings += [
                f"{_shown(store, path)}: evaluation of {name}: {where} is {recorded}, recomputed {computed}"
                for where, recorded, computed in differences(
                    _with_later_fields(document), evaluations[name].model_dump(mode="json")
                )
            ]


def _with_later_fields(document: dict[str, Any]) -> dict[str, Any]:
    """An evaluation with the fields that versions after the one that wrote it have added."""
    try:
        return Evaluation.model_validate_json(json.dumps(document)).model_dump(mode="json")
    except ValidationError:
        return document


def documents(store: ModelStore, stored: StoredDecision) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Every place that holds the decision, with the document there: the run's folder, its report and its release, and
    the files of the production and candidate releases if they follow from this decision. None: it cannot be read."""
    decision = _json(stored.folder / DECISION)
    yield _shown(store, stored.folder / DECISION), decision
    report = _json(stored.folder / REPORT)
    if report is not None and report.get("decision") is not None:
        yield _shown(store, stored.folder / REPORT), report["decision"]
    release = str((decision or {}).get("release"))
    for path in [store.path / name for name in PUBLISHED] + [store.releases / release / PUBLISHED[0]]:
        found = _json(path)
        ours = found and decision and any(found.get(each) == decision.get(each) for each in ("key", "run"))
        if ours or (path.exists() and found is None):
            yield _shown(store, path), found


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
