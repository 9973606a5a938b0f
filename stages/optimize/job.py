"""Quantizes in a separate process: python -m stages.optimize.job JOB.json

The calibration set is the text that quantizers run through the model to compute their scales. Its documents are
shuffled with the seed, joined with the tokenizer's end-of-text token, and cut into sequences of equal length, as in the
GPTQ paper (section 4: random segments of a text corpus).
"""

from __future__ import annotations

import os
import pkgutil
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from stages.optimize.base_model import Base
from stages.optimize.language_part import LanguagePart, language_part, write_language_part
from stages.parts.base.errors import ConfigError, QuantizationFailed
from stages.parts.base.files import digest_of
from stages.parts.base.formats import Peak
from stages.parts.base.optimize_settings import Calibration, Optimize
from stages.parts.base.program import without_secrets
from stages.parts.base.store import Record
from stages.parts.machine.environment import Environment
from stages.parts.machine.hardware import asked_gpus, cpu_dtype, gpus, no_gpu, processor
from stages.parts.machine.process import peak_resident_bytes, run_aloud
from stages.parts.model.corpora import read_documents, text_digest, text_path

RESULT: Final = "result.json"
SAVED: Final = "saved"
KIND: Final = "calibration"
EXCEPTION: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)): *(.*)")
TABLE_LINE: Final = re.compile(r"^INFO +\+[-+]+\+$")
PACKAGES: Final = ("scoring", "stages")
ROOT: Final = Path(__file__).parents[2]


class QuantizationJob(Record):
    """One model to quantize. ``folder`` is for the result and all temporary files."""

    quantize: str
    """The function, as ``module:name``, that writes the quantized model to ``saved`` in the folder."""
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


def result_of(job: QuantizationJob) -> QuantizationResult:
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
    quantize: Callable[[QuantizationJob, Examples], None] = pkgutil.resolve_name(job.quantize)
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


def calibration_of(settings: Optimize, base: Base) -> dict[str, Any]:
    """Name what influences a calibrated variant, besides its method and the calibration text."""
    return {
        "dtype": base.half_dtype,
        "calibration_text": Path(settings.calibration.text).name,
        "samples": settings.calibration.samples,
        "sequence_length": sequence_length(settings, base),
        "seed": settings.calibration.seed,
        **({"linear_layers_computed_in": "float32"} if linear_in_float32() else {}),
    }


def linear_in_float32() -> bool:
    """Whether quantizing computes linear layers in float32: without a GPU, on a processor that has no bf16."""
    return cpu_dtype(processor()) == "float32" and not gpus()


def sequence_length(settings: Optimize, base: Base) -> int:
    """Tokens per calibration sequence: as in the settings, but not more than the model's maximum position."""
    positions = base.setting("max_position_embeddings")
    longest = settings.calibration.sequence_length
    return min(longest, positions) if isinstance(positions, int) and positions > 0 else longest


def quantize_apart(
    settings: Optimize,
    base: Base,
    target: Path,
    take: Callable[[Path, LanguagePart | None], None],
    *,
    name: str,
    place: Environment | None = None,
    **fields: Any,
) -> Peak:
    """Quantize the base in a separate process, then *take* what it saved into the directory *target*.

    Args:
        name: that of the format, for messages.
        place: the environment of its own in which the process runs; None for this one.
        fields: of ``QuantizationJob``, those that depend on the quantizer.

    Raises:
        QuantizationFailed, ConfigError: as ``Quantizer.quantize``.
        NotInstalled: this pod got a GPU and torch sees none, or the environment can't be made.
    """
    python = place.python() if place else sys.executable
    text = text_path(settings.calibration.text, KIND).absolute()
    with tempfile.TemporaryDirectory(dir=target, prefix=".job-") as directory:
        job = QuantizationJob(
            base=base.directory.absolute(),
            folder=Path(directory).absolute(),
            dtype=base.half_dtype,
            linear_in_float32=linear_in_float32(),
            calibration=settings.calibration.model_copy(update={"text": str(text)}),
            sequence_length=sequence_length(settings, base),
            part=language_part(base),
            **fields,
        )
        status, last_exception = run(job, python)
        result = QuantizationResult.read(job.folder / RESULT)
        if result and result.config_error:
            raise ConfigError(result.config_error, hint=result.hint)
        if result and result.no_gpu:
            raise no_gpu(result.no_gpu)
        if status or not result:
            raise QuantizationFailed(
                f"{name} cannot quantize {base.record.architecture}: {last_exception or f'it ended with {status}'}",
                hint="the other variants continue without it; the log above has the traceback",
            )
        take(job.folder / SAVED, job.part)
    return Peak(result.peak_resident_bytes, result.peak_gpu_bytes)


def run(job: QuantizationJob, python: str) -> tuple[int, str]:
    """Run the job in a process that ends when this one does, and print its output on stderr.

    Returns the exit status, and the last exception in the output, as ``TypeName: first line``.
    """
    job.write(job.folder / "job.json")
    variables = environment()
    if python != sys.executable:  # our code alone: its environment has packages of other versions
        code = job.folder / "code"
        code.mkdir()
        for package in PACKAGES:
            (code / package).symlink_to(ROOT / package)
        variables["PYTHONPATH"] = str(code)
    command = [python, "-m", "stages.optimize.job", str(job.folder / "job.json")]
    # GPTQModel writes logs to the working directory.
    status, lines = run_aloud(command, environment=variables, directory=job.folder, hidden=TABLE_LINE)
    raised = [f"{match[1]}: {match[2]}" for match in map(EXCEPTION.match, lines) if match]
    return status, raised[-1] if raised else ""


def environment() -> dict[str, str]:
    """Set the environment variables that quantizers and the Hub's libraries read when they are imported."""
    return {
        **without_secrets(os.environ),
        "GPTQMODEL_CPU_WORKERS": str(max(2, len(os.sched_getaffinity(0)))),  # its thread pool may crash with one worker
        "GPTQMODEL_DISABLE_PACK_EXT": "1",  # a packer that g++ compiles; the result is the same without it
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TERM": "dumb",  # no progress bars: they fill a log with control characters
        "TQDM_MININTERVAL": "30",
        "COLUMNS": "160",  # wide enough for GPTQModel's tables
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    asked = QuantizationJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    result_of(asked).write(asked.folder / RESULT)
