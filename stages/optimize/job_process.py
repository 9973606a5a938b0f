"""Runs a quantizer that needs a calibration set in a separate process, which reads a ``QuantizationJob``."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stages.optimize.base_model import Base
from stages.optimize.job import KIND, RESULT, SAVED, QuantizationJob, QuantizationResult
from stages.optimize.language_part import LanguagePart, language_part
from stages.parts.base.errors import ConfigError, QuantizationFailed
from stages.parts.base.formats import Peak
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.environment import Environment
from stages.parts.machine.hardware import cpu_dtype, gpus, no_gpu, processor
from stages.parts.machine.process import run_aloud
from stages.parts.model.corpora import text_path

EXCEPTION: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)): *(.*)")
TABLE_LINE: Final = re.compile(r"^INFO +\+[-+]+\+$")
PACKAGES: Final = ("scoring", "stages")
ROOT: Final = Path(__file__).parents[2]


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
    program: str,
    settings: Optimize,
    base: Base,
    target: Path,
    take: Callable[[Path, LanguagePart | None], None],
    *,
    name: str,
    place: Environment | None = None,
    **fields: Any,
) -> Peak:
    """Let *program* quantize the base, then *take* what it saved into the directory *target*.

    Args:
        name: that of the format, for messages.
        place: the environment of its own in which the program runs; None for this one.
        fields: of ``QuantizationJob``, those that depend on the program.

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
        status, last_exception = run(program, job, python)
        result = QuantizationResult.read(job.folder / RESULT)
        if result and result.config_error:
            raise ConfigError(result.config_error, hint=result.hint)
        if result and result.no_gpu:
            raise no_gpu(result.no_gpu)
        if status or not result:
            raise QuantizationFailed(
                f"{name} cannot quantize {base.architecture}: {last_exception or f'it ended with {status}'}",
                hint="the other variants continue without it; the log above has the traceback",
            )
        take(job.folder / SAVED, job.part)
    return Peak(result.peak_resident_bytes, result.peak_gpu_bytes)


def run(program: str, job: QuantizationJob, python: str) -> tuple[int, str]:
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
    command = [python, "-m", program, str(job.folder / "job.json")]
    # GPTQModel writes logs to the working directory.
    status, lines = run_aloud(command, environment=variables, directory=job.folder, hidden=TABLE_LINE)
    raised = [f"{match[1]}: {match[2]}" for match in map(EXCEPTION.match, lines) if match]
    return status, raised[-1] if raised else ""


def environment() -> dict[str, str]:
    """Set the environment variables that quantizers and the Hub's libraries read when they are imported."""
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
        "TQDM_MININTERVAL": "30",
        "COLUMNS": "160",  # wide enough for GPTQModel's tables
        "PYTHONUNBUFFERED": "1",
    }
