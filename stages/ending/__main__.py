"""ending: what is done last, however a run ended. The canary of a run that failed is withdrawn; the report is written,
and the run's Workflow shows what came of it.

One program, because Argo begins no second task of an exit handler once a run is stopped.
"""

from __future__ import annotations

import os
import sys

from stages.ending.shown import show
from stages.parts.base import program
from stages.parts.machine.process import Contained
from stages.parts.model.name import ModelName


def main() -> None:
    parser = program.parser(
        "ending",
        __doc__,
        "example: SLIPWAY_RUN=run-1 python -m stages.ending --model org/name --status Failed\n"
        "All other arguments are those of stages.report.",
    )
    parser.add_argument("--status", required=True, help="how the run ended, in Argo's words")
    parser.add_argument("--serving", default="{}", help="JSON: AskedServing in stages/parts/base/serving_settings.py")
    arguments, settings = parser.parse_known_args()
    common = ("--model", arguments.model, "--status", arguments.status, "--serving", arguments.serving)
    withdrawn = _run("rollout", *common, "--abort") if arguments.status != "Succeeded" else 0
    written = _run("report", *common, *settings)
    run = os.environ.get(program.RUN_VARIABLE)
    if run and not written and "KUBERNETES_SERVICE_HOST" in os.environ:
        show(ModelName.parse(arguments.model).store(), run, arguments.status)
    sys.exit(written or withdrawn)


def _run(stage: str, *arguments: str) -> int:
    """Run a stage's program, which says itself what went wrong. Returns its exit code."""
    with Contained([sys.executable, "-m", f"stages.{stage}", *arguments]) as running:
        return running.wait()


if __name__ == "__main__":
    program.main(main)
