"""Measure variants together on this machine, which they have to themselves meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scoring.profile import Profile
from stages.evaluate.blocks import Blocks
from stages.evaluate.conditions import Conditions
from stages.evaluate.load import check_lengths
from stages.evaluate.quality import check_tasks
from stages.evaluate.reference import ask_elsewhere
from stages.evaluate.results import UNCOMPARED, Found, Result, existing, keep_refusal, restore
from stages.evaluate.session import Session
from stages.evaluate.subject import Subject
from stages.evaluate.trace import load_trace
from stages.parts.base.errors import MeasurementFailed, SlipwayError
from stages.parts.base.log import say
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import serving_here
from stages.parts.machine.lock import alone


def measure(
    store: ModelStore, conditions: Mapping[str, Conditions], workload: Workload, serving: Serving, profile: Profile
) -> dict[str, Found]:
    """Measure the variants, continuing what the store holds of them under the same conditions. Raise ConfigError if the
    workload cannot be measured; this is found before anything is started."""
    include_defaults = check_tasks(workload)
    first = store.optimized(next(iter(conditions)))
    trace = load_trace(workload.trace, first, workload.seed) if workload.trace else None
    check_lengths(first, workload, serving, trace)
    with alone(f"evaluate {', '.join(conditions)} of {store.model}"):
        run_id = os.environ.get(RUN_VARIABLE)
        # Outside a run, a folder that stays after a failure.
        logs = store.run(run_id) / "logs" if run_id else Path(tempfile.mkdtemp(prefix="slipway-evaluate-"))
        logs.mkdir(parents=True, exist_ok=True)
        beside = tuple(endpoint.model for endpoint in serving_here(store.root))
        for model in beside:
            say(f"note: {model} is being served on this machine and shares it with this measurement")
        session = Session(store, workload, serving, profile, trace, include_defaults, beside, logs)
        subjects = [Subject(name, store.optimized(name), conditions[name], session) for name in conditions]
        earlier, asked = restore(store, subjects), ask_elsewhere(session) if serving.reference else None
        Blocks(session, subjects, earlier, asked).run()
    if not run_id and not any(subject.failure for subject in subjects):
        shutil.rmtree(logs)
    return {subject.name: (result(subject), subject.measured_now) for subject in subjects}


def result(subject: Subject) -> Result | SlipwayError:
    """Return what became of a variant, and write it down if it was refused."""
    if subject.failure:
        return subject.failure
    if subject.refused:
        return keep_refusal(subject)
    evaluation = existing(subject.session.store, subject.name, subject.conditions.key)
    return evaluation or MeasurementFailed(UNCOMPARED)
