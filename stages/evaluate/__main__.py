"""evaluate: serve variants with vLLM and measure their latency, throughput, memory and quality, until the choice
between them is settled or the budget is spent. What was measured before under the same conditions is used again.

Each variant has its own outcome; if one fails, the others continue. The profile's reference, fp16 by default, has to be
among them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scoring.names import PRODUCTION, recipe_of, variant_of
from scoring.profile import Profile
from stages.evaluate import results
from stages.parts.base import program
from stages.parts.base.errors import (
    ConfigError,
    DamagedModel,
    InvalidName,
    MeasurementFailed,
    SlipwayError,
    TransientError,
)
from stages.parts.base.files import exclusive
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Serving
from stages.parts.base.settings import parse_json
from stages.parts.base.store import NAME, ModelStore
from stages.parts.base.workload import Workload
from stages.parts.machine.hardware import check_gpus
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import format_of_base, read_intact
from stages.parts.records.evaluation import Evaluation, Refused
from stages.parts.records.variant import read_variant
from stages.parts.releases.pinned import MeasuredWith, row_of_production
from stages.parts.vllm.parsers import parser_arguments


def main() -> None:
    arguments = _arguments()
    store = ModelName.parse(arguments.model).store()
    names = list(dict.fromkeys(arguments.variants.split(",")))
    for name in names:
        if not NAME.match(variant_of(name)):
            raise InvalidName(f"{name!r} is not a variant's name", hint="such as fp16,gptq")
    workload = parse_json(Workload, arguments.workload, "--workload")
    serving = parse_json(Serving, arguments.serving, "--serving")
    profile = parse_json(Profile, arguments.profile, "--profile").for_format(format_of_base(store))
    if unknown := [name for name in names if (recipe := recipe_of(name)) and recipe not in serving.recipes]:
        raise ConfigError(f"{unknown[0]}: there is no such recipe", hint="name it in serving.recipes")
    if (reference := profile.reference_variant) and reference not in names and not serving.reference:
        raise ConfigError(f"{reference} is not among the variants", hint="the others are compared with it")
    check_gpus()
    names = made_by_this_run(store, names)
    if PRODUCTION in names and (row := row_of_production(store, names, serving)) != PRODUCTION:
        say(f"what is in production is {row} of this run, and is not measured apart")
        names.remove(PRODUCTION)
    summary = json.dumps(evaluate(store, names, workload, serving, profile))
    program.write_output("summary", summary)
    print(summary)


def evaluate(
    store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving, profile: Profile
) -> dict[str, dict[str, float]]:
    """Evaluate the variants, record the outcome of each as if it had been evaluated alone, and return the summaries.
    Raise SlipwayError if the reference failed, or every variant did, or one did in a way that another attempt may
    pass."""
    failures: dict[str, SlipwayError] = {}
    summaries = {}
    with contextlib.ExitStack() as stack:
        reports = {name: stack.enter_context(_recorded(store, name, failures)) for name in names}
        for name, (outcome, measured) in ensure(store, names, workload, serving, profile).items():
            if isinstance(outcome, SlipwayError):
                failures[name] = outcome
            elif isinstance(outcome, Refused):
                hint = "see the report for its quality"
                reports[name].left_out(f"failed before its load: {outcome.reason}", hint=hint)
            else:
                summaries[name], report = summarize(outcome), reports[name]
                if measured:
                    report.done(describe(outcome), key=outcome.key)
                else:
                    report.reused(f"{describe(outcome)}, from {outcome.started_at:%Y-%m-%d %H:%M} UTC", key=outcome.key)
    if (reference := profile.reference_variant) in failures:
        raise failures[reference]
    for name, error in failures.items():
        if not summaries or isinstance(error, TransientError):
            raise error
        say(f"{name} is left out: {error}")
    return summaries


def made_by_this_run(store: ModelStore, names: Sequence[str]) -> list[str]:
    """*names* without the variants that this run failed to make; the store may hold an older one of that name. What is
    in production is there already."""
    run_id = os.environ.get(program.RUN_VARIABLE)
    outcomes = program.outcomes(store.run(run_id)) if run_id else []
    made = {outcome.variant for outcome in outcomes if outcome.stage == "optimize" and outcome.result != "failed"}
    if missing := [name for name in names if made and variant_of(name) not in (*made, PRODUCTION)]:
        say(f"not made by this run, so not measured: {', '.join(missing)}")
    return [name for name in names if name not in missing]


@contextlib.contextmanager
def _recorded(store: ModelStore, name: str, failures: Mapping[str, SlipwayError]) -> Iterator[program.Report]:
    """Record the outcome as ``program.outcome`` does, and end the variant's own failure here."""
    try:
        with program.outcome(store, "evaluate", name) as report:
            yield report
            if name in failures:
                raise failures[name]
    except SlipwayError as error:
        if failures.get(name) is not error:
            raise


