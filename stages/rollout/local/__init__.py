"""Releases on one machine: a vLLM server each, and Envoy before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.rollout.target import Target
    from stages.settings import Serving
    from stages.store import ModelStore


def connect(store: ModelStore, source: str, serving: Serving) -> Target:
    """This machine, for the releases of one model. See ``stages.rollout.targets``."""
    from stages.rollout.local.target import OneMachine

    return OneMachine(store, source, serving)
