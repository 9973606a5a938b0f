"""How to repeat a run: the command, its settings in a file, and the keys of what it decided."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from typing import Final

from stages.parts.base.workload import Workload
from stages.parts.records.production import Production
from stages.report.cells import Fact
from stages.report.run_report import RunReport

SETTINGS_FILE: Final = "settings.yaml"
DIGESTS: Final = {"tasks_path": "tasks_digest", "trace": "trace_digest", "divergence_text": "divergence_digest"}
"""The fields of a workload that name files, and the fields of an evaluation's workload with their digests."""


@dataclass(frozen=True)
class Reproduction:
    command: str
    settings_name: str
    settings: str
    """The content of the file; empty where the run's settings are not known, and the command does not apply."""
    facts: tuple[Fact, ...]


def reproduction(report: RunReport, decision: Production) -> Reproduction:
    settings = settings_file(report) if report.settings else ""
    seed = decision.workload.get("seed", Workload.model_fields["seed"].default)
    seeds = f"{seed} for the prompts; resampling is seeded too, so the same samples give the same decision"
    facts = [
        Fact("Seeds", seeds),
        Fact("Decision", code=decision.key),
        Fact("Release", code=decision.release),
        Fact(
            "Check it",
            code=f"slipway verify-decision {report.run}",
            rest=" recomputes every number from the raw samples",
        ),
    ]
    if settings:
        digest = hashlib.sha256(settings.encode()).hexdigest()
        facts.insert(0, Fact("Settings", f"{SETTINGS_FILE}, sha256", code=digest))
    return Reproduction(command(report, decision), SETTINGS_FILE, settings, tuple(facts))


def settings_file(report: RunReport) -> str:
    """Write the run's settings, as ``slipway run --config`` reads them, with comments that tell the digests of
    files."""
    import yaml

    workload = report.decision.workload if report.decision else {}
    digests = {f"workload.{field}": workload.get(digest) for field, digest in DIGESTS.items()}
    calibrated = [variant.calibration_digest for variant in report.variants if variant.calibration_digest]
    digests["optimize.calibration.text"] = calibrated[0] if calibrated else None
    comments = [f"# {field}: sha256 {digest}\n" for field, digest in digests.items() if digest]
    return "".join(comments) + yaml.safe_dump(report.settings, sort_keys=False, allow_unicode=True)


def command(report: RunReport, decision: Production) -> str:
    """Write the command that repeats the run with its settings in a file."""
    # What `slipway run` was given: a name on the Hub, or a local directory.
    source = report.base.source if report.base else ""
    model = source.removeprefix("local:") if source.startswith("local:") else report.model
    words = ["slipway", "run", model, "--config", SETTINGS_FILE]
    if not decision.model.startswith("local/"):
        words += ["--revision", decision.commit]
    if decision.price:
        price = decision.price
        words += ["--set", f"platform.price_per_hour={price.per_hour}", "--set", f"platform.currency={price.currency}"]
    return shlex.join(words)
