from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.parts.base.errors import ConfigError, PortInUse, ServerFailed, ServerKilled, SlipwayError
from stages.parts.base.serving_settings import Serving, Speculation
from stages.parts.base.store import ModelStore
from stages.parts.machine.environment import engine_of
from stages.parts.machine.hardware import LIMIT, core_parts, cpu_dtype, processor
from stages.parts.vllm.arguments import (
    BINDING,
    INTEL_OPENMP,
    ONE_THREAD,
    core_binding,
    engine_arguments,
    environment,
    serves_on_gpu,
)
from stages.parts.vllm.client import answer, healthy
from stages.parts.vllm.server import ServerSpec, reserved_port, running
from tests.serving import (
    DEMO,
    MODEL,
    SERVING,
    STAND_IN,
    living,
    processes_with,
    stand_in_variant,
    variant_of,
    wait_until,
)
from tests.stages.parts.vllm.test_engine_log import DEATHS

NAME = "served-by-this-test"
OPENMP = Path(sys.prefix) / INTEL_OPENMP
QUICK = Serving(startup_timeout_s=60)
DEAD_WITHIN_S = 15.0


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", MODEL)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


def test_a_port_in_use_is_reported_before_anything_starts(store: ModelStore, listener: int, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with (
        pytest.raises(PortInUse, match=f"port {listener} on 127.0.0.1 is in use") as raised,
        running(ServerSpec(store.base, NAME, QUICK, log, port=listener)),
    ):
        pass
    assert "serving.port" in raised.value.hint
    assert not log.exists()


def test_a_reserved_port_is_not_given_out_as_a_free_one_but_can_be_served_on() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # create_server sets SO_REUSEADDR, as vLLM does.
        with socket.create_server(("127.0.0.1", port)), pytest.raises(PortInUse), reserved_port("127.0.0.1", port):
            pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_an_error_in_the_settings(host: str) -> None:
    with pytest.raises(ConfigError, match=host), reserved_port(host, 0):
        pass


def test_an_api_key_never_becomes_an_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="visible in the process list") as raised:
        engine_arguments(Serving(extra_arguments=("--api_key=secret",)), tmp_path)
    assert "SLIPWAY_API_KEY" in raised.value.hint
    assert environment("secret")["VLLM_API_KEY"] == "secret"


@pytest.mark.usefixtures("stand_in")
def test_settings_become_arguments_and_variables_that_override_them_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("VLLM_API_KEY", "from outside")
    settings = Serving(max_model_len=512, kv_cache_mib=64, tensor_parallel_size=2, enforce_eager=True)
    on_gpu = ["--gpu-memory-utilization", "0.9"] if serves_on_gpu() else []
    assert engine_arguments(settings, tmp_path) == [
        *("--dtype", "bfloat16" if on_gpu else cpu_dtype(processor())),
        *("--max-model-len", "512"),
        *on_gpu,
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--tensor-parallel-size", "2"),
        "--enforce-eager",
    ]
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"} & environment().keys()


