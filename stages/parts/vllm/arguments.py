"""How vLLM is started: its arguments, environment, cores and GPUs, of which there must be enough for all replicas."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from scoring.units import MIB
from stages.parts.base.errors import ConfigError, UnusableModel
from stages.parts.base.files import write_json
from stages.parts.base.formats import FORMATS
from stages.parts.base.program import without_secrets
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.environment import engine_of, installed, user_cache
from stages.parts.machine.hardware import compute_capability, core_parts, cpu_dtype, gpu_ids, gpus, hardware, processor
from stages.parts.model.adapter import CONFIG, WEIGHTS, changed_layers, max_lora_rank
from stages.parts.model.checkpoint import config_in, sees, stated
from stages.parts.model.published import format_of
from stages.parts.model.safetensors import read_header
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.parsers import parser_arguments

Answer = TypeVar("Answer", dict[str, str], list[str])

VLLM: Final = "vllm.entrypoints.cli.main"
"""The module of the ``vllm`` command."""
KEEP_ALIVE_S: Final = 90
"""Longer than ``vllm bench`` keeps an idle connection (60 s): a request that is sent as the server closes its
connection fails. vLLM's default is 5 s."""
BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
ONE_THREAD: Final = "one thread"
"""Where a server has no more; see ``core_binding``."""
IN_ONE_PROCESS: Final = ("--distributed-executor-backend", "uni")
"""The model runs in the process of vLLM's scheduler."""
CPU_KV_CACHE_MIB: Final = 1024
GPU_ARGUMENT: Final = "--gpu-memory-utilization"
"""Only a server on a GPU has it."""
TEXT_ONLY: Final = "--language-model-only"
BFLOAT16_CAPABILITY: Final = 8.0
"""NVIDIA's Ampere; older GPUs have no bfloat16 arithmetic."""
INTEL_OPENMP: Final = "lib/libiomp5.so"
"""In an environment; comes with vLLM's CPU build, which speculates slowly with PyTorch's own OpenMP, and says so."""
FOR_CLIENTS: Final = (
    *("--enable-force-include-usage", "--enable-prompt-tokens-details"),
    *("--scheduling-policy", "priority"),
)
"""Every answer, and every event of a streamed one, tells the tokens that were used so far; clients have priorities."""


def engine_arguments(settings: Serving, model: Path, *, on_gpu: bool | None = None) -> list[str]:
    """List the arguments of ``vllm serve`` that decide how it serves.

    Args:
        model: the directory that it will serve.
        on_gpu: whether it will serve on a GPU; None: as this machine does.

    Raises:
        ConfigError: an extra argument would expose a secret in the process list.
    """
    if any(extra_argument.replace("_", "-").startswith("--api-key") for extra_argument in settings.extra_arguments):
        raise ConfigError(
            "an API key in serving.extra_arguments would be visible in the process list", hint="set SLIPWAY_API_KEY"
        )
    on_gpu = serves_on_gpu() if on_gpu is None else on_gpu
    kv_cache_mib = settings.kv_cache_mib or (None if on_gpu else CPU_KV_CACHE_MIB)
    values = {
        "--dtype": served_dtype(settings, model, on_gpu=on_gpu),
        "--max-model-len": settings.max_model_len,
        GPU_ARGUMENT: settings.gpu_memory_utilization if on_gpu else None,
        "--kv-cache-memory-bytes": kv_cache_mib and kv_cache_mib * MIB,
        "--tensor-parallel-size": settings.tensor_parallel_size if settings.tensor_parallel_size > 1 else None,
        "--kv-cache-dtype": settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else None,
        "--speculative-config": settings.speculation and settings.speculation.model_dump_json(exclude_none=True),
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--max-num-queued-tokens": settings.max_queued_tokens,
    }
    flags = {"--enforce-eager": settings.enforce_eager, TEXT_ONLY: settings.text_only}
    arguments = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    arguments += [name for name, given in flags.items() if given]
    return [*arguments, *parser_arguments(settings, model), *settings.extra_arguments]