def ensure(
    store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving, profile: Profile
) -> dict[str, results.Found]:
    """Bring the store to hold the result of each variant under these conditions, measuring only what it lacks. Raise
    ConfigError if the workload cannot be measured, DamagedModel if an adapter can't be served."""
    conditions: dict[str, results.Conditions] = {}
    outcomes: dict[str, results.Found] = {}
    adapters = {name: read_intact(store.adapter(name)).digest for name in serving.adapters}
    for name in names:
        try:
            directory, served = store.optimized(name), serving.of_candidate(name)
            found = results.conditions_of(
                read_variant(directory), workload, served, parser_arguments(served, directory)
            )
            if name == PRODUCTION:
                check_production(directory, serving, adapters)
            conditions[name] = replace(found, workload=found.workload | ({"adapters": adapters} if adapters else {}))
        except (DamagedModel, MeasurementFailed) as error:
            outcomes[name] = (error, False)
    if (reference := profile.reference_variant) and reference not in conditions and not serving.reference:
        return outcomes | {name: (MeasurementFailed(results.UNCOMPARED), False) for name in conditions}
    reusable = _reusable(store, conditions, workload, profile)
    if conditions.keys() - reusable.keys():
        with contextlib.ExitStack() as stack:
            for name in sorted(conditions):
                stack.enter_context(exclusive(store.lock(f"evaluate-{name}"), f"evaluate {name}"))
            # Another process may have measured them while this one waited; another configuration, before.
            for name in conditions:
                results.bring_back(store, name, conditions[name].key)
                if name == PRODUCTION:
                    results.adopt(store, MeasuredWith.of(store.optimized(name)).winner, conditions[name].key)
            reusable = _reusable(store, conditions, workload, profile)
            if new := {name: conditions[name] for name in conditions if name not in reusable}:
                from stages.evaluate.blocks import measure

                outcomes |= measure(store, new, workload, serving, profile)
    outcomes |= {name: (result, False) for name, result in reusable.items()}
    return {name: outcomes[name] for name in names}


def check_production(release: Path, serving: Serving, adapters: Mapping[str, str]) -> None:
    """Raise MeasurementFailed if the *release* in production can't be measured as it is served: it went there since
    the run's settings were decided, or is served with other *adapters*."""
    if serving.production is None or release.name != serving.production.release:
        raise MeasurementFailed(f"{release.name} went into production during the run", hint="run again")
    if MeasuredWith.of(release).workload.get("adapters", {}) != adapters:
        raise MeasurementFailed(f"{release.name} is served with other LoRA adapters, which this run does not measure")


def _reusable(
    store: ModelStore, conditions: Mapping[str, results.Conditions], workload: Workload, profile: Profile
) -> dict[str, results.Result]:
    """Read the results of the variants that are not to be measured: of all if the choice between them is settled or the
    budget is spent, otherwise of those alone that were refused."""
    keys = {name: condition.key for name, condition in conditions.items()}
    refusals = {name: refusal for name, key in keys.items() if (refusal := results.refused(store, name, key, profile))}
    evaluations = {
        name: evaluation
        for name, key in keys.items()
        if name not in refusals and (evaluation := results.existing(store, name, key))
    }
    settled = len(refusals) + len(evaluations) == len(keys) and results.complete(evaluations, workload, profile)
    return {**refusals, **(evaluations if settled else {})}


def describe(evaluation: Evaluation) -> str:
    quality = ", ".join(f"{score.task} {score.value:.3f}" for score in evaluation.quality)
    latency, rate = evaluation.load.e2el_ms.p95, evaluation.metrics()["throughput"]
    return (
        f"{evaluation.variant}: {quality}; p95 {latency:.0f} ms, {rate:.0f} tokens/s (took {evaluation.seconds:.0f} s)"
    )


def summarize(evaluation: Evaluation) -> dict[str, float]:
    """Return the four metrics, with their units in the names: Argo's UI shows them beside this task."""
    metrics = evaluation.metrics()
    return {
        "quality": metrics["quality"],
        "e2el_p95_ms": metrics["latency"],
        "output_tokens_per_s": metrics["throughput"],
        "weights_bytes": metrics["memory"],
    }


def _arguments() -> argparse.Namespace:
    lengths = '"prompt_tokens": 512, "output_tokens": 128, "concurrency": 8'
    parser = program.parser(
        "evaluate",
        __doc__,
        f"""example:
  python -m stages.evaluate --model org/name --variants fp16,gptq --serving '{{"max_model_len": 4096}}' \\
    --workload '{{"name": "chat", "protocol": "thorough", {lengths}, "quality_tasks": ["structured_output"]}}'

protocols, and what they set unless the workload does:
  quick     20 minutes for all variants, 10 % error rate
  standard  120 minutes, 5 %
  thorough  240 minutes, 2 %
With several GPUs, as many servers run side by side as GPUs allow (serving.tensor_parallel_size for each).
Only one evaluation measures on a machine at a time, and no variant is optimized meanwhile; others wait.""",
    )
    parser.add_argument(
        "--variants", required=True, help="separated by commas, fp16 among them, such as fp16,gptq,gptq+ngram"
    )
    parser.add_argument("--workload", required=True, help="JSON: Workload in stages/parts/base/workload.py")
    parser.add_argument("--serving", default="{}", help="JSON: Serving in stages/parts/base/serving_settings.py")
    parser.add_argument("--profile", default='{"name": "default"}', help="the scoring profile as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
