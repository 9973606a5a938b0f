"""A format that is added from outside, by one file and one line: this file, and the line in the fixture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pipeline.planning.document import make_plan
from pipeline.planning.page import summary
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from scoring.capacity.storage import Scales, Storage
from stages.optimize.ensure import ensure
from stages.optimize.rounded import INT8
from stages.parts.base.errors import ConfigError
from stages.parts.base.formats import FORMATS, Format, storage_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.accelerators import catalogue
from stages.parts.model.description import Description
from stages.parts.vllm.support import missing_kernel
from tests.stages.optimize.tiny import acquire
from tests.stages.parts.vllm.test_automatic import PUBLISHED

NAME: Final = "f12-blocks"
BLOCK: Final = 64


F12_WEIGHTS: Final = {"num_bits": 12, "type": "int", "group_size": BLOCK}
F12_BLOCKS: Final = Format(
    Storage(label="12-bit", weight_bits=12, scales=(Scales(bits=8, inputs=BLOCK, outputs=BLOCK),), arithmetic="fp8"),
    INT8.quantizer,
    lambda _: {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": F12_WEIGHTS}}},
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, f"{__name__}:F12_BLOCKS")


def template(compiled: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in compiled["spec"]["templates"] if each["name"] == name)
    return found


def test_settings_accept_it_and_suggest_it_for_a_typing_error() -> None:
    assert load(assignments=[f"optimize.variants=[fp16,{NAME}]"]).optimize.variants == ("fp16", NAME)
    with pytest.raises(ConfigError, match=f"optimize.variants: unknown variant 'f12-block'; did you mean '{NAME}'"):
        load(assignments=["optimize.variants=[fp16,f12-block]"])


def test_the_plan_counts_its_bytes_and_what_its_blocks_divide() -> None:
    config = load(assignments=[f"optimize.variants=[fp16,{NAME}]"])
    described = Description("org/name", None, PUBLISHED["llama-3.1-8b"]["config"], None)
    plan = make_plan(described, config, {"h100": catalogue()["h100"]}, context=8192)
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    saved = matrices * (16 - 12) // 8 - matrices // BLOCK**2
    assert plan.stored_bytes == {"fp16": 2 * 8_030_261_248, NAME: 2 * 8_030_261_248 - saved}
    assert f"{NAME} 11.7" in summary(plan)
    assert {option.variant for option in plan.options if option.fits} == {"fp16", NAME}


def test_the_workflow_has_its_task_and_asks_check_for_it() -> None:
    config = load()
    compiled = workflow_template(config.model_copy(update={"platform": config.platform.on(cores=4, gpus=0)}))
    tasks = {task["name"]: task for task in template(compiled, "pipeline")["dag"]["tasks"]}
    task = tasks[f"optimize-{NAME}"]
    assert task["when"] == f"{{{{tasks.check.outputs.parameters.{NAME}}}}} == true"
    assert task["arguments"]["parameters"] == [{"name": "method", "value": NAME}]
    assert f"optimize-{NAME}.Failed" in tasks["evaluate"]["depends"]
    outputs = template(compiled, "check")["outputs"]["parameters"]
    assert NAME in {output["name"] for output in outputs}
    assert " and F12-BLOCKS variants" in str(compiled["metadata"]["annotations"])


def test_check_asks_for_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stated = F12_BLOCKS.configuration
    assert stated
    config = {**PUBLISHED["llama-3.1-8b"]["config"], "quantization_config": stated(BLOCK)}
    assert missing_kernel(config, lora=False, allow_fallback=True) == "vLLM's CPU build has no w12a16 kernel"


def test_the_stage_makes_it(tiny: Path, tmp_path: Path) -> None:
    variant, made = ensure(acquire(tiny, tmp_path), NAME, Optimize(variants=("fp16", NAME)))
    assert (made, variant.variant, variant.method, variant.bits) == (True, NAME, NAME, 8)
    assert {"int8", "bfloat16", "float32"} <= variant.stored.keys()


def test_every_record_can_be_read_and_takes_the_size_of_groups() -> None:
    assert all(isinstance(record, Format) for record in FORMATS.values())
    assert storage_of("awq", 32) != storage_of("awq", 64)
    assert storage_of("int8", 32) == INT8.storage
    assert replace(INT8, only_16_bit=True) != INT8
