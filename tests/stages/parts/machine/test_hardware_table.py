"""The table of hardware as it is shipped, and the mistakes that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stages.parts.base.errors import ConfigError
from stages.parts.base.formats import quantized_formats
from stages.parts.machine.accelerators import catalogue
from stages.parts.machine.hardware import Processor
from stages.parts.machine.hardware_table import FOLDER, hardware_table, kind_of

LINE = {"why": "small", "source": "https://example.com"}


def written(folder: Path, **fields: object) -> Path:
    (folder / "mine.yaml").write_text(yaml.safe_dump({"first": {"int8": LINE}, **fields}))
    return folder


def test_every_kind_of_hardware_has_a_line_for_every_format() -> None:
    for name, kind in hardware_table().items():
        lines = [*kind.first, *kind.also, *kind.left_out]
        assert sorted(lines) == sorted(quantized_formats()), f"{FOLDER}/{name}.yaml: each format has one line"


def test_every_accelerator_and_every_processor_is_of_one_kind() -> None:
    capabilities = [each for kind in hardware_table().values() for each in kind.compute_capabilities]
    processors = [each for kind in hardware_table().values() for each in kind.processors]
    assert {each.compute_capability for each in catalogue().values()} <= set(capabilities)
    assert sorted(processors) == ["AMX", "AVX-512", "AVX-512 with bf16", "AVX2", "no AVX2"]
    assert len(set(capabilities)) == len(capabilities)


def test_a_gpu_s_kind_does_not_depend_on_the_processor_beside_it() -> None:
    amx = Processor(avx2=True, avx512=True, bf16=True, amx=True)
    table = hardware_table()
    assert kind_of(catalogue()["l4"], amx) is table["ada"]
    assert kind_of(None, amx) is table["cpu-amx"]
    assert kind_of(None, None) is None
    assert kind_of(catalogue()["l4"].model_copy(update={"compute_capability": 7.0}), amx) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"first": {"int8": {"why": "small"}}}, "first.int8.source: Field required"),
        ({"also": {"awq": LINE | {"source": "a friend"}}}, "also.awq.source: String should match pattern"),
        ({"left_out": {"awq": LINE | {"why": ""}}}, "left_out.awq.why: String should have at least 1 character"),
        ({"also": {"w3a16": LINE}}, "unknown variant 'w3a16'; did you mean 'w4a16'?"),
        ({"left_out": {"fp16": LINE}}, "unknown variant 'fp16'"),
        ({"left_out": {"int8": LINE}}, "it has two lines for int8"),
        ({"never": {}}, "never: unknown field"),
    ],
)
def test_a_line_without_a_source_and_other_mistakes_are_refused_by_name(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    assert hardware_table(written(tmp_path / ".", processors=["AMX"]))["mine"].processors == ("AMX",)
    hardware_table.cache_clear()
    with pytest.raises(ConfigError) as raised:
        hardware_table(written(tmp_path, **fields))
    assert said in str(raised.value)
    assert "mine.yaml" in str(raised.value)
