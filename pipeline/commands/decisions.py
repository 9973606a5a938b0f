"""``slipway verify-decision``, ``score`` and ``compare``: verify a decision, change its weights, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.on_the_volume import on_the_volume
from pipeline.commands.options import STORE, JsonOption, ProfileOption, RunArgument, StoreOption, print_result

if TYPE_CHECKING:
    from scoring.profile import Profile
    from stages.parts.records.production import Production
    from stages.select.comparison import Comparison
    from stages.select.verify import Verdict

AssignmentOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="One field of the profile, e.g. weights.latency=0.4."),
]


def register(app: typer.Typer) -> None:
    app.command("verify-decision", epilog="Example: slipway verify-decision latest")(on_the_volume(verify_decision))
    app.command("score", epilog="Example: slipway score latest --profile chatbot --set weights.latency=0.4")(score)
    app.command("compare", epilog="Example: slipway compare 20260102-030405-6a1b latest")(compare)


def verify_decision(name: RunArgument = "latest", store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Recompute a run's metrics, scores and winner from its raw samples, and compare them with what was published.

    Every changed sample, weights file, digest or number is named; the exit code is then 41. The same if
    the decision was made by the rules of another version of Slipway, which is named.
    """
    from pipeline.local.runs import folder
    from stages.parts.base.errors import VerificationFailed
    from stages.select.verify import verify

    run = folder(store, name)
    verdict = verify(run)
    verified = not verdict.findings and not verdict.replayed_by
    document = vars(verdict) | {"run": run.name, "verified": verified}
    if not verified and as_json:
        print_result(document, None, as_json)
        raise typer.Exit(VerificationFailed.exit_code)
    if verdict.findings:
        count = "one thing does" if len(verdict.findings) == 1 else f"{len(verdict.findings)} things do"
        lines = "".join(f"\n    {each}" for each in (*verdict.findings, *(f"note: {note}" for note in verdict.notes)))
        raise VerificationFailed(
            f"the decision of run {run.name} does not follow from what was measured: {count} not agree{lines}",
            hint="to make changed files again, remove them and run again",
        )
    if verdict.replayed_by:
        raise VerificationFailed(
            f"the decision of run {run.name} was made by the rules of Slipway {verdict.replayed_by}, which this "
            f"version can't replay; its samples, figures, weights and documents agree "
            f"({len(verdict.compared)} of them)",
            hint=f"install Slipway {verdict.replayed_by}, and verify it with that version",
        )
    print_result(document, _verified(run.name, verdict), as_json)


