"""awq and gptq: 4-bit weights by GPTQModel (https://github.com/ModelCloud/GPTQModel), on a GPU or a CPU.

It runs in a separate process (``gptqmodel_job``), because a failure in one of its threads ends the whole process. Of a
model that sees or hears it gets the language part. The variant keeps the weights that it writes, under the publisher's
names, and its description of how they are quantized. All others come unchanged from the base, and so do other files,
such as ``config.json`` and the tokenizer, because transformers would rewrite them.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from scoring.capacity.storage import DEFAULT_GROUP_SIZE, Scales, Storage
from stages.optimize.base_model import BLOCK_WEIGHT, MAX_16_BIT_SHARE, Base
from stages.optimize.gptqmodel_job import BITS, KIND, RESULT, SAVED, QuantizationJob, QuantizationResult
from stages.optimize.language_part import LanguagePart, language_part
from stages.optimize.shards import check_stated, kept_dtype, read_weights, write_config, write_index, write_tensors
from stages.parts.base.errors import ConfigError, QuantizationFailed
from stages.parts.base.formats import Format, Kernel, Peak
from stages.parts.base.log import say
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import write_json
from stages.parts.machine.hardware import cpu_dtype, gpus, no_gpu, processor
from stages.parts.machine.process import Contained
from stages.parts.model.checkpoint import CONFIG, SINGLE, why_not_quantized
from stages.parts.model.corpora import read_documents, text_path
from stages.parts.model.safetensors import FLOATS, Tensor, read_header

GROUP_SIZES: Final = (128, 64, 32)
WIDTH: Final = 4096
PACK_BITS: Final = 32
PARTS: Final = ("qweight", "qzeros", "scales")
QUANTIZE_CONFIG: Final = "quantize_config.json"
SHARD: Final = "model-{:05}-of-{:05}.safetensors"
INPUT_GROUPS: Final = "g_idx"
"""The number of each input's group, which gptq stores too."""
DERIVED: Final = ("inv_freq", ".attn.masked_bias", ".attn.bias")
"""Buffers in older checkpoints, which libraries now compute and no longer store."""
HEAD: Final = "lm_head.weight"
RECIPE: Final = 2
"""Increased when the same parameters give other files, so that older variants are made again."""
EXCEPTION: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)): *(.*)")
TABLE_LINE: Final = re.compile(r"^INFO +\+[-+]+\+$")


class FourBit:
    """A 4-bit method. *method* is its name in GPTQModel and vLLM."""

    tools: ClassVar[tuple[str, ...]] = ("gptqmodel", "torch", "transformers")
    calibrated: ClassVar[bool] = True

    def __init__(self, method: str, *, symmetric: bool) -> None:
        self.method = method
        self.symmetric = symmetric

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:
        calibration = settings.calibration
        return {
            "bits": BITS,
            "group_size": settings.group_size,
            "symmetric": self.symmetric,
            "dtype": base.half_dtype,
            "calibration_text": Path(calibration.text).name,
            "samples": calibration.samples,
            "sequence_length": sequence_length(settings, base),
            "seed": calibration.seed,
            "recipe": RECIPE,
            **({"linear_layers_computed_in": "float32"} if linear_in_float32() else {}),
        }

    def check(self, settings: Optimize, base: Base) -> None:
        """Check that the calibration text is readable, that the experts are stored one by one, and that the group size
        divides the layers' input widths."""
        read_documents(settings.calibration.text, KIND)
        if why := why_not_quantized(base.tensors):
            raise QuantizationFailed(f"{self.method} cannot quantize {base.architecture}: {why}")
        if misfit := first_misfit(base, settings.group_size):
            fitting = [size for size in GROUP_SIZES if not first_misfit(base, size)]
            raise QuantizationFailed(
                f"{self.method} cannot quantize {base.architecture}: the group size {settings.group_size} does not "
                f"divide the {base.linear_weights[misfit].shape[1]} inputs of {misfit}",
                hint=f"set group_size to {fitting[0]}" if fitting else "no group size fits this model",
            )

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        calibration = settings.calibration
        text = text_path(calibration.text, KIND).absolute()
        with tempfile.TemporaryDirectory(dir=target, prefix=".gptqmodel-") as name:
            folder = Path(name)
            job = QuantizationJob(
                method=self.method,
                base=base.directory.absolute(),
                folder=folder.absolute(),
                symmetric=self.symmetric,
                dtype=base.half_dtype,
                linear_in_float32=linear_in_float32(),
                group_size=settings.group_size,
                calibration=calibration.model_copy(update={"text": str(text)}),
                sequence_length=sequence_length(settings, base),
                part=language_part(base),
            )
            status, last_exception = run(job)
            result = QuantizationResult.read(folder / RESULT)
            if result and result.config_error:
                raise ConfigError(result.config_error, hint=result.hint)
            if result and result.no_gpu:
                raise no_gpu(result.no_gpu)
            if status or not result:
                raise QuantizationFailed(
                    f"{self.method} cannot quantize {base.architecture}: {last_exception or f'it ended with {status}'}",
                    hint="the other variants continue without it; the log above has the traceback",
                )
            take(folder / SAVED, target, base, job.part)
        return Peak(result.peak_resident_bytes, result.peak_gpu_bytes)

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:
        """Check that the decoder's linear layers are packed, and that ``config.json`` agrees with them."""
        bits = check_quantized(base, read_weights(directory), parameters["group_size"])
        stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
        group_size = parameters["group_size"]
        check_stated(stated, {"quant_method": self.method, "bits": bits, "group_size": group_size})
        return bits


