"""``{{…}}``: references to parameters, outputs and the workflow itself.

One pass: a value that itself holds ``{{`` is not looked into again. ``{{=…}}`` (expression templates) is refused.
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


def bare(text: str) -> str:
    """A reference without its braces, if it has any."""
    match = REFERENCE.fullmatch(text.strip())
    return match[1].strip() if match else text.strip()


def is_one_reference(text: str) -> bool:
    """Whether *text* is a reference and nothing else."""
    return REFERENCE.fullmatch(text) is not None and text.count("{{") == 1


def references(text: str) -> Iterator[str]:
    """Every reference in *text*, without its braces."""
    return (match[1].strip() for match in REFERENCE.finditer(text))


def substitute(text: str, lookup: Callable[[str], str]) -> str:
    """*text* with each reference replaced by what *lookup* gives for it."""
    return REFERENCE.sub(lambda match: lookup(match[1].strip()), text)
