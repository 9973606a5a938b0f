"""What a model's name and revision mean now: a commit on the Hub, or the content of a local directory."""

from __future__ import annotations

import argparse

from stages.parts.base import program
from stages.parts.base.store import ModelStore, store_root
from stages.parts.model import hub
from stages.parts.model.local import existing_directory, local_commit
from stages.parts.model.name import COMMIT, is_local, model_id


def resolve(model: str, revision: str) -> str:
    """The commit: 40 hexadecimal digits, after ``local-`` for a directory. A full commit is taken as it is.

    Raises:
        ModelNotFound, RevisionNotFound, AccessDenied, HubUnavailable: see ``hub.describe``.
        InvalidName, UnusableModel, DamagedModel: of a local directory.
    """
    if is_local(model):
        return local_commit(existing_directory(model))
    if COMMIT.fullmatch(revision):
        return revision
    return hub.describe(model, revision).commit


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stages.resolve",
        description=__doc__,
        epilog="example: python -m stages.resolve --model Qwen/Qwen3-0.6B --revision main",
    )
    parser.add_argument("--model", required=True, help="org/name on the Hub, or a directory such as ./my-model")
    parser.add_argument("--revision", default="main", help="a branch, a tag or a commit (default: main)")
    arguments = parser.parse_args()
    store = ModelStore(store_root(), model_id(arguments.model))
    if is_local(arguments.model):
        existing_directory(arguments.model)
    with program.outcome(store, "resolve") as report:
        commit = resolve(arguments.model, arguments.revision)
        program.write_output("commit", commit)
        print(commit, flush=True)
        report.done(f"{arguments.model} at {arguments.revision} is {commit}", key=commit)


if __name__ == "__main__":
    program.main(main)
