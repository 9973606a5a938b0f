"""Mode ``knative``: one InferenceService, whose latest revision gets ``canaryTrafficPercent``."""

from stages.rollout.kserve.knative.objects import NAMES, render
from stages.rollout.kserve.knative.target import REVISIONS, KnativeTarget
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import DEPLOYMENT_MODE, ISVCS

MODE = Mode(
    name="knative",
    target=KnativeTarget,
    services=ISVCS,
    owns=lambda service: service["metadata"].get("annotations", {}).get(DEPLOYMENT_MODE) in NAMES,
    suits=lambda setup: setup.default_mode in NAMES,
    check=lambda setup: setup.require(REVISIONS),
    render=render,
    autoscaler="Knative",
)
