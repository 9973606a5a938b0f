"""YAML from Jinja templates, in which every value is written as JSON: JSON is YAML."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import jinja2


def rendered(template: Path, **values: Any) -> list[Any]:
    """Render the documents of the file *template*; what is between two ``---`` and renders to nothing is none."""
    text = _environment(template.parent).get_template(template.name).render(values)
    return [document for document in yaml.safe_load_all(text) if document is not None]


@cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=False,  # noqa: S701
        finalize=lambda value: json.dumps(value, ensure_ascii=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
