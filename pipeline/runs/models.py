"""The models of a store as a team sees them: what serves and since when, what ran last, and what waits for whom."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from pipeline.runs.engine import PipelineRun
from stages.parts.base.errors import SlipwayError
from stages.parts.base.store import ModelStore, Record
from stages.parts.records.production import Production
from stages.parts.records.rollout import under_way
from stages.parts.records.watch import seen
from stages.parts.releases.release import current_release, history
from stages.report import cells
from stages.report.page import rendered
from stages.rollout.target import Target

HEADINGS: Final = (
    *("Model", "Owner", "Release", "Since", "Outcome", "Health", "Replicas", "Cards", "Per hour"),
    *("Last run", "Started", "Waits for"),
)


class ModelRow(Record):
    """A model; *cards* and *price_per_hour* are those of all its servers, and *page* is its last run's."""

    model: str
    owner: str = ""
    release: str | None = None
    since: datetime | None = None
    outcome: str = ""
    health: str = "not served"
    servers: int = 0
    up: int = 0
    cards: str = ""
    price_per_hour: float | None = None
    currency: str = ""
    run: str = ""
    phase: str = ""
    started_at: datetime | None = None
    page: str = ""
    waits_for: str = ""
    """The rollout under way, or what a person has to decide, and the command."""

    def after(self, run: PipelineRun | None, owner: str) -> ModelRow:
        """Add the owner and the last run."""
        if run is None:
            return self.model_copy(update={"owner": owner})
        state = run.state
        suspended = any(node.kind == "Suspend" and node.phase == "Running" for node in state.nodes)
        waits_for = f"approval: slipway resume {run.id}" if suspended else self.waits_for
        ran = {"run": run.id, "phase": state.phase, "started_at": state.started_at, "page": run.link or ""}
        return self.model_copy(update={"owner": owner, "waits_for": waits_for, **ran})

    @property
    def columns(self) -> tuple[str, ...]:
        """What a person reads, by ``HEADINGS``."""
        since, started = (f"{at.astimezone():%Y-%m-%d %H:%M}" if at else "–" for at in (self.since, self.started_at))
        price = "–" if self.price_per_hour is None else f"{self.price_per_hour:.2f} {self.currency}"
        replicas = f"{self.up} of {self.servers}" if self.servers else "–"
        run = f"{self.run} {self.phase}".strip()
        shown = (self.model, self.owner, self.release, since, self.outcome, self.health, replicas, self.cards, price)
        return tuple(text or "–" for text in (*shown, run, started, self.waits_for))


def row_of(store: ModelStore, connect: Callable[[], Target]) -> ModelRow:
    """Read what the store knows of a model, and what its platform serves; one that can't be asked is the health."""
    release = current_release(store)
    decision = Production.read_if_intact(store.production_metrics) if release else None
    moves = [move for move in history(store) if (move.release, move.result) == (release, "promoted")]
    moved = [move.ended_at for move in moves if move.kind != "settings"]
    row: dict[str, Any] = {"model": store.model, "release": release, "outcome": decision.ended if decision else ""}
    row["since"] = next(reversed(moved), decision.decided_at if decision else None)
    if journal := under_way(store):
        approval = f"approval of {journal.release}: slipway rollout promote {store.model}"
        waits = journal.state == "awaiting approval"
        row["waits_for"] = approval if waits else f"the rollout of {journal.release}, at {journal.share}"
    try:
        target = connect()
        if serves := target.split().stable:
            row["servers"], row["up"] = servers, up = target.servers(serves)
            alarms = [look.verdict for look in seen(store).of(serves)[-1:] if look.alarms]
            row["health"] = ", ".join(["up" if up == servers else "degraded", *alarms])
            if decision and decision.hardware.gpus:
                gpus, card = servers * target.serving_of(serves).tensor_parallel_size, decision.hardware.gpus[0]
                row["cards"] = f"{gpus} × {card.partition(',')[0]}"
            if decision and decision.price:
                row |= {"price_per_hour": servers * decision.price.per_hour, "currency": decision.price.currency}
    except SlipwayError as error:
        row["health"] = str(error)
    return ModelRow(**row)


def page_of(rows: Sequence[ModelRow], file: Path) -> str:
    """Render the rows as a HTML page that lies at *file*, with a link from each model to its last run."""
    linked = []
    for row in rows:
        model, *others = row.columns
        to = os.path.relpath(row.page, file.absolute().parent) if row.page.startswith("/") else row.page
        link = Markup('<a href="%s">%s</a>') % (to, model)
        linked.append(cells.row(cells.Cell(mark=link) if to else cells.cell(model), *map(cells.cell, others)))
    models = cells.Table("models", cells.heads(*HEADINGS), tuple(linked))
    written_at = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    return rendered("models.html.jinja", {"models": models, "written_at": written_at})
