"""Whether a model's weights fit on the GPUs of one server, so that this is known before minutes of loading."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import Serving
from stages.parts.machine.hardware import MIB, query_gpus

GIB: Final = 1 << 30
PLACED: Final = re.compile(r"--(cpu-offload|pipeline-parallel|tensor-parallel|quantization|load-format)|-[tp]p\b|-q\b")
"""Extra arguments that place weights in another way than is calculated here."""


def check_room(directory: Path, settings: Serving) -> None:
    """Checks only the weights: vLLM itself reports what else does not fit.

    Raises:
        ConfigError: they need more than ``tensor_parallel_size`` GPUs have; the hint says how many are enough.
    """
    memory = [int(line) * MIB for line in query_gpus("memory.total") if line.isdigit()]
    if not memory or PLACED.search(" ".join(settings.extra_arguments).replace("_", "-")):
        return
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    share = min(memory) * settings.gpu_memory_utilization
    if weights <= share * settings.tensor_parallel_size:
        return
    heads = _attention_heads(directory)
    powers = (1 << n for n in range(len(memory).bit_length()))
    enough = next((n for n in powers if n <= len(memory) and weights <= share * n and not heads % n), None)
    raise ConfigError(
        f"the weights need {weights / GIB:.1f} GiB, and serving.gpu_memory_utilization leaves a server "
        f"{share / GIB:.1f} GiB on each of {settings.tensor_parallel_size} GPU(s)",
        hint=f"set serving.tensor_parallel_size={enough}"
        if enough
        else f"the {len(memory)} GPU(s) here are too few for it; see also optimize.variants",
    )


def _attention_heads(directory: Path) -> int:
    """The number of attention heads, which must divide evenly among the GPUs; 0 if the configuration lacks it."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config).get("num_attention_heads", 0))
    return 0
