"""Mode ``llm``, KServe 0.20 or newer: a LLMInferenceService for each release, in one routing group."""

from stages.rollout.kserve.llm.detect import check
from stages.rollout.kserve.llm.objects import LLM_SERVICES, render
from stages.rollout.kserve.llm.target import LLMTarget
from stages.rollout.kserve.modes import Mode

MODE = Mode(
    name="llm",
    target=LLMTarget,
    services=LLM_SERVICES,
    owns=lambda _: True,
    suits=lambda _: False,
    check=check,
    render=render,
    needs_runtime=False,
)
