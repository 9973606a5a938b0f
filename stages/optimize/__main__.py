"""optimize: make one variant of a model, or use the one that is already in the store."""

from __future__ import annotations

from scoring.units import MIB
from stages.optimize.ensure import ensure
from stages.parts.base import program
from stages.parts.base.formats import FORMATS
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.settings import parse_json
from stages.parts.model.name import ModelName


def main() -> None:
    parser = program.parser(
        "optimize",
        __doc__,
        """example: python -m stages.optimize --model org/name --method gptq --settings '{"group_size": 32}'""",
    )
    parser.add_argument("--method", required=True, help=f"one of: {', '.join(FORMATS)}")
    parser.add_argument("--settings", default="{}", help="JSON: Optimize in stages/parts/base/optimize_settings.py")
    arguments = parser.parse_args()
    store = ModelName.parse(arguments.model).store()
    with program.outcome(store, "optimize", arguments.method) as report:
        settings = parse_json(Optimize, arguments.settings, "--settings")
        variant, is_new = ensure(store, arguments.method, settings)
        cost = f"{variant.seconds:.0f} s, {variant.peak_memory_bytes / MIB:,.0f} MiB"
        weights = f"{variant.bits} bit, {variant.weights_bytes / MIB:,.1f} MiB of weights"
        summary = f"{variant.variant}: {weights} (made in {cost})"
        if is_new:
            report.done(summary, key=variant.key)
        else:
            report.reused(f"{summary}, from {variant.created_at:%Y-%m-%d %H:%M} UTC", key=variant.key)
    program.write_output("digest", variant.digest)
    print(variant.digest)


if __name__ == "__main__":
    program.main(main)