def takes_pictures(settings: Serving, model: Path) -> bool:
    """Whether the model in a directory sees, and its server is not told to take no pictures."""
    arguments = " ".join(settings.extra_arguments).replace("_", "-")
    limited = settings.text_only or any(each in arguments for each in (TEXT_ONLY, "--limit-mm-per-prompt"))
    return sees(config_in(model)) and not limited


def served_dtype(settings: Serving, model: Path, *, on_gpu: bool) -> str:
    """``settings.dtype``, and what *auto* means for the checkpoint in the directory *model* on this machine."""
    if settings.dtype != "auto":
        return settings.dtype
    config = config_in(model)
    if on_gpu:
        capability = compute_capability()
        able = capability is None or capability >= BFLOAT16_CAPABILITY
        # Transformers 5 calls it ``dtype``, earlier ones ``torch_dtype``.
        return "bfloat16" if able and stated(config, "dtype", "torch_dtype") != "float16" else "float16"
    variant = Variant.read_if_intact(model / VARIANT)
    method = variant.method if variant else ""
    if method not in FORMATS:
        with contextlib.suppress(UnusableModel):
            method = format_of(config).name
    only_16_bit = method not in FORMATS or FORMATS[method].only_16_bit
    return "bfloat16" if only_16_bit else cpu_dtype(processor())


def serves_on_gpu() -> bool:
    """Whether vLLM will use a GPU: there is one, and the installed vLLM is not the CPU build."""
    return not installed_version("vllm").endswith("+cpu") and bool(gpus())


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """Read what follows an argument of ``vllm serve``, if it is among them."""
    return arguments[arguments.index(name) + 1] if name in arguments[:-1] else None


def installed_version(tool: str, extra: str = "evaluate") -> str:
    """Find the version of *tool*, a package of our *extra*. Raises: ConfigError: it is not installed."""
    if not (version := installed(tool)):
        raise ConfigError(f"{tool} is not installed", hint=f"pip install 'slipway[{extra}]'")
    return version


def core_binding(settings: Serving, half: int = 0, replica: int = 0) -> str:
    """Choose the cores for a server's threads without a GPU, such as ``0,1,2``; ``ONE_THREAD``; or empty where
    vLLM chooses.

    vLLM itself would bind the threads of every server to the same cores, where they starve each other by turns. A
    release and its canary have half of the cores each, which their replicas share out; an evaluation gets as many as a
    replica will. vLLM chooses with tensor parallelism, which uses a NUMA node for each part, and where a pod has more
    than one. A server of one thread runs the model in the process of its scheduler and is not bound: vLLM's worker
    process and its scheduler wait for each other by calling sched_yield without end, which on two cores takes half of
    the speed and keeps all other processes, clients too, waiting for up to seconds.
    """
    if binding := os.environ.get(BINDING):
        return binding
    if settings.tensor_parallel_size > 1 or serves_on_gpu():
        return ""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    parts = core_parts(1 if in_pod else 2 * settings.replicas)
    cores = parts[half * settings.replicas + replica] if parts else ()
    if len(cores) <= 1:
        return ONE_THREAD
    return "" if in_pod else ",".join(map(str, cores))


