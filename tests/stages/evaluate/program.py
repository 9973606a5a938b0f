"""``python -m stages.evaluate``, whose probes of the machine are over at once: where servers are imitated, half a
second before and after each block would be most of the work."""

from __future__ import annotations

import runpy
import sys
from typing import Final

from stages.evaluate import drift

EVALUATE: Final = (sys.executable, "-m", "tests.stages.evaluate.program")

if __name__ == "__main__":
    for name, value in {"MATRIX": 64, "COPY_BYTES": 1 << 20, "SETTLE_S": 0.0}.items():
        setattr(drift, name, value)
    runpy.run_module("stages.evaluate", run_name="__main__", alter_sys=True)
