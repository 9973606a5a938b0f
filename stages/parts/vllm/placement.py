"""Which GPUs the servers of this machine get, and whether there are enough for all replicas of a release."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.hardware import core_parts, gpu_ids, gpus, hardware
from stages.parts.vllm.arguments import BINDING, serves_on_gpu


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