def threads(binding: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables and the arguments that make a server's threads those of ``core_binding``."""
    if binding == ONE_THREAD:
        # With several processes allowed, vLLM on a CPU replaces IN_ONE_PROCESS by its default.
        return {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, IN_ONE_PROCESS
    return {BINDING: binding} if binding else {}, ()


def vllm(version: str = "") -> list[str]:
    """Return the ``vllm`` command of a version, whether or not it is on PATH. Raises: NotInstalled."""
    return [engine_of(version).python(), "-m", VLLM]


def environment(
    api_key: str = "", binding: str = "", devices: str = "", settings: Serving | None = None
) -> dict[str, str]:
    """vLLM's environment: offline, without usage statistics, with a cache of its own, and with the API key, which the
    process list does not show."""
    variables, version = without_secrets(os.environ), settings.engine_version if settings else ""
    speculates = settings is not None and settings.speculation
    if speculates and (openmp := Path(vllm(version)[0]).parents[1] / INTEL_OPENMP).exists():
        variables["LD_PRELOAD"] = f"{openmp}:{variables.get('LD_PRELOAD', '')}".rstrip(":")
    # It counts whole GiB, and would override --kv-cache-memory-bytes.
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_LOGGING_LEVEL": "INFO",  # server_log.py reads it
        "VLLM_CONFIGURE_LOGGING": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # the log tells a crash from a kill
    }
    variables.setdefault("VLLM_CACHE_ROOT", str(cache_folder(version)))
    if api_key:
        variables["VLLM_API_KEY"] = api_key
    variables |= threads(binding)[0]
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    return variables


def lora_arguments(adapters: Mapping[str, Path], mounted: Path | None = None) -> list[str]:
    """List the arguments of ``vllm serve`` for adapters, directories by name; none without any. *mounted*: the folder
    where the server will find them, if not there."""
    if not adapters:
        return []
    configs = [json.loads((path / CONFIG).read_bytes()) for path in adapters.values()]
    # As JSON: a path may have a comma.
    modules = [
        json.dumps({"name": name, "path": str(mounted / name if mounted else path)}) for name, path in adapters.items()
    ]
    sizes = ["--max-loras", str(len(adapters)), "--max-lora-rank", str(max(map(max_lora_rank, configs)))]
    # Without the head, for which vLLM would fail to compute the log-probabilities of prompts.
    layers = sorted({layer for path in adapters.values() for layer in changed_layers(read_header(path / WEIGHTS))})
    return ["--enable-lora", *sizes, "--lora-target-modules", *layers, "--lora-modules", *modules]


def cache_folder(version: str = "") -> Path:
    """Name the folder for what is kept for a version of vLLM, in the user's cache."""
    return user_cache() / f"vllm-{engine_of(version).version('vllm') if version else installed_version('vllm')}"


def asked_once(name: str, ask: Callable[[], Answer]) -> Answer:
    """Return what *ask* returns. It asks vLLM, which takes seconds to import, so the file *name* keeps the answer."""
    kept = cache_folder() / f"{name}.json"
    try:
        answer: Answer = json.loads(kept.read_text())
    except (OSError, ValueError):
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
            answer = ask()
        write_json(kept, answer)
    return answer


def gpu_groups(serving: Serving) -> list[str]:
    """List groups of ``tensor_parallel_size`` GPUs of one kind, as ``CUDA_VISIBLE_DEVICES``: a single empty one if
    servers use what there is: without GPUs, with too few, or with GPUs that differ."""
    return groups(gpu_ids(), gpus(), serving.tensor_parallel_size) if serves_on_gpu() else [""]


def groups(ids: Sequence[str], kinds: Sequence[str], size: int) -> list[str]:
    """See ``gpu_groups``; *kinds* are the GPUs' names and memory, in the order of *ids*."""
    if len(set(kinds)) > 1 or len(ids) != len(kinds) or len(ids) < 2 * size:
        return [""]
    return [",".join(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]


def gpus_of(serving: Serving, replica: int) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` of a replica; empty without GPUs, and for a single replica."""
    return gpu_groups(serving)[replica] if serving.replicas > 1 and serves_on_gpu() else ""


def check_replicas(serving: Serving) -> None:
    """Refuse, with ConfigError, more replicas than there are GPUs for, or without GPUs cores."""
    count, size = serving.replicas, serving.tensor_parallel_size
    if count == 1:
        return
    if serves_on_gpu():
        if len(gpu_groups(serving)) < count:
            raise ConfigError(
                f"serving.replicas: {count} servers need {count * size} GPUs of one kind, {size} each; "
                f"this machine has {', '.join(gpus())}",
                hint="lower serving.replicas",
            )
    elif size > 1:
        raise ConfigError(
            "serving.replicas: without GPUs, servers with tensor parallelism use all of the machine",
            hint="set serving.replicas=1, or serving.tensor_parallel_size=1",
        )
    elif BINDING not in os.environ and core_parts(2 * count) is None:
        raise ConfigError(
            f"serving.replicas: {count} servers of a release and {count} of its canary need {2 * count} cores; this "
            f"machine has {hardware().cores}",
            hint=f"lower serving.replicas, or say in {BINDING} how vLLM is to bind the threads of all servers",
        )
