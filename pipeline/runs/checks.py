"""What the checks of this machine or of a cluster find, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from pipeline.runs.tables import plain_table

STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}


class Finding(NamedTuple):
    state: Literal["ok", "warning", "missing"]
    found: str
    hint: str = ""
    """What to do about it."""


ok: Final = partial(Finding, "ok")
warning: Final = partial(Finding, "warning")
missing: Final = partial(Finding, "missing")


def findings_table(findings: Mapping[str, Finding]) -> Table:
    """Lay out what each check found, by its name."""
    table = plain_table("Check", "State", "Found", "What to do")
    for check, (state, found, hint) in findings.items():
        table.add_row(check, Text(state, style=STYLES[state]), found, hint)
    return table
