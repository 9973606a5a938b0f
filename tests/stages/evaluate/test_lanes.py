from __future__ import annotations

import pytest

from stages.evaluate.lanes import groups

KIND = "NVIDIA H100, 81559 MiB"


@pytest.mark.parametrize(
    ("ids", "size", "found"),
    [
        (["0", "1", "2"], 1, ["0", "1", "2"]),
        (["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"], 2, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        (["0", "1", "2"], 2, [""]),
        (["3"], 1, [""]),
    ],
)
def test_gpus_are_divided_among_servers_by_tensor_parallelism(ids: list[str], size: int, found: list[str]) -> None:
    assert groups(ids, [KIND] * len(ids), size) == found


def test_servers_on_gpus_that_differ_would_not_be_comparable_and_run_one_after_another() -> None:
    assert groups(["0", "1"], [KIND, "NVIDIA A100, 40960 MiB"], 1) == [""]
