"""evaluate: serve one variant with vLLM and measure its latency, throughput, memory and quality, or find that this
very variant was measured already under the same conditions."""

from __future__ import annotations

import argparse
import json
import sys

from stages import program
from stages.errors import DamagedModel, InvalidName
from stages.evaluate.conditions import gather, read_variant
from stages.hub import model_id
from stages.records import Evaluation
from stages.settings import Serving, Workload, parse_json
from stages.store import NAME, ModelStore, exclusive, store_root


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), model_id(arguments.model))
    if not NAME.match(arguments.variant):
        raise InvalidName(f"{arguments.variant!r} is not a variant's name", hint="fp16, awq or gptq")
    workload = parse_json(Workload, arguments.workload, "--workload")
    serving = parse_json(Serving, arguments.serving, "--serving")
    with program.outcome(store, "evaluate", arguments.variant) as report:
        evaluation, measured = ensure(store, arguments.variant, workload, serving)
        said = describe(evaluation)
        if measured:
            report.done(said, key=evaluation.key)
        else:
            report.reused(f"{said}, from {evaluation.started_at:%Y-%m-%d %H:%M} UTC", key=evaluation.key)
    summary = json.dumps(summarize(evaluation))
    program.write_output("summary", summary)
    print(summary)


def ensure(store: ModelStore, name: str, workload: Workload, serving: Serving) -> tuple[Evaluation, bool]:
    """The evaluation under these conditions, and whether it had to be made.

    Raises:
        DamagedModel: the variant is missing, or is not what its manifest says.
        ConfigError: the workload can't be measured.
        ServerFailed, MeasurementFailed, HubUnavailable: nothing was written.
    """
    conditions = gather(read_variant(store, name), workload, serving)
    if found := existing(store, name, conditions.key):
        return found, False
    from stages.evaluate.measure import measure

    with exclusive(store.lock(f"evaluate-{name}"), f"evaluate {name}"):
        # Another process may have measured it while this one waited.
        if found := existing(store, name, conditions.key):
            return found, False
        return measure(store, name, conditions, workload, serving), True


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
    workload = '{"name": "chat", "prompt_tokens": 512, "output_tokens": 128, "concurrency": 8, "requests": 128,'
    parser = argparse.ArgumentParser(
        prog="python -m stages.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""example:
  python -m stages.evaluate --model org/name --variant gptq \\
    --workload '{workload} "quality_tasks": ["arc_easy"]}}' --serving '{{"max_model_len": 4096}}'""",
    )
    parser.add_argument("--model", required=True, help="org/name as on the Hub, or a path to a local directory")
    parser.add_argument("--variant", required=True, help="fp16, awq or gptq")
    parser.add_argument("--workload", required=True, help="JSON: see Workload in stages/settings.py")
    parser.add_argument("--serving", default="{}", help="JSON: see Serving in stages/settings.py")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
