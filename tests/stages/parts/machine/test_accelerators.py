from __future__ import annotations

from pathlib import Path

import pytest

from stages.parts.base.errors import ConfigError
from stages.parts.machine.accelerators import CATALOGUE, accelerator_of, catalogue

OWN = """
rtx-6000:
  device: NVIDIA RTX PRO 6000
  memory_gib: 96
  bandwidth_gb_per_s: 1792
  tflops: {bf16: 500}
  link: pcie
  link_gb_per_s: 128
  compute_capability: 12.0
  source: my own
h100: {price_per_hour: 2.5}
"""


def test_every_accelerator_has_a_source_and_no_price() -> None:
    for each in catalogue().values():
        assert each.source.startswith("https://")
        assert each.price_per_hour is None


def test_a_file_of_ones_own_adds_accelerators_and_changes_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    known = catalogue(tmp_path / "own.yaml")
    assert known["rtx-6000"].memory_gib == 96
    assert known["h100"].price_per_hour == 2.5
    assert known["h100"].bandwidth_gb_per_s == catalogue()["h100"].bandwidth_gb_per_s
    monkeypatch.setenv("SLIPWAY_ACCELERATORS", str(tmp_path / "own.yaml"))
    assert catalogue() == known


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine: {memory_gib: 96}", "accelerators.mine.device: Field required"),
        ("h100: {memory_gb: 80}", "accelerators.h100.memory_gb: unknown field"),
        ("h100: {memory_gib: -1}", "accelerators.h100.memory_gib: Input should be greater than 0"),
        ("- h100", "must hold fields with values, not a list"),
        ("h100: {", "is not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        catalogue(tmp_path / "own.yaml")
    assert said in str(raised.value)
    assert "own.yaml" in str(raised.value)


def test_a_device_is_known_by_its_whole_name() -> None:
    known = catalogue()
    assert accelerator_of("NVIDIA H200, 143771 MiB", known) == "h200"
    assert accelerator_of("NVIDIA L40S, 46068 MiB", known) == "l40s"
    assert accelerator_of("NVIDIA H100 PCIe, 81559 MiB", known) is None
    assert CATALOGUE.name == "accelerators.yaml"
