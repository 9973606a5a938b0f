"""The models of a store, its runs that have ended, and the space that each kind of content takes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from pipeline.local.folder import LOCK
from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.files import files_in, holder
from stages.parts.base.store import ModelStore, Record
from stages.parts.model.name import ModelName
from stages.report.run_report import JSON

KINDS: Final = {
    "base": "base",
    "adapters": "base",
    "optimized": "variants",
    "releases": "releases",
    "evaluations": "evaluations",
    "answers": "evaluations",
    "runs": "runs",
    ".aside": "others",
}
"""The kind of each of a model's folders, in the order in which a file that several of them link to is counted."""


class Space(Record):
    """The bytes that a model takes, by kind. A file that several directories link to counts once, where it is first:
    a release takes only what no variant has any more."""

    model: str
    base: int = 0
    variants: int = 0
    releases: int = 0
    evaluations: int = 0
    runs: int = 0
    others: int = 0
    """What other settings made, which was put aside."""
    rest: int = 0
    """Logs of the endpoint, records, and what is unfinished."""
    total: int = 0
    shared: int = 0
    """What all the further links to the same files would take as copies."""


def models_in(root: Path, model: str | None = None) -> list[ModelStore]:
    """List the models in the store at *root*, or only the one named. Raises: ConfigError, UnknownName: there is no such
    store, or no such model in it."""
    if not root.is_dir():
        raise ConfigError(f"there is no store {root}", hint="see --store")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    stores = {name: ModelStore(root.absolute(), name) for name in (path.name.replace("--", "/") for path in folders)}
    if model is None:
        return list(stores.values())
    name = ModelName.parse(model).id
    check_known("model", name, stores)
    return [stores[name]]


def has_ended(run: Path) -> bool:
    """Whether nothing writes to the folder of a run any more. A run on a cluster, which has no lock, ends with its
    report."""
    return ((run / JSON).exists() or (run / LOCK).exists()) and holder(run / LOCK) is None


def space(store: ModelStore) -> Space:
    """Add up the sizes of a model's files."""
    order, counted = list(KINDS), set[tuple[int, int]]()
    sums = dict.fromkeys([*KINDS.values(), "rest", "total", "shared"], 0)
    for entry in sorted(store.path.iterdir(), key=lambda path: order.index(path.name) if path.name in order else 99):
        for _, status in files_in(entry):
            inode, size = (status.st_dev, status.st_ino), status.st_size if stat.S_ISREG(status.st_mode) else 0
            sums[KINDS.get(entry.name, "rest") if inode not in counted else "shared"] += size
            sums["total"] += size if inode not in counted else 0
            counted.add(inode)
    return Space(model=store.model, **sums)
