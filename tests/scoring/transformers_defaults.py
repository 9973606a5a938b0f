"""The defaults of Transformers' configuration classes, for the fields that decide sizes.

``python -m tests.scoring.transformers_defaults`` writes them to ``scoring/capacity/defaults.json``, whose text a test
compares.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

from scoring.capacity import families, reader

FILE: Final = Path(reader.__file__).with_name("defaults.json")


def fields_read() -> set[str]:
    """Names in the code that reads configurations."""
    code = (Path(module.__file__ or "").read_text(encoding="utf-8") for module in (families, reader))
    return {name for text in code for name in re.findall(r'"([a-z][a-z0-9_A-Z]+)"', text)}


def text() -> str:
    from transformers import CONFIG_MAPPING

    names = fields_read()

    def defaults(family: str) -> dict[str, Any]:
        fields = dataclasses.fields(CONFIG_MAPPING[family])
        return {field.name: field.default for field in sorted(fields, key=lambda field: field.name) if wanted(field)}

    def wanted(field: Any) -> bool:
        return field.name in names and isinstance(field.default, int | float | str)

    lines = (f"  {json.dumps(family)}: {json.dumps(defaults(family))}" for family in families.FAMILIES)
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
