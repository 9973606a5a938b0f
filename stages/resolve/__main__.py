"""resolve: print the commit of a model's revision on the Hub, or a commit name for a local directory's content.

A model that can't be served is refused here, before anything is downloaded. A full commit needs no request: of that,
acquire refuses it.
"""

from __future__ import annotations

import contextlib
from functools import partial

from stages.parts.base import program
from stages.parts.base.errors import AccessDenied
from stages.parts.model import hub
from stages.parts.model.checkpoint import content_of, read_config
from stages.parts.model.description import local_commit, local_sizes
from stages.parts.model.name import ModelName


def resolve(model: ModelName, revision: str) -> str:
    """Find the commit: 40 hexadecimal digits, with the prefix ``local-`` for a directory. A full commit stays as it is.

    Raises the errors of ``hub.describe``, ``local_commit`` and ``read_config``.
    """
    if folder := model.directory:
        read_config(local_sizes(folder), lambda name: content_of(folder / name))
        return local_commit(folder)
    if hub.COMMIT.fullmatch(revision):
        return revision
    listing = hub.describe(model.id, revision)
    with contextlib.suppress(AccessDenied):  # everybody sees a gated model's commit; acquire needs the token
        read_config(listing.paths, partial(hub.read_small, model.id, listing.commit))
    return listing.commit


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
