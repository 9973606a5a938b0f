"""What a model's name and revision mean now: a commit on the Hub, or the content of a local directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from stages import hub, program
from stages.acquire.download import local_sizes, record_of
from stages.checkpoint import chosen, small_files, weight_files
from stages.errors import InvalidName
from stages.records import files_digest
from stages.store import ModelStore, store_root

LOCAL_PREFIX = "local-"
LOCAL_DIGITS = 40  # of sha256: as many as a commit on the Hub has


def resolve(model: str, revision: str) -> str:
    """The commit: 40 hexadecimal digits, after ``local-`` for a directory. A full commit is taken as it is.

    Raises:
        ModelNotFound, RevisionNotFound, AccessDenied, HubUnavailable: see ``hub.describe``.
        InvalidName, UnusableModel, DamagedModel: of a local directory.
    """
    if hub.is_local(model):
        return local_commit(existing_directory(model))
    if hub.COMMIT.fullmatch(revision):
        return revision
    return hub.describe(model, revision).commit


def local_commit(directory: Path) -> str:
    """A name for what serving would take from *directory*; changes when any of it does."""
    paths = local_sizes(directory)
    names = chosen(small_files(paths), weight_files(paths, directory))
    return commit_name(files_digest(tuple(record_of(directory, name) for name in names)))


def commit_name(digest: str) -> str:
    """For the content with this ``files_digest``."""
    return LOCAL_PREFIX + digest[:LOCAL_DIGITS]


def existing_directory(source: str) -> Path:
    """Raises: InvalidName."""
    directory = hub.local_directory(source)
    if not directory.is_dir():
        raise InvalidName(
            f"there is no directory {directory}", hint="give 'org/name' as on the Hub, or a directory that exists"
        )
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stages.resolve",
        description=__doc__,
        epilog="example: python -m stages.resolve --model Qwen/Qwen3-0.6B --revision main",
    )
    parser.add_argument("--model", required=True, help="org/name on the Hub, or a directory such as ./my-model")
    parser.add_argument("--revision", default="main", help="a branch, a tag or a commit (default: main)")
    arguments = parser.parse_args()
    store = ModelStore(store_root(), hub.model_id(arguments.model))
    if hub.is_local(arguments.model):
        existing_directory(arguments.model)
    with program.outcome(store, "resolve") as report:
        commit = resolve(arguments.model, arguments.revision)
        program.write_output("commit", commit)
        print(commit, flush=True)
        report.done(f"{arguments.model} at {arguments.revision} is {commit}", key=commit)


if __name__ == "__main__":
    program.main(main)
