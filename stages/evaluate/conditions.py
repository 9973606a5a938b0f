"""The conditions that an evaluation's figures follow from: under the same conditions nothing is measured twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.evaluate.distributions import held_out_digest
from stages.evaluate.questions import questions_digest
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import digest_of, sha256_of
from stages.parts.base.workload import Workload
from stages.parts.machine.hardware import Hardware, hardware
from stages.parts.records.variant import Variant
from stages.parts.vllm.arguments import core_binding, gpu_groups, installed_version

TOOLS: Final = ("vllm", "lm_eval", "torch")
NOT_MEASURED: Final = {
    *("host", "port", "startup_timeout_s", "tls_certificate", "tls_key", "plain_http"),
    *("max_queued_tokens", "replicas", "affinity", "request_timeout_s", "tool_parser", "reasoning_parser", "adapters"),
    "reference",
}
"""Serving settings that have no effect on a figure, or only through ``Conditions.binding``, or the parsers or adapters
they mean."""
ROUNDS: Final = 1
"""Rounds of load after each start. Once there were two: such measurements are not continued."""
HOW_LONG: Final = ("protocol", "budget_minutes")
"""Fields of a workload that say how much is measured, and not what."""


@dataclass(frozen=True)
class Conditions:
    variant: Variant
    workload: dict[str, Any]
    """With the digests of the task files, the trace and the held-out text in place of their paths, and of LoRA adapters
    by name, if there are any."""
    serving: dict[str, Any]
    tool_versions: dict[str, str]
    hardware: Hardware
    binding: str
    """``stages.parts.vllm.arguments.core_binding``."""

    @property
    def key(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name != "variant"}
        fields |= {"variant_digest": self.variant.digest, "hardware": self.hardware.model_dump(mode="json")}
        return digest_of(fields)


def conditions_of(variant: Variant, workload: Workload, serving: Serving, parsers: Sequence[str] = ()) -> Conditions:
    """Name what the figures of a variant follow from; *parsers* are ``parser_arguments`` of its directory. Raise
    ConfigError if a tool is not installed, or a file that the workload names does not exist."""
    plain = workload.model_dump(mode="json", exclude={"tasks_path", "trace", "divergence_text", *HOW_LONG})
    digests = {
        "tasks_digest": tasks_digest(workload.tasks_path),
        "trace_digest": trace_digest(workload.trace),
        "divergence_digest": held_out_digest(workload),
        "questions_digest": questions_digest(workload.quality_tasks),
    }
    machine, settings = hardware(), serving.model_dump(mode="json", exclude=NOT_MEASURED)
    if machine.gpus and serving.dtype == "auto":
        settings["dtype"] = "as stored"  # it once was float16 there
    if not serving.text_only:
        del settings["text_only"]
    if parsers:  # earlier measurements of other models stay valid
        settings["parsers"] = list(parsers)
    if len(gpu_groups(serving)) > 1:  # servers run side by side, each with GPUs of its own
        machine = machine.model_copy(update={"gpus": machine.gpus[: serving.tensor_parallel_size]})
    return Conditions(
        variant=variant,
        workload=plain | digests | {"rounds": ROUNDS},
        serving=settings,
        tool_versions={tool: installed_version(tool) for tool in TOOLS},
        hardware=machine,
        binding=core_binding(serving),
    )


def tasks_digest(tasks_path: str | None) -> str | None:
    """Compute the digest of the content of every file under *tasks_path*, wherever the folder is mounted."""
    if tasks_path is None:
        return None
    root = Path(tasks_path)
    if not root.is_dir():
        raise ConfigError(f"tasks_path {tasks_path!r} is not a folder", hint="it is relative to the workload's file")
    # Files that Python, lm-eval and mypy create while they read the tasks do not define them.
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    files = [path for path in paths if not any(part == "__pycache__" or part.startswith(".") for part in path.parts)]
    return digest_of({path.as_posix(): sha256_of(root / path) for path in files})


def trace_digest(trace: str | None) -> str | None:
    if trace is None:
        return None
    if not Path(trace).is_file():
        raise ConfigError(f"trace {trace!r} is not a file", hint="it is relative to the workload's file")
    return sha256_of(Path(trace))
