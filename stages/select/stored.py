"""What a run decided and from what, stored in the run's folder, so that the decision can be replayed at any later time.

runs/<id>/measurements/basis.json                       model, profile, price, and the variants without a measurement
runs/<id>/measurements/<variant>.json, .samples.jsonl   the evaluations that counted: hard links, which take no space
runs/<id>/measurements/answers.json, .samples.jsonl     the answers of a reference that was not measured
runs/<id>/decision.json                                 the decision made from them
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel, MissingRun
from stages.parts.base.files import fsync, make_folder, place
from stages.parts.base.store import ModelStore, Record
from stages.parts.records.acquired import Acquired
from stages.parts.records.answers import KeptAnswers, answers_paths
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Price, Production
from stages.parts.samples.lines import Samples, read_answers, read_samples

MEASUREMENTS: Final = "measurements"
BASIS: Final = "basis.json"
ANSWERS: Final = "answers"
DECISION: Final = "decision.json"
TOLERANCE: Final = 1e-9
"""Relative: sums in another order differ in their last digits."""
ABSENT: Final = object()


class Basis(Record):
    """Everything that a decision follows from except the evaluations."""

    base: Acquired
    profile: dict[str, Any]
    price: Price | None
    excluded: dict[str, str]
    """Variants without a measurement, and why."""
    missing: tuple[str, ...] = ()
    """Those of them that were asked for and could not be made or measured, which was not known beforehand."""
    production: str = ""
    """The release in production that the winner is compared with; empty if it is compared with none."""
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
        return {name: read_samples(self.samples_path(name), each) for name, each in self.evaluations.items()}

    def asked(self) -> Asked | None:
        """Read the answers of a reference that was asked only; fails like ``read_answers``."""
        if self.answers is None:
            return None
        return Asked(self.answers, read_answers(self.samples_path(ANSWERS), self.answers.key))


def store_inputs(
    store: ModelStore, run: Path, basis: Basis, measured: Mapping[str, Evaluation], asked: Asked | None
) -> None:
    """Store what the decision of *run* will follow from. Files of an attempt that was killed are replaced."""
    folder = run / MEASUREMENTS
    make_folder(folder)
    evaluations = {name: store.evaluation(name) for name in measured}
    sources = {name: (path, path.with_suffix(SAMPLES_SUFFIX)) for name, path in evaluations.items()}
    if asked:
        sources[ANSWERS] = answers_paths(store, asked.answers.key)
    for suffix in (".json", SAMPLES_SUFFIX):
        for name in sources:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    fsync(folder)  # no record is ever there without the samples that it names
    for name, (_, samples) in sources.items():
        place(samples, folder / f"{name}{SAMPLES_SUFFIX}")
    fsync(folder)
    for name, (record, _) in sources.items():
        place(record, folder / f"{name}.json")
    basis.write(folder / BASIS)


def read_stored(run: Path) -> StoredDecision:
    """Read the decision of *run*, by the run's folder.

    Raises:
        MissingRun: the run ended before anything was decided.
        DamagedModel: a document is not what was written.
    """
    basis = Basis.read(run / MEASUREMENTS / BASIS)
    if basis is None:
        hint = "start another run: it uses finished measurements again"
        raise MissingRun(f"run {run.name} has no measurements: it ended before a decision", hint=hint)
    paths = [path for path in (run / MEASUREMENTS).glob("*.json") if path.name not in (BASIS, f"{ANSWERS}.json")]
    documents = [Evaluation.read(path) for path in sorted(paths)]
    evaluations = {evaluation.variant: evaluation for evaluation in documents if evaluation}
    if not evaluations:
        raise DamagedModel(f"run {run.name} lost its measurements", hint="start another run")
    answers = KeptAnswers.read(run / MEASUREMENTS / f"{ANSWERS}.json")
    return StoredDecision(basis, evaluations, Production.read(run / DECISION), run, answers)


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every place where two documents differ: its path, and both values as text. Numbers are equal within
    ``TOLERANCE``. The entries of a list are named by their variant or task, if they have one."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = _by_name(before), _by_name(after)
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif not _equal(before, after):
        yield path, _text_of(before), _text_of(after)


def _by_name(entries: list[Any]) -> dict[str, Any]:
    numbers = [str(number) for number in range(len(entries))]
    names = [
        str(entry.get("variant") or entry.get("task") or number) if isinstance(entry, dict) else number
        for number, entry in zip(numbers, entries, strict=True)
    ]
    return dict(zip(names if len(set(names)) == len(names) else numbers, entries, strict=True))


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool):
        return math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(before == after)


def _text_of(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False)
