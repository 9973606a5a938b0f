"""``slipway samples``: the raw samples of a run as a table."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from stages.parts.base.store import ModelStore
from tests.samples import MODEL

RUN = "20260102-030405-6a1b"


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    shutil.copytree(Path(__file__).parents[1] / "store_of_0_2_0", tmp_path, dirs_exist_ok=True)
    return ModelStore(tmp_path, MODEL)


def slipway(*arguments: str, store: ModelStore) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "samples", *arguments, "--store", str(store.root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_requests_and_items_are_rows_of_one_table(store: ModelStore) -> None:
    ended = slipway(RUN, store=store)
    assert ended.returncode == 0, ended.stderr
    table = pd.read_csv(io.StringIO(ended.stdout))
    assert table.groupby(["variant", "kind"]).size().to_dict() == {
        (variant, kind): rows
        for variant in ("fp16", "awq")
        for kind, rows in (("request", 3 * 4 * 20), ("accuracy", 240), ("perplexity", 12))
    }
    requests = table[table.kind == "request"]
    assert set(requests.block) == {0, 1, 2}
    assert requests[requests.phase == "trial"].rate_per_s.unique().tolist() == [4.0, 8.0, 16.0]
    medians = requests[requests.phase == "round"].groupby("variant").ttft_ms.median()
    assert medians["awq"] < medians["fp16"]
    assert table[table.kind == "accuracy"].groupby("variant").correct.mean()["fp16"] == pytest.approx(200 / 240)


def test_the_table_is_written_to_files(store: ModelStore, tmp_path: Path) -> None:
    csv, parquet = tmp_path / "samples.csv", tmp_path / "samples.parquet"
    ended = slipway(RUN, "--csv", str(csv), "--parquet", str(parquet), store=store)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert pd.read_parquet(parquet).variant.tolist() == pd.read_csv(csv).variant.tolist()


def test_help_has_an_example(store: ModelStore) -> None:
    ended = slipway("--help", store=store)
    assert "Example: slipway samples latest --parquet" in " ".join(ended.stdout.split())