@pytest.mark.usefixtures("stand_in")
def test_another_version_of_vllm_is_started_in_its_own_environment(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = engine_of("9.9.9").directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "of its own, $VLLM_CACHE_ROOT"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stand_in_variant(store, "fp16")
    settings = QUICK.model_copy(update={"engine_version": "9.9.9"})
    spec = ServerSpec(store.optimized("fp16"), NAME, settings, tmp_path / "vllm.log")
    with running(spec):
        assert f"of its own, {tmp_path}/slipway/vllm-9.9.9" in spec.log.read_text()
    with running(replace(spec, settings=QUICK, log=tmp_path / "other.log")) as server:
        assert "of its own" not in server.log.path.read_text()


@pytest.mark.skipif(not OPENMP.exists(), reason="vLLM's build for GPUs comes without it")
def test_a_server_that_speculates_on_a_processor_gets_intels_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/own.so")
    assert environment()["LD_PRELOAD"] == "/own.so"
    preloaded = environment(settings=Serving(speculation=Speculation(method="ngram")))["LD_PRELOAD"]
    assert preloaded == f"{OPENMP}:/own.so"
    libraries = "print([line for line in open('/proc/self/maps') if 'libiomp5' in line])"
    ran = subprocess.run(
        [sys.executable, "-c", libraries],
        env={"LD_PRELOAD": str(OPENMP)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(OPENMP) in ran.stdout


@pytest.mark.skipif(processor() is None, reason="the arithmetic is chosen on x86 processors alone")
@pytest.mark.parametrize(
    ("limit", "quantization", "dtype"),
    [
        ("AVX2", None, "float32"),
        ("AVX2", "compressed-tensors", "float32"),
        ("AVX2", "gptq", "bfloat16"),
        ("AVX512_CORE", "awq", "bfloat16"),
        ("AVX512_CORE", None, "float32"),
    ],
)
def test_without_bf16_arithmetic_vllm_serves_float32_where_the_format_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, quantization: str | None, dtype: str
) -> None:
    monkeypatch.setenv(LIMIT, limit)
    group = {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}
    method = {"quant_method": quantization, "bits": 4, "group_size": 128, "config_groups": {"group_0": group}}
    told = {"quantization_config": method} if quantization else {}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert engine_arguments(Serving(), tmp_path, on_gpu=False)[:2] == ["--dtype", dtype]
    for chosen in ("float16", "float32"):
        assert engine_arguments(Serving(dtype=chosen), tmp_path, on_gpu=False)[:2] == ["--dtype", chosen]


@pytest.mark.parametrize(
    ("config", "capability", "dtype"),
    [
        ({"dtype": "bfloat16"}, 9.0, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, 8.0, "bfloat16"),
        ({"dtype": "bfloat16"}, 7.5, "float16"),
        ({"dtype": "bfloat16"}, None, "bfloat16"),
        ({"dtype": "float16"}, 9.0, "float16"),
        ({"text_config": {"dtype": "float16"}}, 9.0, "float16"),
        ({}, 9.0, "bfloat16"),
    ],
)
def test_a_gpu_serves_a_model_in_the_type_that_it_is_stored_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], capability: float | None, dtype: str
) -> None:
    monkeypatch.setattr("stages.parts.vllm.arguments.compute_capability", lambda: capability)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine_arguments(Serving(), tmp_path, on_gpu=True)[:2] == ["--dtype", dtype]
    for chosen in ("float16", "bfloat16", "float32"):
        assert engine_arguments(Serving(dtype=chosen), tmp_path, on_gpu=True)[:2] == ["--dtype", chosen]


