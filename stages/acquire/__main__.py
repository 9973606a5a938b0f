"""acquire: ensure that base/ holds a model at one commit."""

from __future__ import annotations

import argparse

from stages.acquire.ensure import LOCAL_COMMIT, ensure
from stages.parts.base import program
from stages.parts.base.errors import ConfigError
from stages.parts.base.store import ModelStore, store_root
from stages.parts.model.local import existing_directory
from stages.parts.model.name import COMMIT, is_local, model_id


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stages.acquire",
        description=__doc__,
        epilog="example: python -m stages.acquire --model Qwen/Qwen3-0.6B --revision main "
        "--commit $(python -m stages.resolve --model Qwen/Qwen3-0.6B)",
    )
    parser.add_argument("--model", required=True, help="org/name on the Hub, or a directory such as ./my-model")
    parser.add_argument("--revision", default="main", help="what the commit was resolved from, for the record")
    parser.add_argument("--commit", required=True, help="as printed by stages.resolve")
    arguments = parser.parse_args()
    store = ModelStore(store_root(), model_id(arguments.model))
    if not (LOCAL_COMMIT if is_local(arguments.model) else COMMIT).fullmatch(arguments.commit):
        raise ConfigError(
            f"{arguments.commit!r} is not a commit of {arguments.model}",
            hint="take what python -m stages.resolve prints",
        )
    if is_local(arguments.model):
        existing_directory(arguments.model)
    with program.outcome(store, "acquire") as report:
        record = ensure(store, arguments.model, arguments.revision, arguments.commit, report)
        program.write_output("digest", record.digest)
        print(record.digest, flush=True)


if __name__ == "__main__":
    program.main(main)
