"""Mode ``standard``, KServe 0.21 or newer: one InferenceService with its canary in ``spec.canary``."""

from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import DEPLOYMENT_MODE, ENDPOINT, ISVCS
from stages.rollout.kserve.standard.detect import check, suits
from stages.rollout.kserve.standard.objects import NAMES, render
from stages.rollout.kserve.standard.target import StandardTarget

MODE = Mode(
    name="standard",
    target=StandardTarget,
    services=ISVCS,
    owns=lambda service: (
        service["metadata"].get("annotations", {}).get(DEPLOYMENT_MODE) in NAMES
        and ENDPOINT not in service["metadata"].get("labels", {})
    ),
    suits=suits,
    check=check,
    render=render,
    movable=True,
)
