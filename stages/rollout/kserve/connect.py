"""The target of a rollout on a cluster, in the mode that its KServe uses."""

from __future__ import annotations

from typing import Final

from stages.parts.base.errors import NotInstalled
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import detect, other_default
from stages.rollout.kserve.kept import MOVE, in_mode, kept_mode
from stages.rollout.kserve.modes import mode_named
from stages.rollout.kserve.objects import ISVCS, RUNTIME, KServeEndpoint
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.target import KServeTarget

RUNTIMES: Final = Kind("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes")
POLL_S: Final = 0.5


def on(
    cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe, *, poll_s: float = POLL_S
) -> KServeTarget:
    """Make the target on *cluster*: in the mode that serves the model already, otherwise in that of its KServe.

    Raises:
        NotInstalled: it has no KServe, or lacks the runtime in ``manifests/kserve``.
        ConfigError: its KServe can't split traffic as it is set up.
        Conflict: the model is served in another mode than *settings* name, or in two.
    """
    cluster.kind(ISVCS.api_version, ISVCS.name)
    served = kept_mode(cluster, store.model, settings.mode)
    if served and (default := other_default(cluster, settings, served)):
        say(f"rollout: {store.model} stays in mode {served}; KServe's is now {default}: {MOVE}")
    return target_in(cluster, store, serving, in_mode(settings, served), poll_s=poll_s)


def target_in(
    cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe, *, poll_s: float = POLL_S
) -> KServeTarget:
    """Make the target in the mode of *settings*, whatever serves the model now; raises as ``on``."""
    installation = detect(cluster, settings)
    mode = mode_named(installation.mode)
    if mode.needs_runtime:
        try:
            cluster.get(RUNTIMES, RUNTIME)
        except Absent as error:
            raise NotInstalled(
                f"the namespace {cluster.namespace} has no ServingRuntime {RUNTIME}",
                hint="slipway install, or kubectl apply -k manifests/kserve",
            ) from error
    return mode.target(cluster, KServeEndpoint(store, serving, settings, cluster.namespace), installation, poll_s)