@pytest.fixture
def _twelve_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU whose logical CPUs are cores of their own."""
    monkeypatch.setattr("stages.parts.vllm.arguments.serves_on_gpu", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr("stages.parts.vllm.arguments.core_parts", partial(core_parts, cpus=tmp_path))
    monkeypatch.delenv(BINDING, raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.usefixtures("_twelve_cores")
def test_without_a_gpu_two_servers_compute_on_different_cores() -> None:
    assert [core_binding(Serving(), half) for half in (0, 1)] == ["0,1,2,3,4", "6,7,8,9,10"]
    several = [core_binding(Serving(replicas=2), half, replica) for half in (0, 1) for replica in (0, 1)]
    assert several == ["0,1", "3,4", "6,7", "9,10"]


@pytest.mark.usefixtures("_twelve_cores")
@pytest.mark.parametrize("replicas", [3, 6, 7])
def test_a_server_with_a_single_core_has_one_thread(replicas: int) -> None:
    assert core_binding(Serving(replicas=replicas)) == ONE_THREAD


@pytest.mark.usefixtures("_twelve_cores")
@pytest.mark.parametrize(("cores", "binding"), [(2, ONE_THREAD), (4, "")])
def test_a_pod_on_a_node_of_two_cores_has_one_thread(monkeypatch: pytest.MonkeyPatch, cores: int, binding: str) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert core_binding(Serving(replicas=3)) == binding


@pytest.mark.usefixtures("_twelve_cores")
@pytest.mark.parametrize("reason", ["tensor parallelism", "a pod", "a GPU"])
def test_vllm_itself_chooses_the_cores_of(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_binding(Serving())
    if reason == "a pod":
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    elif reason == "a GPU":
        monkeypatch.setattr("stages.parts.vllm.arguments.serves_on_gpu", lambda: True)
    assert core_binding(Serving(tensor_parallel_size=2 if reason == "tensor parallelism" else 1)) == ""


@pytest.mark.usefixtures("_twelve_cores")
def test_a_binding_from_outside_is_kept_and_a_servers_own_is_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert environment(binding="4,5")[BINDING] == "4,5"
    assert BINDING not in environment()
    monkeypatch.setenv(BINDING, "auto")
    assert [core_binding(Serving(), half) for half in (0, 1)] == ["auto", "auto"]


@pytest.mark.usefixtures("stand_in")
def test_a_server_is_up_once_it_has_answered_and_gone_once_the_block_is_left(store: ModelStore, tmp_path: Path) -> None:
    stand_in_variant(store, "fp16")
    with running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log", api_key="secret")) as server:
        assert healthy(server.url)
        assert answer(server.url, NAME, "secret") == "!"
        with pytest.raises(ServerFailed, match="401"):
            answer(server.url, NAME)
        assert server.max_model_len() == 1024
        assert server.startup_log.facts().kv_cache_tokens == 1024
        family = processes_with(NAME)
        assert not any("secret" in argument for process in family for argument in process.cmdline())
    assert family
    assert not living(family)
    assert not healthy(server.url)


@pytest.mark.usefixtures("stand_in")
def test_an_error_in_the_block_also_stops_the_server(store: ModelStore, tmp_path: Path) -> None:
    stand_in_variant(store, "fp16")
    family: list[psutil.Process] = []

    def use() -> None:
        with running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")):
            family.extend(processes_with(NAME))
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        use()
    assert family
    assert not living(family)


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_is_never_ready_is_stopped_after_its_time(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_variant(store, "fp16", never_ready=True)
    log = tmp_path / "vllm.log"

    def clock() -> float:
        return time.monotonic() + (60 if log.exists() and "still loading" in log.read_text() else 0)

    monkeypatch.setattr("stages.parts.vllm.server.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with (
        pytest.raises(ServerFailed, match="not ready after 60 s; its last line: still loading") as raised,
        running(ServerSpec(store.optimized("fp16"), NAME, QUICK, log)),
    ):
        pass
    assert "startup_timeout_s" in raised.value.hint
    assert not processes_with(NAME)


@pytest.mark.usefixtures("stand_in")
def test_an_interruption_while_the_watcher_starts_leaves_no_thread(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the interrupted process from ending."""
    stand_in_variant(store, "fp16")
    start, before = threading.Thread.start, threading.active_count()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    spec = ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")
    with pytest.raises(KeyboardInterrupt), running(spec, threading.Event()):
        pass
    assert threading.active_count() == before
    assert not processes_with(NAME)


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_is_healthy_but_cannot_complete_is_not_ready(store: ModelStore, tmp_path: Path) -> None:
    stand_in_variant(store, "fp16", refuses="NaN in the logits")
    with (
        pytest.raises(ServerFailed, match="refused a completion: 500 NaN in the logits"),
        running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")),
    ):
        pass
    assert not processes_with(NAME)


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_dies_later_is_noticed_with_its_reason(store: ModelStore, tmp_path: Path) -> None:
    stand_in_variant(store, "fp16", ends_when_checked=True)
    with running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")) as server:
        assert not healthy(server.url)
        server.process.wait(60)
        with pytest.raises(ServerFailed, match="vLLM ended: RuntimeError: out of luck"):
            server.check_alive()


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_is_killed_is_distinguished_from_one_that_failed(store: ModelStore, tmp_path: Path) -> None:
    stand_in_variant(store, "fp16")
    with running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")) as server:
        with server.log.path.open("a") as log:
            log.write("(EngineCore pid=1) Shutdown trigger received signal=SIGTERM\n")  # as the engine may end after it
        processes_with(NAME)[-1].kill()
        server.process.wait(60)
        with pytest.raises(ServerKilled, match="API server was ended by SIGKILL while it served StandIn") as raised:
            server.check_alive()
    assert "memory" in raised.value.hint


DIES_IN_LOADING = {
    "killed": (
        "kill -KILL $$",
        ServerKilled,
        "vLLM's EngineCore was ended by SIGKILL while it loaded StandInForCausalLM",
    ),
    "crashed": (
        "kill -SEGV $$",
        ServerFailed,
        "vLLM's EngineCore was ended by SIGSEGV while it loaded StandInForCausalLM",
    ),
    "failed": ("echo 'ValueError: no kernel'; exit 1", ServerFailed, "vLLM ended: ValueError: no kernel"),
    "ended without a word": (
        "exit 1",
        ServerKilled,
        "vLLM's EngineCore ended without an error in its log while it loaded StandInForCausalLM",
    ),
}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("engine", "kind", "message"), DIES_IN_LOADING.values(), ids=DIES_IN_LOADING)
def test_a_server_whose_engine_dies_while_it_loads_is_not_waited_for(
    store: ModelStore, tmp_path: Path, engine: str, kind: type[SlipwayError], message: str
) -> None:
    stand_in_variant(store, "fp16", never_ready=True, engine=f"sleep 1; {engine}")
    started = time.monotonic()
    with (
        pytest.raises(kind) as raised,
        running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")),
    ):
        pass
    assert str(raised.value) == message
    assert time.monotonic() - started < DEAD_WITHIN_S
    assert not processes_with(NAME)


