"""The results of checking what a run needs, and their table."""

from __future__ import annotations

from typing import Final, Literal

from rich.table import Table
from rich.text import Text

from pipeline.runs.tables import plain_table
from stages.parts.base.settings import Settings

STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}


class CheckResult(Settings):
    what: str
    state: Literal["ok", "warning", "missing"]
    found: str
    hint: str = ""


def checks_table(checks: list[CheckResult]) -> Table:
    table = plain_table("Check", "State", "Found", "What to do")
    for check in checks:
        table.add_row(check.what, Text(check.state, style=STYLES[check.state]), check.found, check.hint)
    return table
