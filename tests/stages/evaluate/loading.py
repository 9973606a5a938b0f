"""The load of one start, for tests of a single server."""

from __future__ import annotations

from stages.evaluate.bench import LoadTarget
from stages.evaluate.load import Loading, StartLoad


def load_start(target: LoadTarget, start: int, *earlier: StartLoad) -> StartLoad:
    loading = Loading(target, start, *earlier)
    list(loading.search())
    list(loading.measure(loading.pace))
    return loading.found
