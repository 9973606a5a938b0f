"""rollout: move traffic to the chosen release, in one go or step by step.

Each call runs the same state machine up to a point, so that a workflow can show the steps as tasks of their own.
"""

from __future__ import annotations

import argparse
import os

from stages.parts.base import program
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.base.store import ModelStore
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import LOCAL, Journal, under_way
from stages.parts.releases import release as releases
from stages.rollout.commands import abort
from stages.rollout.kserve.settings import VARIABLE as KSERVE_VARIABLE
from stages.rollout.kserve.settings import KServe
from stages.rollout.resume import PROMOTE, check_point, chosen
from stages.rollout.state_machine import roll_out
from stages.rollout.target import TARGETS, connect


def main() -> None:
    arguments = _arguments()
    store = ModelName.parse(arguments.model).store()
    serving = parse_json(AskedServing, arguments.serving, "--serving")
    settings = parse_json(Rollout, arguments.settings, "--settings")
    kserve = parse_json(KServe, os.environ.get(KSERVE_VARIABLE) or "{}", KSERVE_VARIABLE)
    if arguments.abort:
        _abort(store, arguments, serving, kserve)
        return
    check_point(arguments.step, settings)
    with program.outcome(store, "rollout", "" if arguments.step == PROMOTE else arguments.step) as report:
        release = releases.find(store, arguments.release) if arguments.release else chosen(store)
        target = connect(arguments.target, store, arguments.model, serving, kserve)
        approved = arguments.approved == "true"
        journal = roll_out(store, target, release, settings, until=arguments.step, approved=approved)
        summary = _summary(store, journal)
        tell = report.reused if journal.kind == "refresh" and journal.before == release else report.done
        tell(summary)
    program.write_output("release", journal.release)
    program.write_output("state", journal.state)
    program.write_output("said", summary)
    program.write_output("compared", str(bool(journal.steps) and not journal.ended).lower())
    url = target.client_url() if journal.ended else ""
    program.write_output("url", url)
    if url:
        print(url)


def _abort(store: ModelStore, arguments: argparse.Namespace, serving: AskedServing, kserve: KServe) -> None:
    """Give up this run's own rollout, unless the run succeeded: it may be waiting for a person's approval."""
    journal, run = under_way(store), os.environ.get(program.RUN_VARIABLE)
    if arguments.status == "Succeeded" or journal is None or (run and journal.run != run):
        say("no rollout to give up")
        return
    target = connect(journal.target, store, arguments.model, serving, kserve)
    say(f"gave up {abort(store, target, arguments.reason)}")


def _summary(store: ModelStore, journal: Journal) -> str:
    if journal.state == "promoted":
        was = "is still" if journal.kind == "refresh" else "is now"
        return f"{journal.release} {was} what clients get: {journal.reason}"
    summary = f"{journal.release} at {journal.percent} %, {journal.state}"
    if journal.state == "awaiting approval" and not journal.in_workflow:
        summary += f": slipway rollout promote {store.model}"
    return summary + (f"; {journal.analyses[-1].reason}" if journal.analyses else "")


def _arguments() -> argparse.Namespace:
    parser = program.parser(
        "rollout",
        "Move traffic to a release of a model, and back if it is worse. Run again, it continues.",
        f"""example:
  python -m stages.rollout --model org/name --step deploy
  python -m stages.rollout --model org/name --step 10
  python -m stages.rollout --model org/name
  python -m stages.rollout --model org/name --abort --status Failed
with --target kserve, {KSERVE_VARIABLE} holds the settings as JSON: see KServe in stages/rollout/kserve/settings.py""",
    )
    parser.add_argument("--release", default="", help="the release's name (default: what select chose last)")
    parser.add_argument("--target", default=LOCAL, choices=TARGETS, help="the platform (default: %(default)s)")
    parser.add_argument("--serving", default="{}", help="JSON: AskedServing in stages/parts/base/serving_settings.py")
    parser.add_argument("--settings", default="{}", help="JSON: Rollout in stages/parts/base/rollout_settings.py")
    parser.add_argument(
        "--step",
        default=PROMOTE,
        help="deploy, a percentage, or promote: how far to go in this call (default: promote)",
    )
    parser.add_argument(
        "--approved", choices=["true", "false"], default="false", help="true: a person has approved the last step"
    )
    parser.add_argument("--abort", action="store_true", help="give up the rollout that is under way")
    parser.add_argument("--status", default="", help="with --abort: how the workflow ended; if Succeeded, do nothing")
    parser.add_argument("--reason", default="the workflow failed", help="with --abort: why")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