def first_misfit(base: Base, group_size: int) -> str:
    """Find a linear layer whose input width *group_size* does not divide; empty if there are no or few such layers."""
    weights = base.linear_weights
    misfits = [name for name, tensor in weights.items() if tensor.shape[1] % group_size]
    share = sum(weights[name].count for name in misfits) / max(1, sum(tensor.count for tensor in weights.values()))
    return misfits[0] if share > MAX_16_BIT_SHARE else ""


def linear_in_float32() -> bool:
    """Whether quantizing computes linear layers in float32: without a GPU, on a processor that has no bf16."""
    return cpu_dtype(processor()) == "float32" and not gpus()


def sequence_length(settings: Optimize, base: Base) -> int:
    """Tokens per calibration sequence: as in the settings, but not more than the model's maximum position."""
    positions = base.setting("max_position_embeddings")
    longest = settings.calibration.sequence_length
    return min(longest, positions) if isinstance(positions, int) and positions > 0 else longest


def run(job: QuantizationJob) -> tuple[int, str]:
    """Run the job in a process that ends when this one does, and print its output on stderr.

    Returns the exit status, and the last exception in the output, as ``TypeName: first line``.
    """
    job.write(job.folder / "job.json")
    command = [sys.executable, "-m", "stages.optimize.gptqmodel_job", str(job.folder / "job.json")]
    last_exception = ""
    # GPTQModel writes logs to the working directory.
    with (
        Contained(command, output=subprocess.PIPE, environment=environment(), directory=job.folder) as process,
        io.TextIOWrapper(process.output, encoding="utf-8", errors="replace") as output,
    ):
        for line in map(str.rstrip, output):
            if exception := EXCEPTION.match(line):
                last_exception = f"{exception[1]}: {exception[2]}"
            if line and not TABLE_LINE.match(line):
                say(line)
        return process.wait(), last_exception


def environment() -> dict[str, str]:
    """Set the environment variables that GPTQModel and the Hub's libraries read when they are imported."""
    return {
        **os.environ,
        "GPTQMODEL_CPU_WORKERS": str(max(2, len(os.sched_getaffinity(0)))),  # its thread pool may crash with one worker
        "GPTQMODEL_DISABLE_PACK_EXT": "1",  # a packer that g++ compiles; the result is the same without it
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TERM": "dumb",  # no progress bars: they fill a log with control characters
        "COLUMNS": "160",  # wide enough for its tables
        "PYTHONUNBUFFERED": "1",
    }


