"""What a request was, and what may go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KubernetesRequest:
    """One request as it was answered; *verb* as RBAC calls it."""

    verb: str
    path: str
    query: dict[str, str]
    user_agent: str
    status: int = 0


@dataclass
class Fault:
    """What goes wrong for requests of *verb* whose path matches *pattern*, for the next *times* (None: always)."""

    verb: str
    pattern: str
    times: int | None
    status: int = 0
    """0: the connection is closed without an answer."""
    retry_after: int | None = None
    after: bool = False
    """Whether the request takes effect before its answer is lost."""


@dataclass(eq=False)
class Watched:
    cut: bool = False
    expired: bool = False
