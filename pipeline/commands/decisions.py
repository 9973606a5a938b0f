"""``slipway verify-decision``, ``score``, ``compare`` and ``samples``: what follows from the samples of runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands import options as common
from pipeline.runs.engine import Printout, plain_table
from scoring.metrics import shown, span
from stages.parts.base.errors import ConfigError, VerificationFailed

if TYPE_CHECKING:
    from scoring.profile import Profile
    from stages.parts.records.production import Production
    from stages.select.comparison import RunComparison
    from stages.select.verify import Verification

AssignmentOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="One field of the profile, e.g. weights.latency=0.4."),
]

commands = common.Commands()


@commands.add("verify-decision latest")
def verify_decision(name: common.RunArgument = "latest", *, volume: common.VolumeOptions) -> Printout:
    """Recompute a run's decision from its raw samples.

    Recomputes the metrics, scores and winner, and compares them with what was published. Every changed sample, weights
    file, digest or number is named; the exit code is then 41. It is the same if the decision was made by the rules of
    another version of Slipway, which is named.
    """
    from pipeline.local.runs import folder
    from stages.select.verify import verify

    run = folder(volume.store, name)
    verdict = verify(run)
    verified = not verdict.findings and not verdict.replayed_by
    document = vars(verdict) | {"run": run.name, "verified": verified}
    if verdict.findings:
        count = "one thing does" if len(verdict.findings) == 1 else f"{len(verdict.findings)} things do"
        findings = (*verdict.findings, *(f"note: {note}" for note in verdict.notes))
        lines = "".join(f"\n    {finding}" for finding in findings)
        failure = VerificationFailed(
            f"the decision of run {run.name} does not follow from what was measured: {count} not agree{lines}",
            hint="to make changed files again, remove them and run again",
        )
    elif verdict.replayed_by:
        failure = VerificationFailed(
            f"the decision of run {run.name} was made by the rules of Slipway {verdict.replayed_by}, which this "
            f"version can't replay; its samples, figures, weights and documents agree "
            f"({len(verdict.compared)} of them)",
            hint=f"install Slipway {verdict.replayed_by}, and verify it with that version",
        )
    else:
        return Printout(document, _verified(run.name, verdict))
    return Printout(document, None, failure)


@commands.add("score latest --profile chatbot --set weights.latency=0.4")
def score(
    name: common.RunArgument = "latest",
    profile: common.ProfileOption = None,
    assignments: AssignmentOption = None,
    *,
    options: common.StoreOptions,
) -> Printout:
    """Score a run again, with another profile or weights.

    Runs nothing and publishes nothing.
    """
    from rich.console import Group

    from pipeline.local.runs import folder
    from pipeline.runs.tables import score_table
    from stages.select.decision import decide
    from stages.select.stored import read_stored

    run = folder(options.store, name)
    stored = read_stored(run)
    other = _profile(stored.basis.profile, profile, assignments or []).for_format(stored.basis.base.format)
    basis = stored.basis.model_copy(update={"profile": other.model_dump(mode="json")})
    decision = decide(basis, stored.evaluations, stored.samples(), stored.asked())
    changed = _changes(stored.decision, decision)
    document = {
        "run": run.name,
        "decision": decision.model_dump(mode="json", exclude={"run", "release"}),
        "published": stored.decision and stored.decision.model_dump(mode="json"),
        "changes": changed,
    }
    marked = [f"changed: {line}" for line in changed] or ["unchanged: it is what was published"]
    lead = f"the measurements of run {run.name}, scored again; nothing is published\n"
    reasons = [decision.reason, *decision.notes, *cost_lines(decision)]
    return Printout(document, Group(lead, score_table(decision), "", *reasons, "", *marked))


@commands.add("compare 20260102-030405-6a1b latest")
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="A run's id, or its beginning.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="A run's id, or its beginning, or latest.")],
    *,
    options: common.StoreOptions,
) -> Printout:
    """Compare two runs.

    Compares their settings, versions, hardware and metrics, says which differences exceed the noise, and names the
    winners and why.
    """
    from pipeline.local.runs import folder
    from stages.select.comparison import compare as compared
    from stages.select.stored import read_stored

    runs = [folder(options.store, name) for name in (first, second)]
    comparison = compared(*(read_stored(run) for run in runs))
    document = comparison.model_dump(mode="json") | {"runs": [run.name for run in runs]}
    return Printout(document, _comparison(runs[0].name, runs[1].name, comparison))


class _ByRun(common.CommandGroup):
    """The commands for samples, of which the first is meant where a run's name takes the place of a command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args != ["--help"] and (not args or args[0] not in self.commands):
            args = [*list(self.commands)[:1], *args]
        return super().parse_args(ctx, args)


samples_commands = common.Commands(
    "Print the samples of a run; carry answers elsewhere.",
    "samples latest --parquet samples.parquet",
    name="samples",
    cls=_ByRun,
    no_args_is_help=False,
)
commands.add_typer(samples_commands)


@samples_commands.add("samples latest --parquet samples.parquet", "table")
def samples_table(
    name: common.RunArgument = "latest",
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV to this file.")] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write Parquet to this file; needs pyarrow.")
    ] = None,
    *,
    options: common.StoreOptions,
) -> None:
    """Print the raw samples of a run as CSV.

    For a notebook, write them to files instead.

    A row is a request of the load or an item of a quality task, with its variant, kind and block; blocks count the
    starts of each server.
    """
    from pipeline.local.runs import folder
    from stages.parts.samples.table import table
    from stages.select.stored import read_stored

    if parquet and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet is written by pyarrow, which is not installed", hint="pip install pyarrow, or --csv")
    rows = table(read_stored(folder(options.store, name)).samples())
    if parquet:
        rows.to_parquet(parquet, index=False)
    if csv or not parquet:
        rows.to_csv(csv or sys.stdout, index=False)


