"""What was measured of a variant: restored from its record and samples, and continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stages.evaluate.load import StartLoad
from stages.parts.base.workload import Workload
from stages.parts.records.evaluation import Engine, Evaluation, Goodput, Probe, Smaller, Speed, TaskScore, measures_of
from stages.parts.samples.capacity import capacity_of
from stages.parts.samples.evidence import Measured
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import AccuracyItem, HeldOutDocument, Item, LoadSamples, PerplexityItem, Samples


@dataclass
class VariantData:
    """All that was measured of a variant with one number of GPUs."""

    rounds: list[LoadSamples] = field(default_factory=list)
    trials: list[LoadSamples] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    held_out: list[HeldOutDocument] = field(default_factory=list)
    probes: tuple[Probe, ...] = ()
    agreement: float | None = None
    quality: tuple[TaskScore, ...] = ()
    not_asked: dict[str, str] = field(default_factory=dict)
    """Why quality tasks could not be asked, by their names."""
    engine: Engine | None = None
    """That of the first start; None if the server never started."""
    kv_cache_tokens: int = 0
    resident_bytes: int = 0
    gpu_bytes: int = 0
    speeds: list[tuple[Speed, Speed]] = field(default_factory=list)
    """The speed of the machine before and after each block."""
    smaller: Smaller | None = None
    """What was measured on fewer GPUs, with its samples."""
    smaller_load: StartLoad = field(default_factory=StartLoad)
    started_at: datetime | None = None
    seconds: float = 0.0

    @classmethod
    def restored(cls, evaluation: Evaluation, samples: Samples) -> VariantData:
        machine = evaluation.drift.probes() if evaluation.drift else ()
        return cls(
            rounds=list(samples.rounds),
            trials=list(samples.trials),
            items=list(samples.items),
            held_out=list(samples.held_out),
            probes=evaluation.probes,
            agreement=evaluation.agreement,
            quality=evaluation.quality,
            not_asked=dict(evaluation.not_asked),
            engine=evaluation.engine,
            kv_cache_tokens=evaluation.memory.kv_cache_tokens,
            resident_bytes=evaluation.memory.peak_resident_bytes,
            gpu_bytes=evaluation.memory.peak_gpu_bytes or 0,
            speeds=list(zip(machine[::2], machine[1::2], strict=True)),
            smaller=evaluation.smaller,
            smaller_load=StartLoad(samples.smaller_rounds, samples.smaller_trials),
            started_at=evaluation.started_at,
            seconds=evaluation.seconds,
        )

    @property
    def load(self) -> StartLoad:
        return StartLoad(self.rounds, self.trials)

    def samples(self) -> Samples:
        return Samples(
            rounds=tuple(self.rounds),
            accuracy=tuple(item for item in self.items if isinstance(item, AccuracyItem)),
            perplexity=tuple(item for item in self.items if isinstance(item, PerplexityItem)),
            held_out=tuple(self.held_out),
            trials=tuple(self.trials),
            smaller_rounds=tuple(self.smaller_load.rounds),
            smaller_trials=tuple(self.smaller_load.trials),
        )

    def measured(self, weights_bytes: int, workload: Workload) -> Measured:
        """Select what the gates and the looks need."""
        load = measures_of(pooled_load(self.rounds), _goodput(self.rounds, workload)) if self.rounds else None
        return Measured(self.samples(), weights_bytes, self.agreement, load)

    def figures(self, workload: Workload) -> dict[str, Any]:
        """Compute the fields that ``Evaluation`` and ``Smaller`` have in common."""
        return {
            "engine": self.engine,
            "load": pooled_load(self.rounds) if self.rounds else None,
            "rounds": tuple(map(load_of, self.rounds)),
            "capacity": capacity_of(self.rounds, self.trials),
            "goodput": _goodput(self.rounds, workload) if self.rounds else None,
            "seconds": round(self.seconds, 3),
        }


def _goodput(rounds: Sequence[LoadSamples], workload: Workload) -> Goodput | None:
    return goodput_of(rounds, workload.slo.ttft_ms, workload.slo.tpot_ms) if workload.slo else None
