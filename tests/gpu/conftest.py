from __future__ import annotations

import pytest

TABLE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of ``make test-gpu`` is the last thing that it prints."""
    if table := config.stash.get(TABLE, ""):
        terminalreporter.section("for docs")
        terminalreporter.write_line(table)
