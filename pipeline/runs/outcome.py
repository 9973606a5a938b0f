"""What a stage said of its failure."""

from __future__ import annotations

import re
from typing import Final

ERROR: Final = re.compile(r"^error: (?P<message>[^\n]*(?:\n {4}[^\n]*)*)(?:\n  hint: (?P<hint>[^\n]*))?", re.MULTILINE)
"""As SlipwayError.render writes it: details are indented by four."""
