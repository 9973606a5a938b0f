"""What a run's decision follows from, kept in the run's folder, so that it can be replayed whatever came after.

runs/<id>/measurements/basis.json                       model, profile, price, and who was not measured
runs/<id>/measurements/<variant>.json, .samples.jsonl   the evaluations that counted: hard links, which cost nothing
runs/<id>/decision.json                                 what was decided by them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel, MissingRun
from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore, place
from stages.parts.records.acquired import Acquired
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Price, Production
from stages.parts.samples.lines import Samples, read_samples

MEASUREMENTS: Final = "measurements"
BASIS: Final = "basis.json"
DECISION: Final = "decision.json"


class Basis(Record):
    """All that a decision follows from besides the evaluations."""

    base: Acquired
    profile: dict[str, Any]
    price: Price | None
    excluded: dict[str, str]
    """Variants without a measurement, and why."""


@dataclass(frozen=True)
class Kept:
    """A run's decision and what it follows from, as they lie in the run's folder."""

    basis: Basis
    evaluations: dict[str, Evaluation]
    decision: Production | None
    """None if nobody could be chosen."""
    folder: Path

    def samples_path(self, variant: str) -> Path:
        return self.folder / MEASUREMENTS / f"{variant}{SAMPLES_SUFFIX}"

    def samples(self) -> dict[str, Samples]:
        """The raw samples by variant.

        Raises:
            DamagedModel: see ``read_samples``.
        """
        return {name: read_samples(self.samples_path(name), each) for name, each in self.evaluations.items()}


def keep(store: ModelStore, run: Path, basis: Basis, measured: Mapping[str, Evaluation]) -> None:
    """Keep what *run* is about to decide by. What a killed attempt kept is replaced."""
    folder = run / MEASUREMENTS
    folder.mkdir(parents=True, exist_ok=True)
    for name in measured:
        source = store.evaluation(name)
        for path in (source, source.with_suffix(SAMPLES_SUFFIX)):
            (folder / path.name).unlink(missing_ok=True)
            place(path, folder / path.name)
    basis.write(folder / BASIS)


def kept(run: Path) -> Kept:
    """What *run* kept.

    Raises:
        MissingRun: it ended before anything was decided.
        DamagedModel: a document is not what was written.
    """
    basis = Basis.read(run / MEASUREMENTS / BASIS)
    if basis is None:
        raise MissingRun(
            f"run {run.name} kept no measurements: it ended before it came to a decision",
            hint="run it again: what was measured is used again",
        )
    read = [Evaluation.read(path) for path in sorted((run / MEASUREMENTS).glob("*.json")) if path.name != BASIS]
    evaluations = {each.variant: each for each in read if each}
    if not evaluations:
        raise DamagedModel(f"run {run.name} lost its measurements", hint="run it again")
    return Kept(basis, evaluations, Production.read(run / DECISION), run)
