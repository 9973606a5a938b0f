"""What the checks of this machine or of a cluster find, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from rich.table import Table
from rich.text import Text

from pipeline.runs.tables import plain_table
from stages.parts.base.settings import Settings

STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}


State: TypeAlias = Literal["ok", "warning", "missing"]


class Finding(NamedTuple):
    state: State
    text: str
    hint: str = ""
    """What to do about it."""


def ok(text: str, hint: str = "") -> Finding:
    return Finding("ok", text, hint)


def warning(text: str, hint: str = "") -> Finding:
    return Finding("warning", text, hint)


def missing(text: str, hint: str = "") -> Finding:
    return Finding("missing", text, hint)


class CheckResult(Settings):
    """A finding with the name of its check, as it is printed."""

    what: str
    state: State
    found: str
    hint: str = ""


def results(findings: Mapping[str, Finding]) -> list[CheckResult]:
    """Return what each check found, by its name."""
    return [
        CheckResult(what=check, state=finding.state, found=finding.text, hint=finding.hint)
        for check, finding in findings.items()
    ]


def checks_table(checks: list[CheckResult]) -> Table:
    table = plain_table("Check", "State", "Found", "What to do")
    for check in checks:
        table.add_row(check.what, Text(check.state, style=STYLES[check.state]), check.found, check.hint)
    return table
