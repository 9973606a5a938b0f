"""The platforms that a release can be rolled out on. To add one: a module with ``connect``, and a line below."""

from __future__ import annotations

import importlib
from typing import Final, cast

from stages.parts.base.errors import UnknownName
from stages.parts.base.settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.records.rollout import LOCAL
from stages.rollout.target import Target

TARGETS: Final = {LOCAL: "stages.rollout.local", "kserve": "stages.rollout.kserve"}
"""Modules with ``connect(store: ModelStore, source: str, serving: Serving) -> Target``; *source* is the model as the
user named it. Imported only when used: each needs what the others don't."""


def connect(name: str, store: ModelStore, source: str, serving: Serving) -> Target:
    """The platform called *name*, for the releases of one model.

    Raises:
        UnknownName: it is none of ``TARGETS``.
    """
    if name not in TARGETS:
        raise UnknownName("rollout target", name, TARGETS)
    module = importlib.import_module(TARGETS[name])
    return cast(Target, module.connect(store, source, serving))
