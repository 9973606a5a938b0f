"""The platforms that a release can be rolled out on. To add one: its name and a branch of ``connect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.parts.base.errors import UnknownName
from stages.parts.records.rollout import KSERVE, LOCAL

if TYPE_CHECKING:
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.store import ModelStore
    from stages.rollout.kserve.settings import KServe
    from stages.rollout.target import Target

TARGETS: Final = (LOCAL, KSERVE)


def connect(name: str, store: ModelStore, source: str, serving: AskedServing, kserve: KServe) -> Target:
    """Connect to the platform called *name*, for the releases of one model. Its module is imported only now.

    Args:
        source: the model as the user named it.

    Raises:
        UnknownName: *name* is not in ``TARGETS``.
        ConfigError: no cluster is configured, or its KServe can't split traffic as it is set up.
        NotInstalled: the cluster has no KServe.
    """
    if name == LOCAL:
        from stages.rollout.one_machine import OneMachine

        return OneMachine(store, source, serving)
    if name == KSERVE:
        from stages.parts.cluster import api
        from stages.rollout.kserve.detect import target_on

        return target_on(api.connect(namespace=kserve.namespace), store, serving, kserve)
    raise UnknownName("rollout target", name, TARGETS)
