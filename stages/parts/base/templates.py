"""YAML from Jinja templates, in which every value is written as JSON: JSON is YAML."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    import jinja2

REFUSED: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What JSON may have as it is, and YAML refuses or takes for the end of a line."""


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
        finalize=_as_json,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _as_json(value: Any) -> str:
    return REFUSED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
