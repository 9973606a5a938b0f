"""``{{…}}``: references to parameters, outputs and the workflow itself.

References are replaced once: a ``{{`` in a value stays as it is. ``{{=…}}`` (expression templates) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from stages.parts.base.errors import ConfigError

REFERENCE: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


class Unresolved(ConfigError):
    """A reference without a value."""

    def __init__(self, reference: str, why: str) -> None:
        super().__init__(f"{{{{{reference}}}}} has no value: {why}")


def references(text: str) -> Iterator[str]:
    """Every reference in *text*, without its braces."""
    return (match[1].strip() for match in REFERENCE.finditer(text))


def substitute(text: str, lookup: Callable[[str], str]) -> str:
    """Replace each reference in *text* by the value that *lookup* returns for it."""
    return REFERENCE.sub(lambda match: lookup(match[1].strip()), text)