@pytest.mark.usefixtures("stand_in")
def test_a_server_whose_engine_is_killed_later_has_failed_although_its_api_answers(
    store: ModelStore, tmp_path: Path
) -> None:
    stand_in_variant(store, "fp16", engine="sleep 1000")
    with running(ServerSpec(store.optimized("fp16"), NAME, QUICK, tmp_path / "vllm.log")) as server:
        server.check_alive()
        (engine,) = [each for each in processes_with(NAME) if "sleep 1000" in each.cmdline()]
        engine.kill()
        with pytest.raises(ServerKilled, match="EngineCore was ended by SIGKILL while it served StandIn"):
            wait_until(server.check_alive, "the death")
        assert healthy(server.url)


@pytest.mark.usefixtures("stand_in")
def test_a_refusal_of_a_dead_engine_is_explained_by_its_log(store: ModelStore, tmp_path: Path) -> None:
    said = (DEATHS / "missing_kernel.log").read_text()
    log = tmp_path / "vllm.log"
    stand_in_variant(store, "fp16", refuses="EngineCore encountered an issue", says=said)
    with (
        pytest.raises(ServerFailed, match=r"^vLLM ended: AttributeError: .* no attribute 'cpu_gemm_wna16'$"),
        running(ServerSpec(store.optimized("fp16"), NAME, QUICK, log)),
    ):
        pass


@pytest.mark.e2e
def test_a_vllm_whose_engine_is_killed_while_it_starts_is_not_waited_for(store: ModelStore, tmp_path: Path) -> None:
    variant_of(store, "fp16", DEMO / "model")
    log = tmp_path / "vllm.log"
    killed_at: list[float] = []

    def kill_the_engine() -> None:
        engine = re.compile(r"^\(EngineCore pid=(\d+)\)", re.MULTILINE)
        (pid,) = wait_until(lambda: log.exists() and engine.findall(log.read_text())[:1], "the engine's first line")
        os.kill(int(pid), signal.SIGKILL)
        killed_at.append(time.monotonic())

    with ThreadPoolExecutor() as threads:
        killing = threads.submit(kill_the_engine)
        with (
            pytest.raises(ServerKilled, match=r"^vLLM's EngineCore .*ended .* while it loaded LlamaForCausalLM$"),
            running(ServerSpec(store.optimized("fp16"), NAME, Serving(**SERVING), log)),
        ):
            pass
        killing.result()
    assert time.monotonic() - killed_at[0] < DEAD_WITHIN_S
    assert not processes_with(NAME)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_model_that_vllm_cannot_load_fails_with_vllm_s_reason(store: ModelStore, tmp_path: Path) -> None:
    variant_of(store, "broken", DEMO / "model", num_attention_heads=3)
    log = tmp_path / "vllm.log"
    with (
        pytest.raises(ServerFailed, match=r"vLLM ended: ValueError: The hidden size .* number of attention") as raised,
        running(ServerSpec(store.optimized("broken"), NAME, Serving(**SERVING), log)),
    ):
        pass
    assert raised.value.hint == f"see {log}"
    assert not processes_with(NAME)


def test_the_cache_is_where_the_user_chose_or_in_our_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    assert environment()["VLLM_CACHE_ROOT"].startswith("/cache/slipway/vllm-")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert environment()["VLLM_CACHE_ROOT"] == "/elsewhere"
    assert os.environ.keys() - environment().keys() <= {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"}


def test_the_server_keeps_an_idle_connection_longer_than_the_load_generator() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("the evaluate extra is not installed")
    client = Path(found.submodule_search_locations[0], "benchmarks", "serve.py").read_text()
    (kept_s,) = map(int, re.findall(r"keepalive_timeout=(\d+)", client))
    assert int(environment()["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > kept_s
