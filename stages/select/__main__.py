"""select: score what this run measured, publish the winner, and explain the choice."""

from __future__ import annotations

import argparse

from scoring.names import PRODUCTION, recipe_of
from scoring.profile import Profile
from stages.parts.base import program
from stages.parts.base.errors import Incomplete
from stages.parts.base.files import exclusive
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import Serving
from stages.parts.base.settings import parse_json
from stages.parts.model.candidates import names_of
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import format_of_base
from stages.parts.records.production import Price
from stages.parts.releases.pinned import row_of_production
from stages.parts.releases.release import candidate, current_release
from stages.select.selection import select, tried
from stages.select.sentences import markdown


def main() -> None:
    arguments = _arguments()
    store = ModelName.parse(arguments.model).store()
    published = format_of_base(store)
    profile = parse_json(Profile, arguments.profile, "--profile").for_format(published)
    optimize = parse_json(Optimize, arguments.optimize, "--optimize")
    serving = parse_json(Serving, arguments.serving, "--serving")
    variants = [*tried(store, optimize, published), *names_of(optimize.candidates, store.model, published)]
    price = parse_json(Price, arguments.price, "--price") if arguments.price else None
    with program.outcome(store, "select") as report, exclusive(store.lock("select"), f"select {store.model}"):
        serve = arguments.serve == "true"
        candidates = serving.candidates_of([PRODUCTION] if profile.requalifies else variants)
        recipes = {name: serving.recipes.get(recipe_of(name)) for name in candidates}
        optional = tuple(name for name, recipe in recipes.items() if recipe and recipe.optional)
        apart = serving.production and row_of_production(store, candidates, serving) == PRODUCTION
        if apart and PRODUCTION not in candidates:
            candidates.append(PRODUCTION)
        selection = select(store, profile, candidates, optional=optional, price=price, serve=serve, settings=optimize)
        decision, in_production = selection.decision, current_release(store)
        is_published = decision.release in (in_production, candidate(store))
        if selection.reused:
            where = "in production" if in_production == decision.release else "published" if is_published else "kept"
            report.reused(f"{decision.headline}; it is {where} already, from the same measurements", key=decision.key)
        else:
            kept = f"Kept as {decision.release}, which is not published"
            done = f"Published as {decision.release}" if is_published else kept
            report.done(f"{decision.reason} {done} ({selection.placement}).", key=decision.key)
    for name in ("winner", "outcome", "promotion", "release", "reason"):
        program.write_output(name, getattr(decision, name))
    program.write_output("table", markdown(decision))
    print(decision.reason)
    if decision.outcome == "incomplete" and not optimize.allow_incomplete:
        served = in_production == decision.release
        where = "in production already" if served else "published, but neither served nor put in production"
        raise Incomplete(
            f"{decision.reason} {decision.release} is {where}",
            hint="run again for what is missing; or with --allow-incomplete; or roll it out as it is: "
            f"slipway rollout start {arguments.model}",
        )


def _arguments() -> argparse.Namespace:
    example = """example: python -m stages.select --model org/name --profile '{"name": "balanced"}'"""
    parser = program.parser("select", __doc__, example)
    parser.add_argument("--profile", required=True, help="the scoring profile as JSON")
    parser.add_argument(
        "--price", default="", help="the hourly price of the hardware as JSON; without it no costs are computed"
    )
    parser.add_argument("--optimize", default="{}", help="JSON with the variants to choose from: see Optimize")
    parser.add_argument("--serving", default="{}", help="JSON with the recipes, as check decided: see Serving")
    parser.add_argument(
        "--serve", choices=["true", "false"], default="false", help="true: a rollout follows that promotes the winner"
    )
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
