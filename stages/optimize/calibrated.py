"""The presets of compressed-tensors that need calibration, made by llm-compressor (https://github.com/vllm-project/llm-compressor)
in an environment of its own, on a GPU or a CPU.

w4a16 has a scale per group of inputs, and weights chosen by GPTQ. w8a8 is stored as int8, with weights chosen by GPTQ
after SmoothQuant has moved outliers of the activations into them. nvfp4 is nvfp4a16 with activations in 4 bit, under a
scale per layer that is measured. The variant keeps the tensors of quantized layers, and of w8a8 the norms. All others
come unchanged from the base, as for awq and gptq.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from scoring.capacity.storage import DEFAULT_GROUP_SIZE, MARLIN, Scales, Storage
from stages.optimize.base_model import Base
from stages.optimize.four_bit import write_shards
from stages.optimize.job import KIND, SAVED, Examples, QuantizationJob, calibration_of, quantize_apart
from stages.optimize.language_part import LanguagePart, language_part
from stages.optimize.rounded import INT8, NVFP4A16, Rounded, quantized_weights, rounded, unquantized_layers
from stages.optimize.shards import Entry, write_config
from stages.parts.base.formats import Format, Peak
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.environment import LLM_COMPRESSOR
from stages.parts.model.checkpoint import CONFIG
from stages.parts.model.corpora import read_documents
from stages.parts.model.safetensors import Tensor, read_header

if TYPE_CHECKING:
    import torch

RECIPE: Final = 1
"""Increased when the same parameters give other files, so that older variants are made again."""
SMOOTHING: Final = 0.8
"""How much of the outliers of activations moves into the weights, as in llm-compressor's example of W8A8."""
HALF: Final = {"float16": "F16", "bfloat16": "BF16"}


