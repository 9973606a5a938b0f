"""report: one page about a run, for a person to read. Runs as the workflow's exit handler, however the run ended.

Writes ``runs/<id>/report.json`` and ``report.html``. Reads only what the other stages left, so that it works after any
failure.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Final

from stages.parts.base import program
from stages.parts.base.errors import ConfigError
from stages.parts.base.files import write_text
from stages.parts.model.name import ModelName
from stages.report.page import HTML, collect, render
from stages.report.run_report import JSON

SETTINGS: Final = ("profile", "workload", "optimize", "serving")


def main() -> None:
    example = "example: SLIPWAY_RUN=run-1 python -m stages.report --model org/name --status Succeeded"
    parser = program.parser("report", __doc__, example)
    parser.add_argument("--status", required=True, help="how the run ended, in Argo's words")
    for name in SETTINGS:
        parser.add_argument(f"--{name}", default="", help=f"the run's {name} settings as JSON, to reproduce it")
    arguments = parser.parse_args()
    store = ModelName.parse(arguments.model).store()
    run_id = os.environ.get(program.RUN_VARIABLE)
    if not run_id:
        raise ConfigError(f"{program.RUN_VARIABLE} is not set", hint="set it to the id of the run to report")
    settings = {}
    for name in SETTINGS:
        with contextlib.suppress(ValueError):  # the run failed because of it, and still gets a report
            settings[name] = json.loads(getattr(arguments, name))
    report = collect(store, run_id, arguments.status, settings)
    folder = store.run(run_id)
    report.write(folder / JSON)
    write_text(folder / HTML, render(report))
    print(folder / HTML)


if __name__ == "__main__":
    program.main(main)
