"""awq and gptq: 4-bit weights by GPTQModel (https://github.com/ModelCloud/GPTQModel), on a GPU or a CPU.

It runs in a separate process, because a failure in one of its threads ends the whole process. Of a model that sees or
hears it gets the language part. The variant keeps the weights that it writes, under the publisher's
names, and its description of how they are quantized. All others come unchanged from the base, and so do other files,
such as ``config.json`` and the tokenizer, because transformers would rewrite them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from scoring.capacity.storage import DEFAULT_GROUP_SIZE, MARLIN, Scales, Storage
from stages.optimize.base_model import BLOCK_WEIGHT, MAX_16_BIT_SHARE, Base
from stages.optimize.job import KIND, SAVED, Examples, QuantizationJob, calibration_of, quantize_apart
from stages.optimize.language_part import LanguagePart
from stages.optimize.shards import check_stated, kept_dtype, read_weights, write_config, write_index, write_tensors
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.files import write_json
from stages.parts.base.formats import Format, Peak
from stages.parts.base.optimize_settings import Optimize
from stages.parts.model.checkpoint import CONFIG, SINGLE, why_not_quantized
from stages.parts.model.corpora import read_documents
from stages.parts.model.safetensors import FLOATS, Tensor, read_header

BITS: Final = 4
BATCH: Final = 4
"""Sequences that run through a layer together. More sequences need more memory and are hardly faster."""
GROUP_SIZES: Final = (128, 64, 32)
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


class FourBit:
    """A 4-bit method. *method* is its name in GPTQModel and vLLM."""

    tools: ClassVar[tuple[str, ...]] = ("gptqmodel", "torch", "transformers")
    calibrated: ClassVar[bool] = True

    def __init__(self, method: str, *, symmetric: bool) -> None:
        self.method = method
        self.symmetric = symmetric

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:
        return {
            "bits": BITS,
            "group_size": settings.group_size,
            "symmetric": self.symmetric,
            "recipe": RECIPE,
            **calibration_of(settings, base),
        }

    def check(self, settings: Optimize, base: Base) -> None:
        """Check that the calibration text is readable, that the experts are stored one by one, and that the group size
        divides the layers' input widths."""
        read_documents(settings.calibration.text, KIND)
        if why := why_not_quantized(base.tensors):
            raise QuantizationFailed(f"{self.method} cannot quantize {base.record.architecture}: {why}")
        if misfit := first_misfit(base, settings.group_size):
            fitting = [size for size in GROUP_SIZES if not first_misfit(base, size)]
            raise QuantizationFailed(
                f"{self.method} cannot quantize {base.record.architecture}: the group size {settings.group_size} "
                f"does not divide the {base.linear_weights[misfit].shape[1]} inputs of {misfit}",
                hint=f"set group_size to {fitting[0]}" if fitting else "no group size fits this model",
            )

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        return quantize_apart(
            *(settings, base, target, partial(take, target=target, base=base)),
            name=self.method,
            quantize=f"{__name__}:quantize",
            method=self.method,
            symmetric=self.symmetric,
            group_size=settings.group_size,
        )

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:
        """Check that the decoder's linear layers are packed, and that ``config.json`` agrees with them."""
        group_size = parameters["group_size"]
        bits = check_quantized(base, read_weights(directory), group_size)
        stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
        check_stated(stated, {"quant_method": self.method, "bits": bits, "group_size": group_size})
        return bits


def quantize(job: QuantizationJob, examples: Examples) -> None:
    """Quantize with GPTQModel, in a process of its own."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    dtype = getattr(torch, job.dtype)
    model = GPTQModel.load(str(job.source), quantize_config(job), dtype=dtype, trust_remote_code=False)
    # AWQ_TORCH only packs, on every device. AUTO selects a kernel that needs nvcc and refuses a CPU.
    backend = BACKEND.AWQ_TORCH if job.method == "awq" else BACKEND.AUTO
    model.quantize(examples, batch_size=BATCH, backend=backend)
    model.save(str(job.folder / SAVED))


def quantize_config(job: QuantizationJob) -> Any:
    """GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323. AWQ: Lin et al., https://arxiv.org/abs/2306.00978."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    method = {"awq": (METHOD.AWQ, FORMAT.GEMM), "gptq": (METHOD.GPTQ, FORMAT.GPTQ)}[job.method]
    return QuantizeConfig(
        bits=BITS,
        group_size=job.group_size,
        sym=job.symmetric,
        desc_act=False,
        method=method[0],
        format=method[1],
        offload_to_disk_path=str(job.folder / "offload"),
    )


def first_misfit(base: Base, group_size: int) -> str:
    """Find a linear layer whose input width *group_size* does not divide; empty if there are no or few such layers."""
    weights = base.linear_weights
    misfits = [name for name, tensor in weights.items() if tensor.shape[1] % group_size]
    share = sum(weights[name].count for name in misfits) / max(1, sum(tensor.count for tensor in weights.values()))
    return misfits[0] if share > MAX_16_BIT_SHARE else ""


def take(saved: Path, part: LanguagePart | None, *, target: Path, base: Base) -> None:
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
    write_shards(target, base, shards, unread(base, {name for shard in shards for name in shard}), moved=not part)


def write_shards(
    target: Path, base: Base, shards: list[dict[str, Tensor]], rest: dict[str, Tensor], *, moved: bool = False
) -> None:
    """Write a quantizer's *shards* and the *rest* of the base's tensors; the files of the shards are *moved*, if they
    hold nothing else."""
    shards = [shard for shard in (*shards, rest) if shard]
    for number, shard in enumerate(shards, 1):
        path = target / (SHARD.format(number, len(shards)) if len(shards) > 1 else SINGLE)
        if moved and shard is not rest:
            shutil.move(next(iter(shard.values())).path, path)
        else:
            dtypes = {name: kept_dtype(base, tensor) for name, tensor in rest.items()}
            write_tensors(path, shard, dtypes if shard is rest else {})
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


def four_bit(method: str, *, symmetric: bool, further: tuple[Scales, ...] = ()) -> Format:
    """Describe a 4-bit format: each group of inputs has a scale and a zero point per output, all of them in the middle
    if it is *symmetric*, and *further* numbers."""
    group = Scales(bits=16, inputs=DEFAULT_GROUP_SIZE, adjustable=True)
    storage = Storage("4-bit", BITS, (group, replace(group, bits=BITS), *further), capabilities=MARLIN)
    stated = {"quant_method": method, "bits": BITS, "desc_act": False, "sym": symmetric, "zero_point": not symmetric}
    quantizer = FourBit(method, symmetric=symmetric)
    return Format(storage, quantizer, lambda size: {**stated, "group_size": size}, only_16_bit=True)


AWQ: Final = four_bit("awq", symmetric=False)
# GPTQ stores the number of each input's group (g_idx), which vLLM drops after loading.
GPTQ: Final = four_bit("gptq", symmetric=True, further=(Scales(bits=32, inputs=1, outputs=None, loaded=False),))
