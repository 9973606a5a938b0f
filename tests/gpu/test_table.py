"""What the tests on a GPU need of a machine without one: their table, and that they say why they are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.table import HEADS, markdown
from tests.samples import MODEL, measured_store
from tests.serving import REPOSITORY


def test_the_table_has_a_row_for_each_variant_that_was_measured(tmp_path: Path) -> None:
    said, _, heads, rule, *rows = markdown(measured_store(tmp_path), ["fp16", "awq", "gptq", "int8"]).splitlines()
    assert said.startswith(f"{MODEL} on ")
    assert "; vLLM 0.32.0 in bfloat16; 4 in flight, " in said
    assert heads == f"| {' | '.join(HEADS)} |"
    assert {line.count("|") for line in (heads, rule, *rows)} == {len(HEADS) + 1}
    assert [line.split(" | ")[0] for line in rows] == ["| fp16", "| awq", "| gptq"]
    assert rows[1].endswith("| 120 | 8.0 | 8 | 0.796 |")


def test_without_a_gpu_every_test_on_one_is_skipped_with_the_reason() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout
    assert "needs a GPU (nvidia-smi shows none)" in said.stdout
    assert "skipped" in said.stdout.splitlines()[-1]
    assert "passed" not in said.stdout.splitlines()[-1]
