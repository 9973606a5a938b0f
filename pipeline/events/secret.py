"""Secrets from the environment or from mounted files: never from a command line, never in a log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from stages.parts.base.errors import ConfigError

SHORTEST: Final = 16
"""Characters. What is shorter can be guessed."""


def secret(variable: str) -> str:
    """What *variable* holds, or the file that *variable*``_FILE`` names, without the line break at its end.

    Raises:
        ConfigError: neither or both are set, the file can't be read, or the secret is short or not plain ASCII.
    """
    given, file = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    hint = f"set {variable}_FILE to a file with it, or {variable} itself"
    if bool(given) == bool(file):
        raise ConfigError(f"{variable} and {variable}_FILE are {'both set' if given else 'not set'}", hint=hint)
    try:
        value = given or Path(file or "").read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file of {variable}_FILE: {file}", hint=hint) from error
    if len(value) < SHORTEST or not all("!" <= each <= "~" for each in value):
        raise ConfigError(
            f"the secret of {variable} must be at least {SHORTEST} visible ASCII characters",
            hint="make one with: openssl rand -hex 32",
        )
    return value