def take(saved: Path, target: Path, base: Base, part: LanguagePart | None) -> None:
    """Write to *target* what the variant keeps of GPTQModel's output, with the base's weights that it does not have."""
    content = json.loads((saved / QUANTIZE_CONFIG).read_bytes())
    # The name of a temporary folder, which would make every build differ.
    content.get("meta", {}).pop("offload_to_disk_path", None)
    write_json(target / QUANTIZE_CONFIG, content)
    stated = json.loads((saved / CONFIG).read_bytes())["quantization_config"]
    stated.get("meta", {}).pop("offload_to_disk_path", None)
    write_config(base, target, base.half_dtype, quantization_config=stated)
    shards = [read_header(path) for path in sorted(saved.glob("*.safetensors"))]
    if part:
        shards = [{part.published(name): tensor for name, tensor in shard.items()} for shard in shards]
    rest = unread(base, {name for shard in shards for name in shard})
    shards += [rest] if rest else []
    for number, shard in enumerate(shards, 1):
        path = target / (SHARD.format(number, len(shards)) if len(shards) > 1 else SINGLE)
        if part or shard is rest:
            dtypes = {name: kept_dtype(base, tensor) for name, tensor in rest.items()}
            write_tensors(path, shard, dtypes if shard is rest else {})
        else:
            shutil.move(next(iter(shard.values())).path, path)
    if len(shards) > 1:
        write_index(target)


def unread(base: Base, names: Collection[str]) -> dict[str, Tensor]:
    """Find the base's tensors that are in none of the layers that GPTQModel reads: those of other parts, and of layers
    beyond the decoder's, which draft tokens."""
    layers, decoder = base.setting("num_hidden_layers"), next(iter(base.linear_weights), "")
    blocks = BLOCK_WEIGHT.match(decoder)
    read = f"{blocks[1]}." if blocks else ""

    def beyond(name: str) -> bool:
        number = name.removeprefix(read).partition(".")[0]
        return number.isdigit() and isinstance(layers, int) and int(number) >= layers

    return {
        name: tensor
        for name, tensor in base.tensors.items()
        if name not in names and (beyond(name) if name.startswith(read) else not is_derived(base, name))
    }


def is_derived(base: Base, name: str) -> bool:
    """Whether a tensor of the base is computed from others: a buffer, or a head that is the embedding."""
    return name.endswith(DERIVED) or (name.endswith(HEAD) and bool(base.setting("tie_word_embeddings")))


@dataclass(frozen=True)
class Packed:
    """One quantized layer, as the shapes of its tensors describe it."""

    bits: int
    group_size: int
    inputs: int
    outputs: int


def check_quantized(base: Base, tensors: Mapping[str, Tensor], group_size: int) -> int:
    """Check that all layers of the base are there, the decoder's linear layers packed. Returns the bits per weight."""
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    packed = {f"{layer}.weight": read_packed(layer, tensors) for layer in layers}
    for name, layer in packed.items():
        if name in base.tensors and {layer.inputs, layer.outputs} != set(base.tensors[name].shape):
            raise ValueError(
                f"{name} was {list(base.tensors[name].shape)} and is now [{layer.outputs}, {layer.inputs}]"
            )
        if layer.group_size != group_size:
            raise ValueError(f"{name} has groups of {layer.group_size}, not {group_size}")
    check_complete(base, tensors, packed)
    quantized = sum(layer.inputs * layer.outputs for layer in packed.values())
    total = sum(tensor.count for tensor in base.linear_weights.values())
    if quantized < (1 - MAX_16_BIT_SHARE) * total or not quantized:
        raise ValueError(f"only {quantized / max(1, total):.0%} of the linear layers' weights are quantized")
    bits = {layer.bits for layer in packed.values()}
    if len(bits) > 1:
        raise ValueError(f"the layers differ in bits: {sorted(bits)}")
    return bits.pop()


