"""The raw samples of several variants as one table, for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stages.parts.samples.lines import Samples

if TYPE_CHECKING:
    import pandas as pd


def table(samples: Mapping[str, Samples]) -> pd.DataFrame:
    """Make one row for each request and each item of a quality task.

    The columns are the fields of these lines, without the gaps between tokens; ``block`` counts the starts of a server
    from 0, and ``kind`` says what a row is: request, accuracy or perplexity. A value that a row does not have is
    missing.
    """
    import pandas as pd

    rows = [{"variant": name, **row} for name, sample in samples.items() for row in _rows(sample)]
    return pd.DataFrame(rows).rename(columns={"restart": "block"}).convert_dtypes()


def _rows(samples: Samples) -> Iterator[dict[str, Any]]:
    for run in samples.runs:
        load = run.run.model_dump(include={"rate_per_s", "concurrency"})
        for request in run.requests:
            yield request.model_dump(exclude={"itl_ms"}) | load
    for item in samples.items:
        yield item.model_dump()
