"""What the installed vLLM says about this machine, asked by the program as a run asks it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.parts.base.settings import Optimize
from stages.parts.machine.processor import processor
from tests.hub.models import Stages

FOUR_BIT = "vLLM's CPU build has no 4-bit kernel for processors without AVX-512"
ROOT = Path(__file__).parents[3]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": f"{ROOT / 'tests' / 'processor'}:{ROOT}"}
CHOOSE = "from stages.parts.engine.kernels import FORMATS; [form.kernel() for form in FORMATS.values()]"


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages("http://127.0.0.1:9", tmp_path)


def checked(stages: Stages, environment: dict[str, str], *, make_unservable: bool = False) -> dict[str, str]:
    """The outputs of the program, by name."""
    settings = Optimize(variants=("fp16", "awq", "gptq", "int8"), make_unservable=make_unservable).model_dump_json()
    environment = {"SLIPWAY_RUN": "r1", "XDG_CACHE_HOME": str(stages.folder), **environment}
    ended = stages.run("check", "--model", "org/tiny", "--settings", settings, **environment)
    assert ended.returncode == 0, ended.stderr
    return {path.name: path.read_text() for path in (stages.folder / "outputs").iterdir()}


def test_four_bit_needs_avx512_and_int8_does_not(stages: Stages) -> None:
    here = processor()
    assert here is not None
    outputs = checked(stages, {})
    four_bit = str(here.avx512).lower()
    assert outputs == {
        "awq": four_bit,
        "gptq": four_bit,
        "int8": "true",
        "variants": "fp16,awq,gptq,int8" if here.avx512 else "fp16,int8",
        "left-out": "" if here.avx512 else f"awq: {FOUR_BIT}\ngptq: {FOUR_BIT}",
    }


def test_a_variant_that_cannot_be_served_is_left_out_with_the_cause(stages: Stages) -> None:
    outputs = checked(stages, AVX2)
    assert outputs["variants"] == "fp16,int8"
    assert (outputs["awq"], outputs["gptq"], outputs["int8"]) == ("false", "false", "true")
    assert outputs["left-out"] == f"awq: {FOUR_BIT}\ngptq: {FOUR_BIT}"
    recorded = json.loads((stages.store / "org--tiny/runs/r1/outcomes/check-awq.json").read_text())
    assert (recorded["result"], recorded["reason"]) == ("left out", FOUR_BIT)
    assert "optimize.make_unservable=true" in recorded["hint"]
    # vLLM is not asked again: without the simulation it would say something else.
    limited = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    for_another_machine = checked(stages, limited, make_unservable=True)
    assert (for_another_machine["awq"], for_another_machine["variants"]) == ("true", "fp16,int8")


def test_vllm_chooses_a_kernel_for_every_format_as_it_is_asked_on_a_gpu(stages: Stages) -> None:
    """No GPU is needed to see that vLLM takes our description of the layers."""
    if not (here := processor()) or not here.avx512:
        pytest.skip("the processor has no AVX-512")
    ended = subprocess.run([sys.executable, "-c", CHOOSE], capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 0, ended.stderr
