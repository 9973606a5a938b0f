from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.parts.base.errors import NotInstalled
from stages.parts.machine.hardware import (
    GPUS_VARIABLE,
    Hardware,
    Processor,
    check_gpus,
    core_parts,
    gpu_memory_used_bytes,
    gpus,
    hardware,
    processor,
)

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *memory.used*) echo 1024; echo 2048 ;;
  *--id\\ 1*) echo "NVIDIA H200, 143771 MiB" ;;
  *--id\\ MIG*) echo "no such device" >&2; exit 6 ;;
  *) echo "NVIDIA H200, 143771 MiB"; echo "NVIDIA H200, 143771 MiB" ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists two GPUs."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine_has_a_processor_cores_and_memory() -> None:
    found = hardware()
    assert found.cpu
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.processor == processor()
    assert 1 << 28 < found.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_record_without_a_processor_stays_as_it_is() -> None:
    stored = '{"cpu":"a cpu","cores":2,"memory_bytes":1024,"gpus":[]}'
    assert Hardware.model_validate_json(stored).model_dump_json() == stored
    known = Hardware(
        cpu="a cpu",
        cores=2,
        memory_bytes=1024,
        gpus=(),
        processor=Processor(avx2=True, avx512=False, bf16=False, amx=False),
    )
    assert Hardware.model_validate_json(known.model_dump_json()) == known


@pytest.mark.parametrize(
    ("cpus", "siblings", "halves"),
    [
        ({0}, {}, None),
        ({0, 1}, {}, ((0,), (1,))),
        ({3, 4, 9}, {}, ((3,), (4,))),
        ({0, 1}, {0: "0-1", 1: "0-1"}, ((0,), (1,))),
        ({0, 1}, {0: "", 1: ""}, ((0,), (1,))),
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, ((0,), (1,))),
        ({2, 3}, {2: "0,2", 3: "1,3"}, ((2,), (3,))),
        (set(range(8)), {}, ((0, 1, 2), (4, 5, 6))),
    ],
    ids=["one", "two", "odd", "two threads of one", "untold", "two threads each", "the second threads alone", "eight"],
)
def test_two_servers_get_separate_physical_cores(
    cpus: set[int],
    siblings: dict[int, str],
    halves: tuple[tuple[int, ...], tuple[int, ...]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cpu, listed in siblings.items():
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{listed}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    assert core_parts(2, tmp_path) == halves


def test_a_machine_without_a_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    assert gpu_memory_used_bytes() is None


def test_a_driver_that_is_on_no_path_is_found_where_gke_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncase "$LD_LIBRARY_PATH" in *{tmp_path}/lib64) echo "NVIDIA L4, 23034 MiB";; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr("stages.parts.machine.hardware.DRIVER", tmp_path)
    monkeypatch.setenv("PATH", "/nothing/here")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for path in ("", "/opt/lib"):
        monkeypatch.setenv("LD_LIBRARY_PATH", path)
        assert gpus() == ["NVIDIA L4, 23034 MiB"]


def test_a_pod_that_got_a_gpu_and_sees_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(GPUS_VARIABLE, raising=False)
    check_gpus()
    monkeypatch.setenv(GPUS_VARIABLE, "2")
    with pytest.raises(NotInstalled, match="asked for 2 GPU, and sees none") as refused:
        check_gpus()
    assert "/usr/local/nvidia/lib64" in refused.value.hint


@pytest.mark.usefixtures("driver")
def test_a_pod_that_sees_its_gpus_goes_on_until_it_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS_VARIABLE, "2")
    check_gpus()
    monkeypatch.setenv("PATH", "/nothing/here")
    with pytest.raises(NotInstalled):
        check_gpus()


@pytest.mark.usefixtures("driver")
def test_all_gpus_count_unless_the_task_got_only_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus() == ["NVIDIA H200, 143771 MiB"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus() == ["NVIDIA H200, 143771 MiB"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == []


@pytest.mark.usefixtures("driver")
def test_a_slice_of_a_gpu_that_nvidia_smi_cannot_select_still_shows_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert len(gpus()) == 2


@pytest.mark.usefixtures("driver")
def test_used_gpu_memory_is_summed_in_bytes() -> None:
    assert gpu_memory_used_bytes() == 3072 << 20