def read_packed(layer: str, tensors: Mapping[str, Tensor]) -> Packed:
    """Read a layer from the shapes of scales (groups, outputs), qzeros (groups, outputs·bits/32) and qweight, which is
    (inputs·bits/32, outputs) in gptq's layout and (inputs, outputs·bits/32) in awq's."""
    missing = [part for part in PARTS if f"{layer}.{part}" not in tensors]
    if missing:
        raise ValueError(f"{layer}.{missing[0]} is missing")
    weight, zeros, scales = (tensors[f"{layer}.{part}"] for part in PARTS)
    if (weight.dtype, zeros.dtype, scales.dtype in FLOATS) != ("I32", "I32", True):
        raise ValueError(f"{layer} is packed as {weight.dtype}, {zeros.dtype} and {scales.dtype}")
    groups, outputs = scales.shape
    bits = zeros.shape[1] * PACK_BITS // outputs
    inputs = weight.shape[0] if weight.shape[1] < outputs else weight.shape[0] * PACK_BITS // max(1, bits)
    if zeros.shape[0] != groups or weight.count * PACK_BITS != inputs * outputs * bits or not groups:
        raise ValueError(f"{layer}: qweight, qzeros and scales don't belong together")
    return Packed(bits, inputs // groups, inputs, outputs)


def check_complete(base: Base, tensors: Mapping[str, Tensor], packed: Mapping[str, Packed]) -> None:
    """Check that no tensor of the base is missing or renamed: vLLM finds weights by the publisher's names."""
    for name, original in base.tensors.items():
        if name not in tensors and name not in packed and not is_derived(base, name):
            raise ValueError(f"{name} is missing")
        if name in tensors and tensors[name].shape != original.shape:
            raise ValueError(f"{name} was {list(original.shape)} and is now {list(tensors[name].shape)}")
    parts = {f"{name.removesuffix('weight')}{part}" for name in packed for part in (*PARTS, INPUT_GROUPS)}
    for name in sorted(tensors.keys() - base.tensors.keys() - parts | packed.keys() - base.tensors.keys()):
        if not name.endswith((*DERIVED, HEAD)):
            raise ValueError(f"{name} is not a tensor of the model")


def choose_kernel(*, zero_points: bool) -> object:
    """Let vLLM choose its kernel for 4-bit layers of a width that every kernel can divide."""
    import torch
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    return choose_mp_linear_kernel(
        MPLinearLayerConfig(
            full_weight_shape=(WIDTH, WIDTH),
            partition_weight_shape=(WIDTH, WIDTH),
            weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8,
            act_type=torch.bfloat16 if current_platform.has_device_capability(80) else torch.float16,
            group_size=DEFAULT_GROUP_SIZE,
            zero_points=zero_points,
        )
    )


def choose_for_experts(experts: Any, *, zero_points: bool) -> object:
    """Let vLLM choose its kernel for 4-bit experts, as it does when it loads a checkpoint of the method."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import select_wna16_moe_backend
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static, kInt4StaticGroupScale
    from vllm.scalar_type import scalar_types

    size = DEFAULT_GROUP_SIZE
    awq = AutoAWQConfig(BITS, size, zero_point=True, lm_head_quantized=False)
    gptq = AutoGPTQConfig(BITS, size, desc_act=False, is_sym=True, lm_head_quantized=False, dynamic={}, full_config={})
    return select_wna16_moe_backend(
        experts,
        kInt4Static if zero_points else QuantKey(scalar_types.uint4b8, kInt4StaticGroupScale),
        quant_config=awq if zero_points else gptq,
        may_have_zp=zero_points,
        may_have_bias=True,
        allow_tile_padding=True,
    )


def four_bit(method: str, *, symmetric: bool, further: tuple[Scales, ...] = ()) -> Format:
    """Describe a 4-bit format: each group of inputs has a scale and a zero point per output, all of them in the middle
    if it is *symmetric*, and *further* numbers."""
    group = Scales(bits=16, inputs=DEFAULT_GROUP_SIZE, adjustable=True)
    storage = Storage(
        label="4-bit",
        weight_bits=BITS,
        scales=(group, replace(group, bits=BITS), *further),
        capabilities=(7.5, math.inf),  # Marlin's
    )
    kernel = Kernel("cpu_gemm_wna16", partial(choose_kernel, zero_points=not symmetric), avx512=True, experts_amx=True)
    return Format(
        storage,
        FourBit(method, symmetric=symmetric),
        kernel,
        only_16_bit=True,
        choose_for_experts=partial(choose_for_experts, zero_points=not symmetric),
    )


AWQ: Final = four_bit("awq", symmetric=False)
# GPTQ stores the number of each input's group (g_idx), which vLLM drops after loading.
GPTQ: Final = four_bit("gptq", symmetric=True, further=(Scales(bits=32, inputs=1, outputs=None, loaded=False),))
