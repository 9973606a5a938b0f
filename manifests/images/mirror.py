"""Prints what a site without internet has to mirror, one thing a line: packages, images, Debian packages and data sets.

It reads the locks and the files that name them, and needs no network and nothing but Python: ``make mirror-list``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = "https://download.pytorch.org/whl/cpu"


def packages() -> Iterator[str]:
    for lock in sorted(ROOT.glob("requirements*.lock")):
        index = f" {INDEX}" if lock.stem == "requirements-torch" else ""
        for pin in re.findall(
            r"^([a-z0-9][\w.-]*==\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE
        ):
            yield f"pypi {pin}{index}"


def images() -> Iterator[str]:
    for path in (ROOT / "manifests").rglob("*"):
        if path.name == "Containerfile" or path.suffix == ".yaml":
            for image in re.findall(r"(?:^ARG \w+_IMAGE=|image: )(docker\.io/\S+)", path.read_text(), re.MULTILINE):
                yield f"image {image}"


def debian_packages() -> Iterator[str]:
    for path in (ROOT / "manifests" / "images").glob("*/Containerfile"):
        text = re.sub(r"\\\n\s*", "", path.read_text())
        for names in re.findall(r"apt-get install --yes --no-install-recommends ([^&]+)&&", text):
            yield from (f"apt {name}" for name in names.split())


def datasets() -> Iterator[str]:
    """Read the calls of ``DatasetFile`` without importing the product, which needs its packages."""
    path = ROOT / "stages" / "evaluate" / "questions" / "question.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DatasetFile":
            name, commit, file = map(ast.literal_eval, node.args)
            yield f"dataset {name}@{commit} {file}"


def main() -> None:
    lines = {*packages(), *images(), *debian_packages(), *datasets()}
    sys.stdout.write("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
