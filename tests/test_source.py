"""Bounds on the source itself that no linter checks."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ("pipeline", "stages", "scoring", "benchmarks")
LONGEST_FUNCTION = 60
LONGEST_TEMPLATE_LINE = 160


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_no_function_is_longer_than_a_screen() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for folder in PROGRAM
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert len(found) > 1000
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


def test_no_line_of_a_template_holds_a_whole_table() -> None:
    templates = sorted((ROOT / "stages").rglob("*.jinja"))
    lines = {
        f"{path.relative_to(ROOT)}:{number}": len(line)
        for path in templates
        for number, line in enumerate(lines_of(path), start=1)
    }
    assert templates
    assert {place: length for place, length in lines.items() if length > LONGEST_TEMPLATE_LINE} == {}
