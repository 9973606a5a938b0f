"""The load of one start, for tests of a single server."""

from __future__ import annotations

from stages.evaluate.bench import LoadTarget
from stages.evaluate.load import Loading
from stages.parts.samples.lines import StartLoad


def load_start(target: LoadTarget, start: int, *earlier: StartLoad) -> StartLoad:
    loading = Loading(target, start, *(*earlier, StartLoad(), StartLoad())[:2])
    list(loading.search())
    list(loading.measure(loading.pace))
    return loading.found
