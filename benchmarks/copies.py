"""Whether two copies of one variant are found equivalent on this machine, by the whole measurement: real servers of the
demo's model under the demo's settings, with a larger budget.

    make bench-copies
    python -m benchmarks.copies --budget 20 --store .copies

What was measured stays in the store: the same command with a larger budget goes on from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import numpy as np

from pipeline.settings.config import load
from scoring.choice import judge
from scoring.profile import Profile
from stages.parts.base.files import canonical_json
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE, answer_sigterm
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.machine.process import Contained
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.variant import VARIANT
from stages.parts.samples.evidence import Measured, evidence_of
from stages.parts.samples.lines import read_samples
from tests.demo import DEMO, MODEL
from tests.serving import variant_of

COPIES: Final = ("fp16", "copy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60, metavar="MINUTES")
    parser.add_argument("--store", type=Path, default=Path(".copies"), metavar="FOLDER")
    arguments = parser.parse_args()
    answer_sigterm()
    store = ModelStore(arguments.store.absolute(), MODEL)
    for name in COPIES:
        if not (store.optimized(name) / VARIANT).exists():
            shutil.rmtree(store.optimized(name), ignore_errors=True)
            variant_of(store, name, DEMO / "model")
    config = load(DEMO / "slipway.yaml")
    workload = config.workload.model_copy(update={"budget_minutes": arguments.budget})
    command = [sys.executable, "-m", "stages.evaluate", "--model", MODEL, "--variants", ",".join(COPIES)]
    command += ["--workload", canonical_json(workload), "--serving", canonical_json(config.serving.pinned())]
    command += ["--profile", canonical_json(config.profile)]
    variables = {name: value for name, value in os.environ.items() if name not in (RUN_VARIABLE, OUTPUTS_VARIABLE)}
    try:
        with Contained(command, environment=variables | {STORE_VARIABLE: str(store.root)}) as evaluating:
            status = evaluating.wait()
    except KeyboardInterrupt:
        return 130
    if status == 0:
        show(store, config.profile)
    return status


def show(store: ModelStore, profile: Profile) -> None:
    evaluations = {name: evaluation for name in COPIES if (evaluation := Evaluation.read(store.evaluation(name)))}
    measured = {}
    for name, evaluation in evaluations.items():
        samples = read_samples(store.evaluation(name).with_name(name + SAMPLES_SUFFIX), evaluation)
        measured[name] = Measured.of(evaluation, samples)
    evidence, looks = evidence_of(measured), evaluations[COPIES[0]].looks
    outcome = judge(evidence, profile, times=looks).outcome
    latency, throughput = 100 * np.sqrt(np.diag(evidence.speed.residual))
    print(f"\n{outcome} after {len(looks)} blocks")
    print(f"noise of a start: {latency:.1f}% of the latency, {throughput:.1f}% of the throughput")


if __name__ == "__main__":
    sys.exit(main())
