"""resolve: print the commit of a model's revision on the Hub, or a commit name for a local directory's content."""

from __future__ import annotations

from stages.parts.base import program
from stages.parts.model import hub
from stages.parts.model.directory import local_commit
from stages.parts.model.name import ModelName


def resolve(model: ModelName, revision: str) -> str:
    """Find the commit: 40 hexadecimal digits, with the prefix ``local-`` for a directory. A full commit stays as it is.

    Raises the errors of ``hub.describe`` and ``local_commit``.
    """
    if model.directory:
        return local_commit(model.directory)
    if hub.COMMIT.fullmatch(revision):
        return revision
    return hub.describe(model.id, revision).commit


def main() -> None:
    parser = program.parser("resolve", __doc__, "example: python -m stages.resolve --model org/name --revision main")
    parser.add_argument("--revision", default="main", help="a branch, a tag or a commit (default: main)")
    arguments = parser.parse_args()
    model = ModelName.parse(arguments.model)
    store = model.store()
    with program.outcome(store, "resolve") as report:
        commit = resolve(model, arguments.revision)
        program.write_output("commit", commit)
        print(commit, flush=True)
        report.done(f"{model.source} at {arguments.revision} is {commit}", key=commit)


if __name__ == "__main__":
    program.main(main)
