"""Quantities, requests, and what this machine has."""

from __future__ import annotations

import os
import shutil
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.local.resources import MachineResources, Pool, ResourceRequest, request
from stages.parts.base.errors import ConfigError
from stages.parts.cluster.nodes import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", "2"),
        ("500m", "0.5"),
        ("0.1", "0.1"),
        ("1.5Gi", str(3 << 29)),
        ("64Mi", str(64 << 20)),
        ("1Ki", "1024"),
        ("128k", "128000"),
        ("1M", "1000000"),
        ("2G", "2000000000"),
        ("1e3", "1000"),
        ("1E", "1000000000000000000"),
        ("100n", "0.0000001"),
        ("1Ei", str(1 << 60)),
    ],
)
def test_quantities_are_kubernetes_own(text: str, value: str) -> None:
    assert quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "two", "1 Gi", "1GiB", "-1", "1K", "1Mib", "1.2.3", "{{inputs.parameters.gpus}}"])
def test_a_text_that_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a Kubernetes quantity"):
        quantity(text)


def test_a_limit_without_a_request_counts_as_a_request() -> None:
    limits = {"memory": "2Gi", "nvidia.com/gpu": "2", "cpu": "8"}
    assert request({"cpu": "500m"}, limits) == ResourceRequest(cores=0.5, memory_bytes=2 << 30, gpus=2)
    assert request({"amd.com/gpu": "1", "ephemeral-storage": "1Gi"}, {}) == ResourceRequest(gpus=1)


requests = st.builds(ResourceRequest, st.floats(0, 6), st.integers(0, 6 << 30), st.integers(0, 3))


@given(st.lists(st.tuples(requests, st.booleans()), max_size=30))
def test_shares_never_exceed_the_machine_and_come_back_whole(steps: list[tuple[ResourceRequest, bool]]) -> None:
    capacity = MachineResources(cores=4, memory_bytes=4 << 30, gpus=("0", "1", "2"))
    pool, held = Pool(capacity), []
    for asked, also_return in steps:
        share = pool.take(asked)
        if isinstance(share, MachineResources):
            held.append(share)
        used = [gpu for each in held for gpu in each.gpus]
        assert len(used) == len(set(used))
        assert sum(each.cores for each in held) <= capacity.cores + 1e-6
        assert sum(each.memory_bytes for each in held) <= capacity.memory_bytes
        if held and also_return:
            pool.give_back(held.pop(0))
    for share in held:
        pool.give_back(share)
    assert pool.cores == pytest.approx(capacity.cores)
    assert (pool.memory_bytes, pool.gpus) == (capacity.memory_bytes, ["0", "1", "2"])


def test_this_machine_has_cores_and_memory() -> None:
    here = MachineResources.of_this_machine()
    assert 0 < here.cores <= (os.cpu_count() or 1)
    assert here.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("", ()), ("-1", ()), ("1,3", ("1", "3")), (" 2 , 0 ", ("2", "0")), ("0,-1,1", ("0",)), ("GPU-8a", ("GPU-8a",))],
)
def test_gpus_are_those_in_cuda_visible_devices(
    visible: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert MachineResources.of_this_machine().gpus == gpus


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU (nvidia-smi)")
def test_gpus_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert MachineResources.of_this_machine().gpus[0] == "0"


def test_gpus_are_counted_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of nvidia-smi prints what the real one does on a machine with two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--query-gpu=name,memory.total*) ;; *) exit 1 ;; esac\n'
        "echo 'NVIDIA H200, 143771 MiB'\n"
        "echo 'NVIDIA H200, 143771 MiB'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert MachineResources.of_this_machine().gpus == ("0", "1")
