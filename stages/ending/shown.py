"""Shows on a run's Workflow what came of it: in Argo's user interface title and description are read first."""

from __future__ import annotations

import json
from typing import Any, Final

from stages.parts.base.errors import SlipwayError
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore
from stages.parts.cluster.api import connect
from stages.parts.cluster.kinds import WORKFLOWS
from stages.parts.records.production import Standing

TITLE: Final = "workflows.argoproj.io/title"
DESCRIPTION: Final = "workflows.argoproj.io/description"


def show(store: ModelStore, run: str, status: str) -> None:
    """Write it to the Workflow *run* of this pod's cluster. A run does not fail because that can't be done."""
    try:
        report = json.loads((store.run(run) / "report.json").read_text(encoding="utf-8"))
        place = (store.run(run) / "report.html").relative_to(store.root)
        annotations = told(store.model, status, report, str(place))
        connect().merge(WORKFLOWS, run, {"metadata": {"annotations": annotations}})
    except (SlipwayError, OSError, ValueError) as error:
        say(f"ending: the workflow does not show what came of it: {error}")


def told(model: str, status: str, report: dict[str, Any], place: str) -> dict[str, str]:
    """Describe a run for Argo in Markdown, by its ``report.json`` and the *place* of the report's page in the store."""
    decision: dict[str, Any] = report.get("decision") or {}
    failed = next((outcome for outcome in report["outcomes"] if outcome["result"] == "failed"), None)
    title, lines = model, []
    if decision:
        standing = decision.get("standing")
        promotion = Standing.model_validate(standing).promotion if standing else "promoted"
        kept = "" if promotion == "promoted" else f", {promotion}"
        title += f" → {decision['winner']}{kept}"
        lines.append(f"**{decision['winner']}** ({decision['outcome']}{kept}): {decision['reason']}")
    if status != "Succeeded":
        title += f" ({status.lower()})"
        why = f": {failed['stage']}: {failed['reason']}" if failed else ""
        lines.append(f"**{status}**{why}")
    lines.append(
        f"The report: `{place}` on the volume of the store, and the output `report` where there is a repository."
    )
    return {TITLE: title, DESCRIPTION: "\n\n".join(lines)}
