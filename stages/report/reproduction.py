"""How to repeat a run: the command, the run's settings in a file, and the keys of what was decided."""

from __future__ import annotations

import hashlib
import shlex
from typing import Final

from stages.parts.base.workload import Workload
from stages.parts.records.production import Production
from stages.report.cells import Fact
from stages.report.run_report import RunReport

SETTINGS_FILE: Final = "settings.yaml"
DIGESTS: Final = {"tasks_path": "tasks_digest", "trace": "trace_digest", "divergence_text": "divergence_digest"}
"""The fields of a workload that name files, and the fields of an evaluation's workload with their digests."""


def facts(report: RunReport, decision: Production) -> list[Fact]:
    seed = decision.workload.get("seed", Workload.model_fields["seed"].default)
    seeds = f"{seed} for the prompts; resampling is seeded too, so the same samples give the same decision"
    check = f"slipway verify-decision {report.run}"
    settings = settings_file(report)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return [
        *([Fact("Settings", f"{SETTINGS_FILE}, sha256", code=digest)] if settings else []),
        Fact("Seeds", seeds),
        Fact("Decision", code=decision.key),
        Fact("Release", code=decision.release),
        Fact("Check it", code=check, rest=" recomputes every number from the raw samples"),
    ]


def settings_file(report: RunReport) -> str:
    """Write the run's settings, as ``slipway run --config`` reads them, with comments that tell the digests of files.
    Empty where the settings are not known, and ``command`` does not apply."""
    import yaml

    if not report.settings:
        return ""
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
