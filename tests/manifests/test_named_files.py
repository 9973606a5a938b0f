"""The files that manifests and their documentation tell a person to use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\b(?:manifests|configs|docs)/[\w./-]*\w")
APPLIED = re.compile(r"kubectl apply -[fk] ([\w./-]*\w)")


def test_every_file_that_a_person_is_told_to_apply_is_there() -> None:
    files = [*ROOT.glob("docs/**/*"), *ROOT.glob("manifests/**/*"), ROOT / "README.md"]
    texts = [file for file in files if file.suffix in (".md", ".yaml")]
    applied = {path for text in texts for path in APPLIED.findall(text.read_text())}
    assert "docs/examples/argocd-application.yaml" in applied
    assert [path for path in applied if not (ROOT / path).exists()] == []


def test_every_file_that_an_example_or_a_manifest_names_is_there() -> None:
    texts = [*ROOT.glob("docs/examples/*"), *ROOT.glob("manifests/**/*.yaml"), ROOT / "manifests" / "README.md"]
    named = {(str(text.relative_to(ROOT)), path) for text in texts for path in NAMED.findall(text.read_text())}
    assert [each for each in named if not (ROOT / each[1]).exists()] == []
