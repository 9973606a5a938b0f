from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scoring.units import GIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.vllm.gpu_room import check_room
from stages.parts.vllm.server import ServerSpec, running
from tests.serving import one_gpu

Model = Callable[[float, int], Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A directory with so many GiB of weights, which take no space on the disk, and attention heads."""

    def make(gib: float, heads: int) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(int(gib * GIB))
        return tmp_path

    return make


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many GPUs of 1 GiB."""

    def have(count: int) -> None:
        variables = one_gpu(tmp_path / f"machine-{count}", count)
        monkeypatch.syspath_prepend(variables["PYTHONPATH"].split(":")[0])
        for name in ("PATH", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, variables[name])

    return have


@pytest.mark.parametrize(
    ("count", "gib", "heads", "hint"),
    [
        (4, 1.5, 8, "set serving.tensor_parallel_size=2"),
        (4, 2.0, 8, "set serving.tensor_parallel_size=4"),
        (8, 3.7, 24, "set serving.tensor_parallel_size=8"),
        (3, 2.0, 8, "the 3 GPU(s) here are too few for it; see also optimize.variants"),  # 3 is not a power of two
        (
            4,
            1.5,
            9,
            "the 4 GPU(s) here are too few for it; see also optimize.variants",
        ),  # the heads do not divide evenly
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_number_of_gpus_that_is_enough(
    model: Model, gpus: Callable[[int], None], count: int, gib: float, heads: int, hint: str
) -> None:
    gpus(count)
    with pytest.raises(ConfigError, match=rf"need {gib:.1f} GiB, .* 0.9 GiB on each of 1 GPU") as refused:
        check_room(model(gib, heads), Serving())
    assert refused.value.hint == hint


def test_weights_that_fit_or_are_placed_in_another_way_are_not_refused(
    model: Model, gpus: Callable[[int], None]
) -> None:
    gpus(2)
    with pytest.raises(ConfigError):
        check_room(model(1.5, 8), Serving())
    check_room(model(0.8, 8), Serving())
    check_room(model(1.5, 8), Serving(tensor_parallel_size=2))
    for arguments in (("--cpu-offload-gb", "2"), ("-tp=2",), ("--quantization", "fp8")):
        check_room(model(1.5, 8), Serving(extra_arguments=arguments))


def test_a_server_whose_weights_do_not_fit_is_not_started(
    model: Model, gpus: Callable[[int], None], tmp_path: Path
) -> None:
    gpus(2)
    with (
        pytest.raises(ConfigError, match="the weights need"),
        running(ServerSpec(model(1.5, 8), "name", Serving(), tmp_path / "vllm.log")),
    ):
        pass
    assert not (tmp_path / "vllm.log").exists()
