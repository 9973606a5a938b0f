"""The suite as if the processor had no AVX-512: ``make test-avx2``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.parts.machine.hardware import LIMIT, processor
from stages.parts.machine.process import Contained

LIMITED = Path(__file__).parent / "processor"


def run(code: str, limit: str, *folders: Path) -> str:
    variables = {LIMIT: limit, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


@pytest.mark.skipif(processor() is None, reason="no x86 processor")
@pytest.mark.parametrize(
    ("limit", "hidden"), [("AVX2", {"avx512", "bf16", "amx"}), ("AVX512_CORE", {"bf16", "amx"}), ("DEFAULT", set())]
)
def test_pytorch_sees_a_limited_processor_as_slipway_does(limit: str, hidden: set[str]) -> None:
    code = """
import torch
from stages.parts.machine.hardware import processor

tell = torch.cpu
told = {
    "avx2": tell._is_avx2_supported(),
    "avx512": tell._is_avx512_supported(),
    "bf16": tell._is_avx512_bf16_supported(),
    "amx": tell._is_amx_tile_supported(),
}
assert told == processor().model_dump(), (told, processor())
print(*(name for name, able in told.items() if able), tell.get_capabilities()["architecture"])
"""
    able, architecture = run(code, limit, LIMITED).rsplit(maxsplit=1)
    assert architecture == "x86_64"
    assert not hidden & set(able.split())


def test_nothing_is_imported_for_it_and_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    code = "import sys; print('torch' in sys.modules)"
    assert run(code, "AVX2", LIMITED, tmp_path).split("\n") == ["the other one", "False"]


def test_what_limits_a_process_reaches_the_programs_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "AVX2")
    monkeypatch.setenv("PYTHONPATH", str(LIMITED))
    command = [sys.executable, "-c", "import sitecustomize as s; print(s.HIDDEN)"]
    with (tmp_path / "output").open("wb") as output, Contained(command, output=output) as child:
        assert child.wait() == 0
    assert (tmp_path / "output").read_text().strip() == "('avx512', 'amx')"
