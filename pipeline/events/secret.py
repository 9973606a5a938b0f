"""Secrets from the environment or from files, never from a command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from stages.parts.base.errors import ConfigError

SHORTEST: Final = 16
"""Number of characters. A shorter secret can be guessed."""
HINT: Final = "set {0}_FILE to a file that holds the secret, or {0} to the secret itself"


def secret(variable: str) -> str:
    """Return a secret that must be set. Raises: ConfigError: it is not, or as ``optional_secret``."""
    if (value := optional_secret(variable)) is None:
        raise ConfigError(f"{variable} and {variable}_FILE are not set", hint=HINT.format(variable))
    return value


def optional_secret(variable: str) -> str | None:
    """Return the secret in *variable*, or in the file that *variable*``_FILE`` names, or None if neither is set. A line
    break at the end is left out.

    Raises:
        ConfigError: both are set, the file can't be read, or the secret is short or not all visible ASCII characters.
    """
    value, file, hint = os.environ.get(variable), os.environ.get(f"{variable}_FILE"), HINT.format(variable)
    if value and file:
        raise ConfigError(f"{variable} and {variable}_FILE are both set", hint=hint)
    if file:
        try:
            value = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the file of {variable}_FILE: {file}", hint=hint) from error
    elif not value:
        return None
    value = value.removesuffix("\n")
    if len(value) < SHORTEST or not all("!" <= character <= "~" for character in value):
        raise ConfigError(
            f"the secret of {variable} must be at least {SHORTEST} visible ASCII characters",
            hint="make one with: openssl rand -hex 32",
        )
    return value
