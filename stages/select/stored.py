"""What a run decided and from what, stored in the run's folder, so that the decision can be replayed at any later time.

runs/<id>/measurements/basis.json                       model, profile, price, and the variants without a measurement
runs/<id>/measurements/<variant>.json, .samples.jsonl   the evaluations that counted: hard links, which take no space
runs/<id>/measurements/answers.json, .samples.jsonl     the answers of a reference that was not measured
runs/<id>/decision.json                                 the decision made from them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel, MissingRun
from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore, place
from stages.parts.records.acquired import Acquired
from stages.parts.records.answers import KeptAnswers, answers_paths
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Price, Production
from stages.parts.samples.lines import Samples, read_answers, read_samples

MEASUREMENTS: Final = "measurements"
BASIS: Final = "basis.json"
ANSWERS: Final = "answers"
DECISION: Final = "decision.json"


class Basis(Record):
    """Everything that a decision follows from except the evaluations."""

    base: Acquired
    profile: dict[str, Any]
    price: Price | None
    excluded: dict[str, str]
    """Variants without a measurement, and why."""
    missing: tuple[str, ...] = ()
    """Those of them that were asked for and could not be made or measured, which was not known beforehand."""
    rules: int
    """The version of the rules to decide by."""
    slipway: str
    """The version of Slipway that has these rules."""


@dataclass(frozen=True)
class Asked:
    """A reference that was asked the questions only, because it does not fit where the variants are served."""

    answers: KeptAnswers
    samples: Samples


@dataclass(frozen=True)
class StoredDecision:
    """The decision of a run and everything that it follows from."""

    basis: Basis
    evaluations: dict[str, Evaluation]
    decision: Production | None
    """None if no variant could be chosen."""
    folder: Path
    answers: KeptAnswers | None = None
    """Those of a reference that was asked only."""

    @cached_property
    def store(self) -> ModelStore:
        return ModelStore(self.folder.parents[2], self.basis.base.model)

    def shown(self, path: Path) -> str:
        """Write a path of the store relative to the model's folder."""
        return str(path.relative_to(self.store.path)) if path.is_relative_to(self.store.path) else str(path)

    def samples_path(self, variant: str) -> Path:
        return self.folder / MEASUREMENTS / f"{variant}{SAMPLES_SUFFIX}"

    def samples(self) -> dict[str, Samples]:
        """Read the raw samples by variant; fails like ``read_samples``."""
        return {
            name: read_samples(self.samples_path(name), evaluation) for name, evaluation in self.evaluations.items()
        }

    def asked(self) -> Asked | None:
        """Read the answers of a reference that was asked only; fails like ``read_answers``."""
        if self.answers is None:
            return None
        return Asked(self.answers, read_answers(self.samples_path(ANSWERS), self.answers.key))


def store_inputs(
    store: ModelStore, run: Path, basis: Basis, measured: Mapping[str, Evaluation], asked: Asked | None = None
) -> None:
    """Store what the decision of *run* will follow from. Files of an attempt that was killed are replaced."""
    folder = run / MEASUREMENTS
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = {name: store.evaluation(name) for name in measured}
    sources = {name: (path, path.with_suffix(SAMPLES_SUFFIX)) for name, path in evaluations.items()}
    if asked:
        sources[ANSWERS] = answers_paths(store, asked.answers.key)
    for name, paths in sources.items():
        for path, suffix in zip(paths, (".json", SAMPLES_SUFFIX), strict=True):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
            place(path, folder / f"{name}{suffix}")
    basis.write(folder / BASIS)


def read_stored(run: Path) -> StoredDecision:
    """Read the decision of *run*, by the run's folder.

    Raises:
        MissingRun: the run ended before anything was decided.
        DamagedModel: a document is not what was written.
    """
    basis = Basis.read(run / MEASUREMENTS / BASIS)
    if basis is None:
        raise MissingRun(
            f"run {run.name} has no measurements: it ended before a decision",
            hint="start another run: it uses finished measurements again",
        )
    paths = [path for path in (run / MEASUREMENTS).glob("*.json") if path.name not in (BASIS, f"{ANSWERS}.json")]
    documents = [Evaluation.read(path) for path in sorted(paths)]
    evaluations = {evaluation.variant: evaluation for evaluation in documents if evaluation}
    if not evaluations:
        raise DamagedModel(f"run {run.name} lost its measurements", hint="start another run")
    answers = KeptAnswers.read(run / MEASUREMENTS / f"{ANSWERS}.json")
    return StoredDecision(basis, evaluations, Production.read(run / DECISION), run, answers)
