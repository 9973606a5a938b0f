"""Bounds on the source itself that no linter checks."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PRODUCT = ("pipeline", "stages", "scoring")
PROGRAM = (*PRODUCT, "benchmarks")
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


def imported() -> Iterator[tuple[str, str]]:
    """Each module of the product and the package that it imports, wherever in it."""
    for path in [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from ((str(path.relative_to(ROOT)), name.partition(".")[0]) for name in names)


def test_every_package_that_the_product_imports_is_declared() -> None:
    declaring = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, apart = declaring["project"], declaring["dependency-groups"]["llm-compressor"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    declared = {canonicalize_name(Requirement(each).name) for each in asked}
    # vLLM's CPU build has another name; ``_typeshed`` exists for mypy alone.
    known = {*sys.stdlib_module_names, *PRODUCT, "vllm", "_typeshed", *(Requirement(each).name for each in apart)}
    distributions = packages_distributions()
    missing = {
        (path, name)
        for path, name in imported()
        if name not in known and not {canonicalize_name(each) for each in distributions.get(name, [])} & declared
    }
    assert missing == set()


def test_no_line_of_a_template_holds_a_whole_table() -> None:
    templates = sorted((ROOT / "stages").rglob("*.jinja"))
    lines = {
        f"{path.relative_to(ROOT)}:{number}": len(line)
        for path in templates
        for number, line in enumerate(lines_of(path), start=1)
    }
    assert templates
    assert {place: length for place, length in lines.items() if length > LONGEST_TEMPLATE_LINE} == {}
