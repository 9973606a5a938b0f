"""What the stages can be told. Each model is closed and frozen: an unknown or wrong field is an error.

Defaults live here and in ``configs/defaults.yaml``, which a person edits; the two agree (tested).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stages.errors import ConfigError

CONFIGS: Final = Path(__file__).parents[1] / "configs"
SettingsT = TypeVar("SettingsT", bound=BaseModel)
Positive = Annotated[int, Field(gt=0)]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Calibration(Settings):
    """The text that AWQ and GPTQ look at while they choose scales."""

    text: str = "python-docs"
    """A name in ``configs/calibration/``, or a path to a .txt file (documents apart by form feeds or, without
    any, by blank lines) or a .jsonl file with a ``text`` field. It must not contain what quality is measured on."""
    samples: Positive = 128
    """Sequences. 128 is the GPTQ paper's number; fewer is faster and noisier."""
    sequence_length: Positive = 512
    """Tokens per sequence."""
    seed: int = 0


class Optimize(Settings):
    """Which variants are made, and how."""

    variants: tuple[Literal["fp16", "awq", "gptq"], ...] = ("fp16", "awq", "gptq")
    """fp16 is the reference that the others are compared with, and is always made."""
    group_size: Literal[32, 64, 128] = 128
    """Weights that share one scale. Must divide the layers' input widths. 32 is more exact and larger."""
    calibration: Calibration = Calibration()

    @field_validator("variants")
    @classmethod
    def _with_the_reference_once(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        if "fp16" not in variants:
            raise ValueError("fp16 is the reference and can't be left out")
        if len(set(variants)) < len(variants):
            raise ValueError("a variant is named twice")
        return variants


class Serving(Settings):
    """How vLLM serves: in the evaluation and in production alike, or the measurement would say nothing."""

    dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    """auto: float16 on a GPU, bfloat16 on a CPU (which has no native float16 arithmetic)."""
    max_model_len: Positive | None = None
    """Tokens of prompt and answer together. None: what the model's own config allows."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that vLLM takes. Without a GPU: unused."""
    kv_cache_mib: Positive | None = None
    """KV cache in MiB. None: what vLLM finds on a GPU, 1024 on a CPU."""
    tensor_parallel_size: Positive = 1
    """GPUs that share one replica."""
    enforce_eager: bool = False
    """True: start faster, decode slower (no compilation, no CUDA graphs)."""
    startup_timeout_s: Positive = 900
    """A large model needs minutes to load; beyond this the server is stopped and the variant fails."""
    extra_arguments: tuple[str, ...] = ()
    """Passed to ``vllm serve`` as they are."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Of the production endpoint. 0: a free one. Evaluations always take a free one."""


class Workload(Settings):
    """What a variant is measured with. Latency and throughput follow from it, so it belongs to the result."""

    name: str
    prompt_tokens: Positive
    output_tokens: Positive
    concurrency: Positive
    """Requests in flight at a time."""
    requests: Positive
    """In each round."""
    rounds: Positive = 3
    """Each with prompts of its own, the same for every variant. What differs between rounds is noise, and a
    difference between variants has to exceed it. One round measures no noise."""
    warmup_requests: Annotated[int, Field(ge=0)] = 4
    """Sent before each round and left out of it."""
    seed: int = 0
    quality_tasks: tuple[str, ...] = Field(min_length=1)
    """lm-eval task names."""
    tasks_path: str | None = None
    """A folder with task definitions of your own, beside lm-eval's. Relative to the workload's file."""
    quality_limit: Positive | None = None
    """Items per task; None: all."""


SHOWN_VALUE_CHARACTERS: Final = 60


def parse(model: type[SettingsT], data: Mapping[str, Any], where: str) -> SettingsT:
    """Validate *data*; every mistake is shown at once, each on its own line.

    Raises:
        ConfigError: naming *where* (a file, a flag) and each wrong field.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError.of_many(mistakes(error, model), where) from error


def parse_json(model: type[SettingsT], text: str, where: str) -> SettingsT:
    """As ``parse``, from the JSON text of a flag.

    Raises:
        ConfigError: also if it is not a JSON object.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return parse(model, data, where)


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake; an unknown field with the nearest known name."""
    lines = []
    for each in error.errors():
        field = ".".join(str(part) for part in each["loc"]) or "(root)"
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(each["loc"][-1]), _fields_at(model, each["loc"][:-1]), n=1)
            message = "unknown field" + (f", did you mean {close[0]!r}?" if close else "")
        elif each["type"] != "missing":
            message += f" (got {str(each['input'])[:SHOWN_VALUE_CHARACTERS]!r})"
        lines.append(f"{field}: {message}")
    return lines


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for name in path:
        field = model.model_fields.get(str(name))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
