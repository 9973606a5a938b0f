"""evaluate: serve variants with vLLM and measure their latency, throughput, memory and quality, or find that these
very variants were measured already under the same conditions.

Several variants are measured in turns, their servers side by side, if the workload says so and they fit. Each has an
outcome of its own; one that fails is left out and the others go on."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from stages.evaluate.conditions import Conditions, gather, read_variant
from stages.parts.base import program
from stages.parts.base.errors import DamagedModel, InvalidName, SlipwayError, TransientError
from stages.parts.base.settings import Serving, Workload, parse_json
from stages.parts.base.store import NAME, ModelStore, exclusive, store_root
from stages.parts.model.name import ModelName
from stages.parts.records.evaluation import Evaluation

REFERENCE: Final = "fp16"
Found = tuple[str, Evaluation | SlipwayError, bool]
"""A variant, its evaluation or what it failed at, and whether it was measured now."""


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), ModelName.parse(arguments.model).id)
    names = [arguments.variant] if arguments.variant else list(dict.fromkeys(arguments.variants.split(",")))
    for name in names:
        if not NAME.match(name):
            raise InvalidName(f"{name!r} is not a variant's name", hint="fp16, awq or gptq")
    workload = parse_json(Workload, arguments.workload, "--workload")
    serving = parse_json(Serving, arguments.serving, "--serving")
    if arguments.variants:
        names = made_by_this_run(store, names)
    summaries = evaluate(store, names, workload, serving)
    summary = json.dumps(summaries[arguments.variant] if arguments.variant else summaries)
    program.write_output("summary", summary)
    print(summary)


def evaluate(
    store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving
) -> dict[str, dict[str, float]]:
    """Each variant's outcome is recorded as its own, as if each had been evaluated alone.

    Returns:
        The summary of each evaluated variant.

    Raises:
        SlipwayError: what fp16, or every variant, failed at; or a failure that may pass, so that it is tried again.
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
    """*names* without those that this run could not make: an older one may lie in their place."""
    run_id = os.environ.get(program.RUN_VARIABLE)
    outcomes = program.outcomes(store.run(run_id)) if run_id else []
    made = {each.variant for each in outcomes if each.stage == "optimize" and each.result != "failed"}
    if missing := [name for name in names if made and name not in made]:
        print(f"not made by this run, and not measured: {', '.join(missing)}", file=sys.stderr)
    return [name for name in names if name not in missing]


@contextlib.contextmanager
def _recorded(store: ModelStore, name: str, failures: Mapping[str, SlipwayError]) -> Iterator[program.Report]:
    """As ``program.outcome``; the variant's own failure ends here."""
    try:
        with program.outcome(store, "evaluate", name) as report:
            yield report
            if name in failures:
                raise failures[name]
    except SlipwayError as error:
        if failures.get(name) is not error:
            raise


def ensure(store: ModelStore, names: Sequence[str], workload: Workload, serving: Serving) -> list[Found]:
    """Each variant's evaluation under these conditions, and whether it had to be made; or what it failed at.

    Raises:
        ConfigError: the workload can't be measured.
    """
    conditions: dict[str, Conditions] = {}
    found: dict[str, Found] = {}
    for name in names:
        try:
            conditions[name] = gather(read_variant(store, name), workload, serving)
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
    """The evaluation of this key; one that can't be read is measured again."""
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
    """The four metrics, with their units in the names: what Argo's UI shows of this task."""
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

protocols, and what they cost in units of one server's start + four rounds + quality, per variant:
  quick     three rounds on one server, one variant after the other     a little less than 1
  standard  four rounds, the servers of all variants taking turns       1
  thorough  as standard, over three starts of the servers               3
A machine without GPUs that drifts beyond drift_limit (not in quick) costs the start and the rounds once more.
One evaluation at a time measures on a machine, and nothing is optimized meanwhile: the others wait for their turn.""",
    )
    parser.add_argument("--model", required=True, help="org/name as on the Hub, or a path to a local directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--variant", help="fp16, awq or gptq")
    which.add_argument("--variants", help="several, apart by commas: as --variant for each, or in turns")
    parser.add_argument("--workload", required=True, help="JSON: see Workload in stages/parts/base/settings.py")
    parser.add_argument("--serving", default="{}", help="JSON: see Serving in stages/parts/base/settings.py")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
