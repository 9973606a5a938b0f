"""What the store holds of a measurement, read to be reused or continued, and written after each block; and the
conditions that its figures follow from: under the same conditions nothing is measured twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scoring.names import PRODUCTION
from stages.evaluate.distributions import held_out_digest
from stages.evaluate.drift import drift_of
from stages.evaluate.questions import questions_digest
from stages.parts.base.errors import ConfigError, DamagedModel, SlipwayError
from stages.parts.base.files import digest_of, place, sha256_of
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.machine.environment import engine_of
from stages.parts.machine.hardware import Hardware, hardware
from stages.parts.records.evaluation import REFUSED_SUFFIX, SAMPLES_SUFFIX, Evaluation, Memory, Refused, Schedule
from stages.parts.records.production import RULES
from stages.parts.records.variant import Variant
from stages.parts.samples.lines import read_samples, write_samples
from stages.parts.vllm.arguments import core_binding, gpu_groups, installed_version

if TYPE_CHECKING:
    from scoring.profile import Profile
    from stages.evaluate.subject import Subject

MINUTE: Final = 60
UNCOMPARED: Final = "not measured, because the variant to compare with could not be"
Result = Evaluation | Refused
Found = tuple[Result | SlipwayError, bool]
"""What became of a variant, and whether anything of it was measured now."""
TOOLS: Final = ("vllm", "lm_eval", "torch")
NOT_MEASURED: Final = {
    *("host", "port", "startup_timeout_s", "tls_certificate", "tls_key", "plain_http"),
    *("shared_port", "metrics_address", "signing", "verification_key"),
    *("max_queued_tokens", "replicas", "affinity", "request_timeout_s", "tool_parser", "reasoning_parser", "adapters"),
    *("reference", "recipes", "production", "engine_version"),
}
"""Serving settings that have no effect on a figure, or only through ``Conditions.binding``, the tools' versions, or the
parsers or adapters they mean."""
ADDED: Final = ("text_only", "kv_cache_dtype", "speculation", "max_num_seqs", "max_num_batched_tokens")
"""Settings that there were not always."""
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
    for name in ADDED:  # earlier measurements stay valid
        if settings[name] == Serving.model_fields[name].default:
            del settings[name]
    if parsers:  # and so do those of other models
        settings["parsers"] = list(parsers)
    if len(gpu_groups(serving)) > 1:  # servers run side by side, each with GPUs of its own
        machine = machine.model_copy(update={"gpus": machine.gpus[: serving.tensor_parallel_size]})
    return Conditions(
        variant=variant,
        workload=plain | digests | {"rounds": ROUNDS},
        serving=settings,
        tool_versions={tool: installed_version(tool) for tool in TOOLS}
        | {"vllm": engine_of(serving.engine_version).version("vllm")},
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


def existing(store: ModelStore, name: str, key: str) -> Evaluation | None:
    """Read the evaluation with this key; None if there is none, or if it is damaged and has to be measured again."""
    evaluation = Evaluation.read_if_intact(store.evaluation(name), "measuring again")
    return evaluation if evaluation and evaluation.key == key else None


def bring_back(store: ModelStore, name: str, key: str) -> None:
    """Put the evaluation and the refusal of other conditions aside, and bring back what was found under this key."""
    for kind, paths in (
        (Evaluation, [samples_path(store, name), store.evaluation(name)]),
        (Refused, [refused_path(store, name)]),
    ):
        record = kind.read_if_intact(paths[-1])
        store.take_up(paths, record.key if record else None, key)


def adopt(store: ModelStore, winner: str, key: str) -> None:
    """Give the release in production the evaluation by which it was chosen, as the *winner* of its run, if it was made
    under the same conditions: then its questions are not asked again."""
    if existing(store, PRODUCTION, key):
        return
    current = store.evaluation(winner)
    for path in (current, store.set_aside(current, key) / current.name):
        evaluation = Evaluation.read_if_intact(path)
        if evaluation and evaluation.key == key:
            samples = samples_path(store, PRODUCTION)
            samples.unlink(missing_ok=True)
            place(path.with_suffix(SAMPLES_SUFFIX), samples)
            evaluation.model_copy(update={"variant": PRODUCTION}).write(store.evaluation(PRODUCTION))
            return


def refused(store: ModelStore, name: str, key: str, profile: Profile) -> Refused | None:
    """Why the variant was refused under the same conditions by the same limits; None if it was not."""
    refusal = Refused.read_if_intact(refused_path(store, name))
    return refusal if refusal and (refusal.key, refusal.limits) == (key, limits_digest(profile)) else None


def complete(evaluations: Mapping[str, Evaluation], workload: Workload, profile: Profile) -> bool:
    """Whether no more is to be measured: the choice between those that were measured together was settled by the same
    profile and rules, or the budget is spent."""
    schedules = {evaluation.schedule for evaluation in evaluations.values()}
    if len(schedules) != 1 or not (schedule := schedules.pop()) or not set(schedule.variants).issuperset(evaluations):
        return False
    if schedule.ended == "settled":
        return schedule.profile == choice_digest(profile)
    return schedule.ended == "budget" and schedule.budget_s >= MINUTE * workload.budget_minutes


def restore(store: ModelStore, subjects: Sequence[Subject]) -> Evaluation | None:
    """Give the subjects what the store holds of them under the same conditions. Return an evaluation with the looks and
    the schedule of all of them; None if they were not measured together."""
    evaluations = []
    for subject in subjects:
        if evaluation := existing(store, subject.name, subject.conditions.key):
            try:
                subject.restore(evaluation, read_samples(samples_path(store, subject.name), evaluation))
            except DamagedModel as error:
                say(f"{error}; measuring again")
            else:
                evaluations.append(evaluation)
    if len(evaluations) == len(subjects) and len({evaluation.schedule for evaluation in evaluations}) == 1:
        return max(evaluations, key=lambda evaluation: len(evaluation.looks))
    for subject in subjects:
        subject.looks = 0
    return None


def keep(subject: Subject, looks: tuple[float, ...], schedule: Schedule) -> None:
    """Write the samples, and only then the evaluation computed from them."""
    session, data, conditions = subject.session, subject.data, subject.conditions
    variant = conditions.variant
    Evaluation(
        variant=subject.name,
        variant_digest=variant.digest,
        base_digest=variant.base_digest,
        workload=conditions.workload,
        hardware=conditions.hardware,
        key=conditions.key,
        samples_sha256=write_samples(samples_path(session.store, subject.name), conditions.key, data.samples),
        tool_versions=conditions.tool_versions,
        quality=data.quality,
        drift=drift_of(data.speeds),
        probes=data.probes,
        agreement=data.agreement,
        not_asked=data.not_asked,
        looks=looks,
        schedule=schedule,
        memory=Memory(
            weights_bytes=variant.weights_bytes,
            peak_resident_bytes=data.resident_bytes,
            peak_gpu_bytes=data.gpu_bytes or None,
            kv_cache_tokens=data.kv_cache_tokens,
        ),
        recipe=session.recipe,
        gpu_share=session.gpu_share,
        stored=variant.stored,
        beside=session.beside,
        started_at=data.started_at or datetime.now(UTC),
        **data.figures(session.workload),
    ).write(session.store.evaluation(subject.name))


def keep_refusal(subject: Subject) -> Refused:
    session, data = subject.session, subject.data
    refusal = Refused(
        variant=subject.name,
        variant_digest=subject.conditions.variant.digest,
        key=subject.conditions.key,
        limits=limits_digest(session.profile) if subject.refused_again else "",
        reason=subject.refused,
        started_at=data.started_at or datetime.now(UTC),
        seconds=round(data.seconds, 3),
    )
    refusal.write(refused_path(session.store, subject.name))
    return refusal


def limits_digest(profile: Profile) -> str:
    """Compute the digest of what the gates follow from."""
    limits = profile.model_dump(mode="json", exclude={"name", "description", "weights", "margins", "error_rate"})
    return digest_of({"rules": RULES, **limits})


def choice_digest(profile: Profile) -> str:
    """Compute the digest of what decides whether a choice is settled."""
    return digest_of({"rules": RULES, **profile.model_dump(mode="json", exclude={"name", "description"})})


def samples_path(store: ModelStore, name: str) -> Path:
    return store.evaluation(name).with_suffix(SAMPLES_SUFFIX)


def refused_path(store: ModelStore, name: str) -> Path:
    return store.evaluation(name).with_suffix(REFUSED_SUFFIX)
