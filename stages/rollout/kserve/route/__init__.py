"""Mode ``route``, for any KServe in Standard mode: an InferenceService for each release behind the rollout's own
HTTPRoute."""

from stages.rollout.kserve.http_route import HTTP_ROUTES
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import ENDPOINT, ISVCS
from stages.rollout.kserve.route.objects import render
from stages.rollout.kserve.route.target import RouteTarget
from stages.rollout.kserve.standard.objects import NAMES

MODE = Mode(
    name="route",
    target=RouteTarget,
    services=ISVCS,
    owns=lambda service: ENDPOINT in service["metadata"].get("labels", {}),
    suits=lambda setup: setup.default_mode in NAMES,
    check=lambda setup: setup.require(HTTP_ROUTES),
    render=render,
    movable=True,
)
