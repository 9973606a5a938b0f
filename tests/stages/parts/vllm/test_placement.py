from __future__ import annotations

import pytest

from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.vllm.arguments import BINDING, check_replicas, gpus_of, groups

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


def test_each_replica_gets_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, ["3", "4", "5", "7"])
    pairs = Serving(replicas=2, tensor_parallel_size=2)
    check_replicas(pairs)
    assert [gpus_of(pairs, replica) for replica in (0, 1)] == ["3,4", "5,7"]
    assert gpus_of(Serving(), 0) == "", "a single one uses what there is, as ever"


@pytest.mark.parametrize("ids", [["0", "1", "2"], ["0"]])
def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    here(monkeypatch, ids)
    with pytest.raises(ConfigError, match=r"2 servers need 4 GPUs of one kind, 2 each; this machine has NVIDIA H100"):
        check_replicas(Serving(replicas=2, tensor_parallel_size=2))


def test_more_replicas_than_cores_are_refused_unless_cores_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, [])
    monkeypatch.delenv(BINDING, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    check_replicas(Serving())
    with pytest.raises(
        ConfigError, match="2 servers of a release and 2 of its canary need 4 cores; this machine has 3"
    ):
        check_replicas(Serving(replicas=2))
    with pytest.raises(ConfigError, match="tensor parallelism use all of the machine"):
        check_replicas(Serving(replicas=2, tensor_parallel_size=2))
    monkeypatch.setenv(BINDING, "nobind")
    check_replicas(Serving(replicas=2))


def here(monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    """A machine with these GPUs."""
    for name, found in {"serves_on_gpu": bool(ids), "gpu_ids": ids, "gpus": [KIND] * len(ids)}.items():
        monkeypatch.setattr(f"stages.parts.vllm.arguments.{name}", lambda found=found: found)
