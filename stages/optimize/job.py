"""What the programs of the quantizers' separate processes share: the job, its result, and the calibration set.

The calibration set is the text that quantizers run through the model to compute their scales. Its documents are
shuffled with the seed, joined with the tokenizer's end-of-text token, and cut into sequences of equal length, as in the
GPTQ paper (section 4: random segments of a text corpus).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from stages.optimize.language_part import LanguagePart, write_language_part
from stages.parts.base.errors import ConfigError
from stages.parts.base.optimize_settings import Calibration
from stages.parts.base.store import Record, digest_of
from stages.parts.machine.hardware import asked_gpus
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.corpora import read_documents, text_digest

RESULT: Final = "result.json"
SAVED: Final = "saved"
KIND: Final = "calibration"


class QuantizationJob(Record):
    """One model to quantize. ``folder`` is for the result and all temporary files."""

    method: str
    """The method's name in GPTQModel, or a preset of compressed-tensors."""
    base: Path
    folder: Path
    dtype: str
    linear_in_float32: bool
    """Whether linear layers compute in float32 instead of *dtype*."""
    group_size: int
    calibration: Calibration
    sequence_length: int
    part: LanguagePart | None = None
    """What is quantized of the model; None if that is all of it."""
    symmetric: bool = True
    ignored: tuple[str, ...] = ()
    """Linear layers that stay in 16 bit."""

    @property
    def source(self) -> Path:
        """The directory of the model to load, which is written now if only a part is."""
        if not self.part:
            return self.base
        write_language_part(self.part, self.base, target := self.folder / "language")
        return target


Examples = list[dict[str, list[int]]]
Quantize = Callable[[QuantizationJob, Examples], None]
"""Writes the quantized model to ``saved`` in the job's folder."""


class QuantizationResult(Record):
    """``result.json``, which exists only if the process reached its end."""

    peak_resident_bytes: int = 0
    peak_gpu_bytes: int | None = None
    config_error: str = ""
    no_gpu: str = ""
    """Why torch sees no GPU, of a pod that got one."""
    hint: str = ""


def calibration_digest(calibration: Calibration, sequence_length: int) -> str:
    """Compute the digest of what determines a tokenizer's calibration set: the file's bytes and how it is cut."""
    cut = {"samples": calibration.samples, "sequence_length": sequence_length, "seed": calibration.seed}
    return digest_of({"text": text_digest(calibration.text, KIND), **cut})


def sequences(documents: Sequence[str], tokenizer: Any, calibration: Calibration, length: int) -> list[list[int]]:
    """Cut ``calibration.samples`` sequences of *length* token ids each, or refuse a text that is too short."""
    order = list(documents)
    random.Random(calibration.seed).shuffle(order)
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    needed_tokens = calibration.samples * length
    ids: list[int] = []
    for document in order:
        ids += tokenizer.encode(document, add_special_tokens=False) + between
        if len(ids) >= needed_tokens:
            return [ids[start : start + length] for start in range(0, needed_tokens, length)]
    raise ConfigError(
        f"the calibration text {calibration.text} gives {len(ids) // length} sequences of {length} tokens, "
        f"but {calibration.samples} are needed",
        hint="set fewer or shorter sequences (calibration: samples, sequence_length), or use a longer text",
    )


def main(quantize: Quantize) -> None:
    job = QuantizationJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    result_of(job, quantize).write(job.folder / RESULT)


def result_of(job: QuantizationJob, quantize: Quantize) -> QuantizationResult:
    """Quantize, unless something is wrong that the caller should report."""
    import torch
    from transformers import AutoTokenizer

    if asked_gpus() and (missing := without_cuda()):
        return QuantizationResult(no_gpu=missing)
    tokenizer = AutoTokenizer.from_pretrained(job.base, local_files_only=True, trust_remote_code=False)
    try:
        documents = read_documents(job.calibration.text, KIND)
        token_ids = sequences(documents, tokenizer, job.calibration, job.sequence_length)
    except ConfigError as error:
        return QuantizationResult(config_error=str(error), hint=error.hint)
    torch.manual_seed(job.calibration.seed)
    if job.linear_in_float32:
        compute_linear_in_float32()
    quantize(job, [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in token_ids])
    gpu_bytes = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
    return QuantizationResult(peak_resident_bytes=peak_resident_bytes(), peak_gpu_bytes=gpu_bytes)


def without_cuda() -> str:
    """Why torch has no CUDA device; empty if it has one."""
    import torch

    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch has no CUDA device"


def compute_linear_in_float32() -> None:
    """Let the linear layers of this process convert to float32 and back: without bf16 arithmetic this is ten times
    faster, and only linear layers are slow. Loading the model in float32 is no way: GPTQModel's search for AWQ's scales
    then overwrites the weights that it compares with."""
    import torch

    linear = torch.nn.functional.linear

    def converted(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        outputs: torch.Tensor = linear(inputs.float(), weight.float(), None if bias is None else bias.float())
        return outputs.to(inputs.dtype)

    torch.nn.functional.linear = converted
