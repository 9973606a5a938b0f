"""acquire: ensure that base/ in the store contains a model at one commit, complete and verified, and adapters/ the LoRA
adapters that are served with it; or optimized/ the candidates that are measured beside it."""

from __future__ import annotations

from stages.acquire.candidates import fetch
from stages.acquire.ensure import ensure, ensure_adapter
from stages.parts.base import program
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.model.candidates import Candidates
from stages.parts.model.description import LOCAL_COMMIT
from stages.parts.model.hub import COMMIT
from stages.parts.model.name import ModelName


def main() -> None:
    parser = program.parser(
        "acquire",
        __doc__,
        "example: python -m stages.acquire --model org/name --commit $(python -m stages.resolve --model org/name)",
    )
    parser.add_argument(
        "--revision",
        default="main",
        help="the revision from which the commit was resolved, for the record (default: main)",
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--commit", help="the commit that python -m stages.resolve prints")
    wanted.add_argument("--candidates", type=Candidates.model_validate_json, help="JSON that check writes")
    parser.add_argument("--serving", default="{}", help="JSON with adapters: AskedServing, by its defaults none")
    arguments = parser.parse_args()
    serving = parse_json(AskedServing, arguments.serving, "--serving")
    model = ModelName.parse(arguments.model)
    store = model.store()
    if arguments.candidates:
        fetch(store, arguments.candidates)
        return
    if not (LOCAL_COMMIT if model.directory else COMMIT).fullmatch(arguments.commit):
        hint = "use the commit that python -m stages.resolve prints"
        raise ConfigError(f"{arguments.commit!r} is not a commit of {model.source}", hint=hint)
    with program.outcome(store, "acquire") as report:
        record = ensure(store, model, arguments.revision, arguments.commit, report)
        for name, source in serving.adapters.items():
            adapter = ensure_adapter(store, name, source)
            report.reason += f"; adapters/{name} has {adapter.model} at {adapter.commit}"
        program.write_output("digest", record.digest)
        print(record.digest, flush=True)


if __name__ == "__main__":
    program.main(main)