@samples_commands.add("samples export org/name > answers.jsonl", "export")
def samples_export(model: common.ModelArgument, *, volume: common.VolumeOptions) -> None:
    """Print the reference's answers to the quality questions.

    They stand for the reference on a machine where it does not fit: by them is judged what the other variants lose.
    """
    from stages.parts.samples.lines import export_answers

    if not (text := export_answers(volume.of_model(model))):
        hint = "a run that measures the reference keeps them: slipway run"
        raise ConfigError(f"no answers of {model} are kept", hint=hint)
    sys.stdout.write(text)


@samples_commands.add("samples import answers.jsonl", "import")
def samples_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What samples export printed.", exists=True)],
    *,
    options: common.StoreOptions,
) -> Printout:
    """Keep a reference's answers that were exported from another store.

    For a cluster, run it where the store's volume is mounted.
    """
    from stages.parts.samples.lines import import_answers

    imported = import_answers(options.store, file.read_text())
    rows = [{name: getattr(each, name) for name in ("model", "commit", "variant", "origin")} for each in imported]
    return Printout(rows, "\n".join(f"kept: {row['variant']} of {row['model']}, {row['origin']}" for row in rows))


def _profile(published: dict[str, Any], name: str | None, assignments: list[str]) -> Profile:
    """Return the named profile, else the run's own, with fields set. A field's path may begin with ``profile.``."""
    from pipeline.settings.config import assign, named
    from scoring.profile import Profile
    from stages.parts.base.settings import parse

    data: dict[str, Any] = {"profile": named("profile", name, Path()) if name else published}
    for assignment in assignments:
        assign(data, assignment if assignment.startswith("profile.") else f"profile.{assignment}")
    return parse(Profile, data["profile"], "the profile")


def _changes(published: Production | None, decision: Production) -> list[str]:
    """Return the differences from what was published, one line each."""
    from scoring.profile import Profile

    if published is None:
        return [f"no variant could be chosen; now {decision.winner} is"]
    pairs = {name: (getattr(published, name), getattr(decision, name)) for name in ("winner", "outcome")}
    changes = [f"{name}: {old} → {new}" for name, (old, new) in pairs.items() if old != new]
    for metric, share in decision.weights.items():
        if abs(share - published.weights[metric]) > 1e-9:
            changes.append(f"weight of {metric}: {published.weights[metric]:.0%} → {share:.0%}")
    if published.rules != decision.rules:
        changes.append(f"rules: those of Slipway {published.slipway} → those of {decision.slipway}")
    earlier = Profile.model_validate(published.profile).model_dump(mode="json")  # with fields that came later
    changes += [
        f"{name}: {earlier.get(name, 'none')} → {value}"
        for name, value in decision.profile.items()
        if name not in ("name", "description", "weights") and earlier.get(name) != value
    ]
    former = {candidate.variant: candidate for candidate in published.candidates}
    for new in decision.candidates:
        old = former[new.variant]
        if old.score is not None and new.score is not None and abs(new.score - old.score) > 5e-4:
            changes.append(f"score of {new.variant}: {old.score:.3f} → {new.score:.3f}")
        if bool(old.excluded) != bool(new.excluded):
            changes.append(f"{new.variant}: {f'out, {new.excluded}' if new.excluded else 'can be chosen'}")
    return changes


def cost_lines(decision: Production) -> list[str]:
    """Return the cost of a million output tokens with each variant, and the rate; none without a price."""
    basis = {"goodput": "at the goodput, within the latency targets", "throughput": "at the measured throughput"}
    return [
        f"{candidate.variant}: {candidate.cost.value:.4g} {candidate.cost.currency} "
        f"({span(candidate.cost.low, candidate.cost.high)}) for "
        f"a million output tokens, {basis[candidate.cost.basis]} of {candidate.cost.tokens_per_s:,.0f} tokens/s"
        for candidate in decision.candidates
        if candidate.cost
    ]


def _verified(run: str, verdict: Verification) -> str:
    follows = f"the decision of run {run} for {verdict.winner} follows"
    if verdict.nobody:
        follows = f"that run {run} could choose no variant ({verdict.nobody}) follows"
    text = f"verified: {follows} from its samples; {len(verdict.compared)} files and documents agree"
    text += "".join(f"\nnote: {note}" for note in verdict.notes)
    if verdict.not_recomputed:
        text += "\nnot recomputed, because lm-eval aggregates it: " + ", ".join(verdict.not_recomputed)
    return text


def _comparison(first: str, second: str, comparison: RunComparison) -> Any:
    from rich.console import Group

    rows = ((each.what, each.before, each.after) for each in comparison.settings)
    settings = plain_table("Setting", first, second, rows=rows)
    metrics = plain_table("Variant", "Metric", first, second, "Change")
    for change in comparison.metrics:
        share = f"{change.change:+.1%}" if change.change is not None else "–"
        share += " (within noise)" if change.beyond_noise is False else ""
        values = (shown(change.metric, value) for value in (change.before, change.after))
        metrics.add_row(change.variant, change.metric, *values, share)
    lead = [settings] if comparison.settings else ["settings, versions and hardware are the same"]
    return Group(*lead, "", metrics, "", *comparison.notes, "", *comparison.winners)