class CalibratedRounding(Rounded):
    """Makes the format *name*, the preset *scheme* of compressed-tensors.

    *tolerance* is that of ``Rounded`` for the preset NVFP4. Of the others it is the largest distance of an output's
    weights from the base's, as a share of their norm: GPTQ rounds by what the layer's outputs lose, not to the nearest.
    """

    tools: ClassVar[tuple[str, ...]] = ("llmcompressor", "compressed-tensors", "torch", "transformers")
    calibrated: ClassVar[bool] = True

    def __init__(self, name: str, scheme: str, storage: Storage, tolerance: float) -> None:
        super().__init__(scheme, storage, tolerance)
        self.name = name
        self.adjustable = storage.scales[0].adjustable
        self.smoothed = scheme == "W8A8"

    def sized(self, group_size: int) -> Self:
        """Return the same with groups of this size, if it has groups of any size."""
        made = copy.copy(self)
        made.inputs = group_size if self.adjustable else self.inputs
        return made

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:
        group = {"group_size": settings.group_size} if self.adjustable else {}
        return super().parameters(settings, base) | calibration_of(settings, base) | group | {"recipe": RECIPE}

    def check(self, settings: Optimize, base: Base) -> None:
        """Check that the calibration text is readable, and that vLLM can serve the decoder's layers in this format."""
        read_documents(settings.calibration.text, KIND)
        super(CalibratedRounding, self.sized(settings.group_size)).check(settings, base)

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        part, ignored = language_part(base), unquantized_layers(base)
        if part:
            weights = {f"{layer}.weight": base.tensors[f"{layer}.weight"] for layer in ignored if layer != "lm_head"}
            ignored = ["lm_head", *(name.removesuffix(".weight") for name in part.alone(weights))]
        return quantize_apart(
            *(settings, base, target, partial(self.sized(settings.group_size).take, target=target, base=base)),
            name=self.name,
            place=LLM_COMPRESSOR,
            quantize=f"{__name__}:quantize",
            method=self.scheme,
            group_size=settings.group_size,
            ignored=tuple(ignored),
        )

    def take(self, saved: Path, part: LanguagePart | None, *, target: Path, base: Base) -> None:
        """Write to *target* what the variant keeps of llm-compressor's output, and the base's other tensors."""
        stated = json.loads((saved / CONFIG).read_bytes())["quantization_config"]
        write_config(base, target, base.half_dtype, quantization_config=stated | {"ignore": unquantized_layers(base)})
        layers = quantized_weights(base)
        kept = {name for each in layers.values() for name, *_ in self.parts(base, each, quantized=True)}
        if self.smoothed:
            kept |= {name for name, tensor in base.tensors.items() if len(tensor.shape) == 1}
        shards = []
        for path in sorted(saved.glob("*.safetensors")):
            read = {part.published(name) if part else name: tensor for name, tensor in read_header(path).items()}
            shards.append({name: tensor for name, tensor in read.items() if name in kept})
        made = {name for shard in shards for name in shard}
        rest = {name: each for name, each in base.tensors.items() if name not in made and name not in layers}
        write_shards(target, base, shards, rest)

    def parts(self, base: Base, tensor: Tensor, quantized: bool) -> list[Entry]:
        stored = super().parts(base, tensor, quantized)
        if quantized and self.scheme == "NVFP4":
            return [*stored, (f"{tensor.name.removesuffix('weight')}input_global_scale", "F32", (1,))]
        scale = f"{tensor.name}_scale"
        return [(name, HALF[base.half_dtype] if name == scale else dtype, shape) for name, dtype, shape in stored]

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:
        sized = self.sized(parameters.get("group_size", DEFAULT_GROUP_SIZE))
        return super(CalibratedRounding, sized).verify(base, directory, parameters)

    def is_near(self, values: torch.Tensor, made: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        if self.scheme == "NVFP4":
            return super().is_near(values, made, state)
        if self.smoothed:  # the norm before the layer, which has the inverse of these factors, is not looked for
            factors = (made * values).sum(0) / values.square().sum(0).clamp(min=1e-30)
            values = values * factors.clamp(min=0)
        return bool(((made - values).norm(dim=1) <= self.tolerance * values.norm(dim=1)).all())


def quantize(job: QuantizationJob, examples: Examples) -> None:
    """Quantize with llm-compressor, in a process of its environment."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    random.seed(job.calibration.seed)
    dtype = getattr(torch, job.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.source, dtype=dtype, local_files_only=True)
    oneshot(
        model=model,
        dataset=Dataset.from_list(examples),
        recipe=recipe(job),
        max_seq_length=job.sequence_length,
        num_calibration_samples=len(examples),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(job.folder / SAVED)


def recipe(job: QuantizationJob) -> list[Any]:
    """SmoothQuant: Xiao et al., https://arxiv.org/abs/2211.10438. GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme = preset_name_to_scheme(job.method, ["Linear"])
    fields = {"config_groups": {"group_0": scheme}, "ignore": [*job.ignored]}
    if job.method == "NVFP4":
        return [QuantizationModifier(**fields)]
    if job.method == "W4A16":
        scheme.weights.group_size = job.group_size
        return [GPTQModifier(**fields)]
    return [SmoothQuantModifier(smoothing_strength=SMOOTHING), GPTQModifier(**fields)]


def calibrated(name: str, scheme: str, storage: Storage, tolerance: float) -> Format:
    """Describe a format that vLLM serves as a checkpoint of compressed-tensors."""
    quantizer, environment = CalibratedRounding(name, scheme, storage, tolerance), LLM_COMPRESSOR.name
    return replace(rounded(scheme, storage, tolerance), quantizer=quantizer, environment=environment)


_W4A16: Final = Storage("4-bit", 4, (Scales(16, DEFAULT_GROUP_SIZE, adjustable=True),), capabilities=MARLIN)
W4A16: Final = calibrated("w4a16", "W4A16", _W4A16, 0.6)
W8A8: Final = replace(
    INT8, quantizer=CalibratedRounding("w8a8", "W8A8", INT8.storage, 0.1), environment=LLM_COMPRESSOR.name
)
_NVFP4: Final = replace(NVFP4A16.storage, label="nvfp4", scales=(*NVFP4A16.storage.scales, Scales(32, None, None)))
NVFP4: Final = calibrated("nvfp4", "NVFP4", _NVFP4, 0.2)
