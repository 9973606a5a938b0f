"""What was measured of a variant: restored from its record and samples, and continued."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stages.parts.base.workload import Workload
from stages.parts.records.evaluation import Engine, Evaluation, Goodput, Probe, Smaller, Speed, TaskScore, measures_of
from stages.parts.samples.capacity import capacity_of
from stages.parts.samples.evidence import Measured
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import Samples


@dataclass
class VariantData:
    """All that was measured of a variant with one number of GPUs."""

    samples: Samples = field(default_factory=Samples)
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
    """What was measured on fewer GPUs."""
    started_at: datetime | None = None
    seconds: float = 0.0

    @classmethod
    def restored(cls, evaluation: Evaluation, samples: Samples) -> VariantData:
        machine = evaluation.drift.probes() if evaluation.drift else ()
        return cls(
            samples=samples,
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
            started_at=evaluation.started_at,
            seconds=evaluation.seconds,
        )

    def goodput(self, workload: Workload) -> Goodput | None:
        rounds, slo = self.samples.rounds, workload.slo
        return goodput_of(rounds, slo.ttft_ms, slo.tpot_ms) if rounds and slo else None

    def measured(self, weights_bytes: int, workload: Workload) -> Measured:
        """Select what the gates and the looks need."""
        rounds = self.samples.rounds
        load = measures_of(pooled_load(rounds), self.goodput(workload)) if rounds else None
        return Measured(self.samples, weights_bytes, self.agreement, load)

    def figures(self, workload: Workload) -> dict[str, Any]:
        """Compute the fields that ``Evaluation`` and ``Smaller`` have in common."""
        rounds = self.samples.rounds
        return {
            "engine": self.engine,
            "load": pooled_load(rounds) if rounds else None,
            "rounds": tuple(map(load_of, rounds)),
            "capacity": capacity_of(self.samples),
            "goodput": self.goodput(workload),
            "seconds": round(self.seconds, 3),
        }
