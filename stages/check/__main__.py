"""check: say which of the wanted variants vLLM can serve on this machine, which is the one that will measure them.

A variant that can't be served is left out before it is made. With ``make_unservable`` in the settings it is made for
another machine, but not measured.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from stages.parts.base import program
from stages.parts.base.settings import Optimize, parse_json
from stages.parts.base.store import ModelStore, store_root
from stages.parts.engine.kernels import FORMATS, missing_kernels
from stages.parts.model.name import ModelName

HINT: Final = (
    "run where vLLM has that kernel, or leave the variant out of optimize.variants; with "
    "--set optimize.make_unservable=true it is made all the same, for another machine"
)


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), ModelName.parse(arguments.model).id)
    settings = parse_json(Optimize, arguments.settings, "--settings")
    with program.outcome(store, "check") as report:
        missing = {name: why for name, why in missing_kernels().items() if name in settings.variants}
        served = [name for name in settings.variants if name not in missing]
        report.done(f"vLLM serves {', '.join(served)} here")
    for name, why in missing.items():
        with program.outcome(store, "check", name) as report:
            report.left_out(why, hint=HINT)
    made = settings.variants if settings.make_unservable else served
    for quantized in FORMATS:
        program.write_output(quantized, str(quantized in made).lower())
    program.write_output("variants", ",".join(served))
    program.write_output("left-out", "\n".join(f"{name}: {why}" for name, why in missing.items()))
    print(",".join(served))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""example: python -m stages.check --model org/name --settings '{"variants": ["fp16", "int8"]}'""",
    )
    parser.add_argument("--model", required=True, help="org/name as on the Hub, or a directory such as ./my-model")
    parser.add_argument(
        "--settings", default="{}", help="JSON; for the fields see Optimize in stages/parts/base/settings.py"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(program.main(main))
