"""optimize: make one variant of a model, or use the one that is already in the store."""

from __future__ import annotations

from scoring.names import REFERENCE
from scoring.units import MIB
from stages.optimize.ensure import ensure
from stages.parts.base import program
from stages.parts.base.formats import FORMATS
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.settings import parse_json
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import format_of_base


def main() -> None:
    parser = program.parser(
        "optimize",
        __doc__,
        """example: python -m stages.optimize --model org/name --method gptq --settings '{"group_size": 32}'""",
    )
    methods = f"one of: {', '.join(FORMATS)}; {REFERENCE} takes the model in the format in which it was published"
    parser.add_argument("--method", required=True, help=methods)
    parser.add_argument("--settings", default="{}", help="JSON: Optimize in stages/parts/base/optimize_settings.py")
    arguments = parser.parse_args()
    store = ModelName.parse(arguments.model).store()
    method = format_of_base(store) if arguments.method == REFERENCE else arguments.method
    with program.outcome(store, "optimize", method) as report:
        settings = parse_json(Optimize, arguments.settings, "--settings")
        variant, is_new = ensure(store, method, settings)
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