def score(
    name: RunArgument = "latest",
    profile: ProfileOption = None,
    assignments: AssignmentOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Score a run's measurements with another profile or other weights. Runs nothing and publishes nothing."""
    from pipeline.local.runs import folder
    from stages.select.decision import decide
    from stages.select.stored import read_stored

    run = folder(store, name)
    given = read_stored(run)
    wanted = _profile(given.basis.profile, profile, assignments or [])
    basis = given.basis.model_copy(update={"profile": wanted.model_dump(mode="json")})
    decision = decide(basis, given.evaluations, given.samples())
    changed = _changes(given.decision, decision)
    document = {
        "run": run.name,
        "decision": decision.model_dump(mode="json", exclude={"run", "release"}),
        "published": given.decision and given.decision.model_dump(mode="json"),
        "changes": changed,
    }
    print_result(document, _what_if(run.name, decision, changed), as_json)


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="A run's id, or its beginning.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="A run's id, or its beginning, or latest.")],
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: settings, versions, hardware, metrics beyond noise, the winner and why."""
    from pipeline.local.runs import folder
    from stages.select.comparison import compare as compared
    from stages.select.stored import read_stored

    runs = [folder(store, name) for name in (first, second)]
    found = compared(*(read_stored(run) for run in runs))
    document = found.model_dump(mode="json") | {"runs": [run.name for run in runs]}
    print_result(document, _beside(runs[0].name, runs[1].name, found), as_json)


def _profile(published: dict[str, Any], name: str | None, assignments: list[str]) -> Profile:
    """The named profile, else the run's own, with fields set. A field's path may begin with ``profile.``.

    Raises:
        UnknownName, ConfigError: every mistake at once.
    """
    from pipeline.settings.config import assign, named
    from scoring.profile import REPLACED, Profile
    from stages.parts.base.settings import parse

    own = {field: value for field, value in published.items() if field not in REPLACED}
    data: dict[str, Any] = {"profile": named("profile", name, Path()) if name else own}
    for assignment in assignments:
        assign(data, assignment if assignment.startswith("profile.") else f"profile.{assignment}")
    return parse(Profile, data["profile"], "the profile")


def _changes(published: Production | None, decision: Production) -> list[str]:
    """The differences from what was published, one line each."""
    if published is None:
        return [f"no variant could be chosen; now {decision.winner} is"]
    found = []
    if published.winner != decision.winner:
        found.append(f"winner: {published.winner} → {decision.winner}")
    if published.outcome != decision.outcome:
        found.append(f"outcome: {published.outcome} → {decision.outcome}")
    for metric, share in decision.weights.items():
        if abs(share - published.weights[metric]) > 1e-9:
            found.append(f"weight of {metric}: {published.weights[metric]:.0%} → {share:.0%}")
    if published.rules != decision.rules:
        found.append(f"rules: those of Slipway {published.slipway} → those of {decision.slipway}")
    ours = set(decision.profile) - {"name", "description", "weights"}
    rest = [name for name in decision.profile if name in ours and published.profile.get(name) != decision.profile[name]]
    found += [f"{name}: {published.profile.get(name, 'none')} → {decision.profile[name]}" for name in rest]
    before = {candidate.variant: candidate for candidate in published.candidates}
    for now in decision.candidates:
        then = before[now.variant]
        if then.score is not None and now.score is not None and abs(now.score - then.score) > 5e-4:
            found.append(f"score of {now.variant}: {then.score:.3f} → {now.score:.3f}")
        if bool(then.excluded) != bool(now.excluded):
            found.append(f"{now.variant}: {f'out, {now.excluded}' if now.excluded else 'can be chosen'}")
    return found


def _what_if(run: str, decision: Production, changed: list[str]) -> Any:
    from rich.console import Group

    from pipeline.runs.tables import score_table

    marked = [f"changed: {line}" for line in changed] or ["unchanged: it is what was published"]
    lead = f"the measurements of run {run}, scored again; nothing is published\n"
    return Group(lead, score_table(decision), "", decision.reason, *decision.notes, *cost_lines(decision), "", *marked)


def cost_lines(decision: Production) -> list[str]:
    """The cost of a million output tokens with each variant, and the rate; none without a price."""
    from scoring.metrics import span

    basis = {"goodput": "at the goodput, within the latency targets", "throughput": "at the measured throughput"}
    return [
        f"{candidate.variant}: {candidate.cost.value:.4g} {candidate.cost.currency} "
        f"({span(candidate.cost.low, candidate.cost.high)}) for "
        f"a million output tokens, {basis[candidate.cost.basis]} of {candidate.cost.tokens_per_s:,.0f} tokens/s"
        for candidate in decision.candidates
        if candidate.cost
    ]


def _verified(run: str, verdict: Verdict) -> str:
    what = f"the decision of run {run} for {verdict.winner} follows"
    if verdict.nobody:
        what = f"that run {run} could choose no variant ({verdict.nobody}) follows"
    said = f"verified: {what} from its samples; {len(verdict.compared)} files and documents agree"
    said += "".join(f"\nnote: {note}" for note in verdict.notes)
    if verdict.not_recomputed:
        said += "\nnot recomputed, because lm-eval aggregates it: " + ", ".join(verdict.not_recomputed)
    return said


def _beside(first: str, second: str, found: Comparison) -> Any:
    from rich.console import Group
    from rich.table import Table

    from scoring.metrics import shown

    settings = Table("Setting", first, second, box=None, pad_edge=False, header_style="dim")
    for setting in found.settings:
        settings.add_row(setting.what, setting.before, setting.after)
    metrics = Table("Variant", "Metric", first, second, "Change", box=None, pad_edge=False, header_style="dim")
    for change in found.metrics:
        share = f"{change.change:+.1%}" if change.change is not None else "–"
        note = "" if change.beyond_noise is None else "" if change.beyond_noise else " (within noise)"
        metrics.add_row(
            change.variant,
            change.metric,
            shown(change.metric, change.before),
            shown(change.metric, change.after),
            share + note,
        )
    same = [] if found.settings else ["settings, versions and hardware are the same"]
    return Group(*same, *([settings] if found.settings else []), "", metrics, "", *found.notes, "", *found.winners)
