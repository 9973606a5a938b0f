"""The objects of mode ``knative``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stages.parts.cluster.kinds import Object
from stages.parts.vllm.host import START_S
from stages.rollout.kserve import objects
from stages.rollout.kserve.objects import DEPLOYMENT_MODE, KServeEndpoint, disruption_budget, startup_s

NAMES: Final = ("Serverless", "Knative")
"""KServe's deployment mode, by its old name, which every version understands, and its new one."""
PERCENT: Final = "canaryTrafficPercent"
NEARLY_ALL: Final = 99
LONGEST_TIMEOUT_S: Final = 600
SHORTEST_WINDOW_S: Final = 6
"""Knative's minimum."""


def predictor(endpoint: KServeEndpoint, release: str) -> Object:
    """``spec.predictor``; raises as ``objects.predictor``."""
    scaling = endpoint.settings.scaling
    return objects.predictor(endpoint, release, drained=False) | {
        "timeout": min(endpoint.settings.timeout_s, LONGEST_TIMEOUT_S),
        "scaleMetric": "concurrency",
        "scaleTarget": scaling.concurrency,
        "annotations": {
            "autoscaling.knative.dev/window": f"{max(SHORTEST_WINDOW_S, scaling.scale_up_window_s)}s",
            "autoscaling.knative.dev/scale-down-delay": f"{scaling.scale_down_delay_s}s",
            "autoscaling.knative.dev/target-utilization-percentage": "100",
            "autoscaling.knative.dev/initial-scale": str(scaling.minimum),
            "serving.knative.dev/progress-deadline": f"{startup_s(endpoint, release) + START_S}s",
        },
    }


def inference_service(endpoint: KServeEndpoint, predictor: Object) -> Object:
    annotations = {DEPLOYMENT_MODE: NAMES[0], "serving.kserve.io/enable-tag-routing": "true"}
    return objects.inference_service(endpoint, {"predictor": predictor}, annotations)


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    """See ``Mode.render``."""
    *stable, release = shares
    share = {PERCENT: min(shares[release], NEARLY_ALL)} if stable else {}
    return [inference_service(endpoint, predictor(endpoint, release) | share), disruption_budget(endpoint)]
