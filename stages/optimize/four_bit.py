"""awq and gptq: 4-bit weights by GPTQModel (https://github.com/ModelCloud/GPTQModel), on a GPU or a CPU.

It runs in a separate process (``gptqmodel_job``), because a failure in one of its threads ends the whole process. The
variant keeps the weights, ``config.json`` and ``quantize_config.json`` that it writes. All other files, such as the
tokenizer, come unchanged from the base, because transformers would rewrite them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Final

from stages.optimize.base_model import SIXTEEN_BIT, Base
from stages.optimize.calibration import calibration_path, read_documents
from stages.optimize.gptqmodel_job import BITS, RESULT, SAVED, QuantizationJob, QuantizationResult
from stages.optimize.quantizer import Peak
from stages.parts.base.errors import ConfigError, QuantizationFailed
from stages.parts.base.optimize_settings import Calibration, Optimize
from stages.parts.base.store import write_json
from stages.parts.machine.hardware import gpus, no_gpu
from stages.parts.machine.process import contained
from stages.parts.machine.processor import cpu_dtype, processor
from stages.parts.model.checkpoint import CONFIG

GROUP_SIZES: Final = (128, 64, 32)
MISFIT_SHARE: Final = 0.1
"""Share of the linear layers' weights that may stay in 16 bit (a mixture's router, a state space's step)."""
QUANTIZE_CONFIG: Final = "quantize_config.json"
RECIPE: Final = 1
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
            "dtype": quantized_dtype(base),
            "calibration_text": Path(calibration.text).name,
            "samples": calibration.samples,
            "sequence_length": sequence_length(settings, base),
            "seed": calibration.seed,
            "recipe": RECIPE,
            **({"linear_layers_computed_in": "float32"} if linear_in_float32() else {}),
        }

    def check(self, settings: Optimize, base: Base) -> None:
        """Check that the calibration text is readable, and that the group size divides the layers' input widths."""
        read_documents(calibration_path(settings.calibration.text))
        if misfit := first_misfit(base, settings.group_size):
            fitting = [size for size in GROUP_SIZES if not first_misfit(base, size)]
            raise QuantizationFailed(
                f"{self.method} cannot quantize {base.architecture}: the group size {settings.group_size} does not "
                f"divide the {base.linear_weights[misfit].shape[1]} inputs of {misfit}",
                hint=f"set group_size to {fitting[0]}" if fitting else "no group size fits this model",
            )

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        with tempfile.TemporaryDirectory(dir=target, prefix=".gptqmodel-") as name:
            folder = Path(name)
            job = QuantizationJob(
                method=self.method,
                base=base.directory.absolute(),
                folder=folder.absolute(),
                symmetric=self.symmetric,
                dtype=quantized_dtype(base),
                linear_in_float32=linear_in_float32(),
                group_size=settings.group_size,
                calibration=with_absolute_path(settings.calibration),
                sequence_length=sequence_length(settings, base),
            )
            status, last_exception = run(job)
            result = (
                QuantizationResult.model_validate_json((folder / RESULT).read_bytes())
                if (folder / RESULT).exists()
                else None
            )
            if result and result.config_error:
                raise ConfigError(result.config_error, hint=result.hint)
            if result and result.no_gpu:
                raise no_gpu(result.no_gpu)
            if status or not result:
                raise QuantizationFailed(
                    f"{self.method} cannot quantize {base.architecture}: {last_exception or f'it ended with {status}'}",
                    hint="the other variants continue without it; the log above has the traceback",
                )
            take(folder / SAVED, target)
        return Peak(result.peak_resident_bytes, result.peak_gpu_bytes)


def first_misfit(base: Base, group_size: int) -> str:
    """A linear layer whose input width *group_size* does not divide; empty if there are no or few such layers."""
    weights = base.linear_weights
    misfits = [name for name, tensor in weights.items() if tensor.shape[1] % group_size]
    share = sum(weights[name].count for name in misfits) / max(1, sum(tensor.count for tensor in weights.values()))
    return misfits[0] if share > MISFIT_SHARE else ""


def quantized_dtype(base: Base) -> str:
    """The type of the tensors that stay in 16 bit: the base's own 16-bit type, or bfloat16 for a wider base."""
    return base.dtype if base.dtype in SIXTEEN_BIT else "bfloat16"


def linear_in_float32() -> bool:
    """Whether quantizing computes linear layers in float32: without a GPU, on a processor that has no bf16."""
    return cpu_dtype(processor()) == "float32" and not gpus()


def sequence_length(settings: Optimize, base: Base) -> int:
    """Tokens per calibration sequence: as in the settings, but not more than the model's maximum position."""
    positions = base.setting("max_position_embeddings")
    asked = settings.calibration.sequence_length
    return min(asked, positions) if isinstance(positions, int) and positions > 0 else asked


def with_absolute_path(calibration: Calibration) -> Calibration:
    return calibration.model_copy(update={"text": str(calibration_path(calibration.text).absolute())})


def run(job: QuantizationJob) -> tuple[int, str]:
    """Run the job in a process that ends when this one does, and print its output on stderr.

    Returns:
        The exit status, and the last exception in the output, as ``TypeName: first line``.
    """
    write_json(job.folder / "job.json", job)
    command = [sys.executable, "-m", "stages.optimize.gptqmodel_job", str(job.folder / "job.json")]
    read, write = os.pipe()
    last_exception = ""
    with os.fdopen(read, encoding="utf-8", errors="replace") as output:
        try:
            with contained(
                # GPTQModel writes logs to the working directory.
                command,
                output=write,
                environment=environment(),
                directory=job.folder,
            ) as process:
                os.close(write)
                write = -1
                for line in output:
                    if found := EXCEPTION.match(line):
                        last_exception = f"{found[1]}: {found[2].strip()}"
                    if line.strip() and not TABLE_LINE.match(line.rstrip()):
                        print(line.rstrip(), file=sys.stderr, flush=True)
                return process.wait(), last_exception
        finally:
            if write >= 0:
                os.close(write)


def environment() -> dict[str, str]:
    """The environment variables that GPTQModel and the Hub's libraries read when they are imported."""
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


def take(saved: Path, target: Path) -> None:
    """Move the files that the variant keeps from GPTQModel's output to *target*."""
    for name in (CONFIG, QUANTIZE_CONFIG):
        content = json.loads((saved / name).read_bytes())
        quantization = content.get("quantization_config", content)
        # The name of a temporary folder, which would make every build differ.
        quantization.get("meta", {}).pop("offload_to_disk_path", None)
        (target / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in sorted(saved.glob("*.safetensors*")):
        shutil.move(path, target / path.name)
