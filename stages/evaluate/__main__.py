"""evaluate: serve variants with vLLM and measure their latency, throughput, memory and quality. A variant that was
measured before under the same conditions is not measured again.

If the workload asks for it and memory allows, the servers of several variants run side by side and take turns. Each
variant has its own outcome; if one fails, the others continue."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from stages.evaluate.conditions import Conditions, conditions_of, read_variant
from stages.parts.base import program
from stages.parts.base.errors import DamagedModel, InvalidName, SlipwayError, TransientError
from stages.parts.base.settings import REFERENCE, Serving, Workload, parse_json
from stages.parts.base.store import NAME, ModelStore, exclusive, store_root
from stages.parts.model.name import ModelName
from stages.parts.records.evaluation import Evaluation

Found = tuple[str, Evaluation | SlipwayError, bool]
"""A variant, its evaluation or the error that ended it, and whether it was measured now."""


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), ModelName.parse(arguments.model).id)
    names = list(dict.fromkeys(arguments.variants.split(",")))
    for name in names:
        if not NAME.match(name):
            raise InvalidName(f"{name!r} is not a variant's name", hint="such as fp16,gptq")
    workload = parse_json(Workload, arguments.workload, "--workload")
    serving = parse_json(Serving, arguments.serving, "--serving")
    summary = json.dumps(evaluate(store, made_by_this_run(store, names), workload, serving))
    program.write_output("summary", summary)
    print(summary)


def evaluate(
    store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving
) -> dict[str, dict[str, float]]:
    """Evaluate the variants, and record the outcome of each as if it had been evaluated alone.

    Returns:
        The summary of each evaluated variant.

    Raises:
        SlipwayError: fp16 failed, or every variant did, or a variant failed in a way that another attempt may pass.
    """
    failures: dict[str, SlipwayError] = {}
    summaries = {}
    with contextlib.ExitStack() as stack:
        reports = {name: stack.enter_context(_recorded(store, name, failures)) for name in names}
        for name, found, measured in ensure(store, names, workload, serving):
            if isinstance(found, SlipwayError):
                failures[name] = found
                continue
            summaries[name], said = summarize(found), describe(found)
            if measured:
                reports[name].done(said, key=found.key)
            else:
                reports[name].reused(f"{said}, from {found.started_at:%Y-%m-%d %H:%M} UTC", key=found.key)
    for name, error in failures.items():
        if name == REFERENCE or not summaries or isinstance(error, TransientError):
            raise error
        print(f"{name} is left out: {error}", file=sys.stderr)
    return summaries


def made_by_this_run(store: ModelStore, names: Sequence[str]) -> list[str]:
    """*names* without the variants that this run failed to make; the store may hold an older one of that name."""
    run_id = os.environ.get(program.RUN_VARIABLE)
    outcomes = program.outcomes(store.run(run_id)) if run_id else []
    made = {each.variant for each in outcomes if each.stage == "optimize" and each.result != "failed"}
    if missing := [name for name in names if made and name not in made]:
        print(f"not made by this run, so not measured: {', '.join(missing)}", file=sys.stderr)
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


def ensure(store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving) -> list[Found]:
    """Each variant's evaluation under these conditions, measured if there is none yet, or the error that ended it.

    Raises:
        ConfigError: the workload cannot be measured.
    """
    conditions: dict[str, Conditions] = {}
    found: dict[str, Found] = {}
    for name in names:
        try:
            conditions[name] = conditions_of(read_variant(store, name), workload, serving)
        except DamagedModel as error:
            found[name] = (name, error, False)
    found |= _existing(store, conditions)
    if missing := sorted(conditions.keys() - found.keys()):
        with contextlib.ExitStack() as stack:
            for name in missing:
                stack.enter_context(exclusive(store.lock(f"evaluate-{name}"), f"evaluate {name}"))
            # Another process may have measured them while this one waited.
            found |= _existing(store, {name: conditions[name] for name in missing})
            if wanted := {name: conditions[name] for name in names if name not in found}:
                from stages.evaluate.measure import measure

                found |= {name: (name, each, True) for name, each in measure(store, wanted, workload, serving).items()}
    return [found[name] for name in names]


def _existing(store: ModelStore, conditions: Mapping[str, Conditions]) -> dict[str, Found]:
    evaluations = {name: existing(store, name, each.key) for name, each in conditions.items()}
    return {name: (name, each, False) for name, each in evaluations.items() if each}


def existing(store: ModelStore, name: str, key: str) -> Evaluation | None:
    """The evaluation with this key; None if there is none, or if it is damaged and has to be measured again."""
    try:
        found = Evaluation.read(store.evaluation(name))
    except DamagedModel as error:
        print(f"{error}; measuring again", file=sys.stderr)
        return None
    return found if found and found.key == key else None


def describe(evaluation: Evaluation) -> str:
    quality = ", ".join(f"{score.task} {score.value:.3f}" for score in evaluation.quality)
    latency, rate = evaluation.load.e2el_ms.p95, evaluation.load.output_tokens_per_s
    return (
        f"{evaluation.variant}: {quality}; p95 {latency:.0f} ms, {rate:.0f} tokens/s (took {evaluation.seconds:.0f} s)"
    )


def summarize(evaluation: Evaluation) -> dict[str, float]:
    """The four metrics, with their units in the names: Argo's UI shows them beside this task."""
    metrics = evaluation.metrics()
    return {
        "quality": metrics["quality"],
        "e2el_p95_ms": metrics["latency"],
        "output_tokens_per_s": metrics["throughput"],
        "weights_bytes": metrics["memory"],
    }


def _arguments() -> argparse.Namespace:
    lengths = '"prompt_tokens": 512, "output_tokens": 128, "concurrency": 8, "requests": 64'
    parser = argparse.ArgumentParser(
        prog="python -m stages.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""example:
  python -m stages.evaluate --model org/name --variants fp16,gptq --serving '{{"max_model_len": 4096}}' \\
    --workload '{{"name": "chat", "protocol": "thorough", {lengths}, "quality_tasks": ["arc_easy"]}}'

protocols, and their cost per variant in units of one server start + four rounds + quality:
  quick     three rounds on one server, one variant after the other     a little less than 1
  standard  four rounds, the servers of all variants taking turns       1
  thorough  like standard, over three starts of the servers             3
If a machine without GPUs drifts beyond drift_limit (not in quick), the start and the rounds are repeated once.
Only one evaluation measures on a machine at a time, and no variant is optimized meanwhile; others wait.""",
    )
    parser.add_argument("--model", required=True, help="org/name as on the Hub, or a path to a local directory")
    parser.add_argument("--variants", required=True, help="separated by commas: measured one by one, or in turns")
    parser.add_argument("--workload", required=True, help="JSON: see Workload in stages/parts/base/settings.py")
    parser.add_argument("--serving", default="{}", help="JSON: see Serving in stages/parts/base/settings.py")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
