"""python -m tests.campaign.recorded VARIANT ...: leaves evaluations of the variants, as a run's evaluate would.

The figures are always the same: the last variant is as good as the others, faster, and smaller.
"""

from __future__ import annotations

import os
import sys

from stages.parts.base.program import RUN_VARIABLE
from stages.parts.model.name import ModelName
from stages.parts.records.variant import read_variant
from tests import samples


def main() -> None:
    store = ModelName.parse(samples.MODEL).store()
    for number, name in enumerate(sys.argv[1:]):
        variant = read_variant(store.optimized(name))
        figures = {"latency_ms": 10.0 - number, "throughput": 100.0 + 10 * number, "weights_bytes": 1000 - 400 * number}
        made = samples.evaluation(store, variant, quality=0.8, **figures)  # type: ignore[arg-type]
        samples.outcome(store, os.environ[RUN_VARIABLE], "evaluate", name, "done", key=made.key)


if __name__ == "__main__":
    main()
