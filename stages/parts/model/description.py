"""What a model's small files say about its size: config.json, the index or a safetensors header, never the weights."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from scoring.capacity.families import BYTES
from stages.parts.base.errors import ModelNotFound
from stages.parts.base.store import ModelStore
from stages.parts.model import hub
from stages.parts.model.checkpoint import CONFIG, INDEX, SINGLE, parse_object, read_config, weight_files
from stages.parts.model.directory import local_sizes
from stages.parts.model.name import ModelName
from stages.parts.model.safetensors import read_headers
from stages.parts.records.acquired import ACQUIRED, Acquired

CHAT_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a chat template may be."""
REQUESTS: Final = 16
"""Headers that are read at a time."""


@dataclass(frozen=True)
class Description:
    model: str
    commit: str | None
    """The commit on the Hub; None for a local directory."""
    config: Mapping[str, Any]
    parameters: int | None
    """In the checkpoint; None if its index does not tell."""
    tensors: frozenset[str] = frozenset()
    """Their names in the checkpoint; empty if they are not known."""


def describe_model(source: str, revision: str) -> Description:
    """Describe a model on the Hub or in a local directory.

    Raises:
        ModelNotFound, UnusableModel, DamagedModel: it does not exist, or a run would refuse it as well.
        The other errors are those of ``hub.describe``.
    """
    name = ModelName.parse(source)
    if name.directory:
        return describe_directory(name.directory, source)
    listing = hub.describe(name.id, revision)
    config = read_config(listing.paths, partial(hub.read_small, name.id, listing.commit))
    return Description(name.id, listing.commit, config, *_tensors(name.id, listing.commit, listing.paths, config))


def describe_commit(store: ModelStore, source: str, commit: str) -> Description:
    """Like ``describe_model``, but read from the store if it has the model at this commit, without asking the Hub."""
    acquired = Acquired.read(store.base / ACQUIRED)
    if acquired and acquired.commit == commit:
        return describe_directory(store.base, source)
    return describe_model(source, commit)


@contextlib.contextmanager
def chat_files(store: ModelStore, described: Description) -> Iterator[Path]:
    """Find a directory that has the model's configuration and chat templates: the store's or the model's own, or one
    that is filled from the Hub and removed afterwards. Raises the errors of ``describe_model``."""
    if described.commit is None:
        yield ModelName.parse(described.model).directory or store.base
        return
    with tempfile.TemporaryDirectory(prefix="slipway-chat-") as folder:
        present = set(hub.describe(described.model, described.commit).paths)
        for name in present.intersection((CONFIG, *CHAT_FILES)):
            (Path(folder) / name).write_bytes(hub.read_small(described.model, described.commit, name))
        yield Path(folder)


def tensor_shapes(described: Description, base: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a model's tensors from the headers of its weight files: those in its directory or in *base*,
    or on the Hub. Raises the errors of ``describe_model``."""
    model, commit = described.model, described.commit
    if commit is None:
        directory = ModelName.parse(model).directory or base or Path(model)
        files = weight_files(local_sizes(directory), directory)
        return {name: tensor.shape for name, tensor in read_headers(directory / path for path in files).items()}
    files = [SINGLE]
    if SINGLE not in hub.describe(model, commit).paths:
        index = parse_object(hub.read_small(model, commit, INDEX), INDEX)
        files = sorted(set(index.get("weight_map", {}).values()))
    with ThreadPoolExecutor(REQUESTS) as pool:
        headers = pool.map(lambda path: hub.tensor_shapes(model, commit, path), files)
        return {name: shape for header in headers for name, shape in header.items()}


def describe_directory(directory: Path, source: str) -> Description:
    """Describe the model in a directory. Reads the headers of all weight files.

    Raises the errors of ``describe_model``."""
    if not directory.is_dir():
        raise ModelNotFound(f"there is no directory {source}", hint="a name without './' or '/' is one on the Hub")
    paths = local_sizes(directory)
    config = read_config(paths, lambda name: (directory / name).read_bytes())
    tensors = read_headers(directory / path for path in weight_files(paths, directory))
    return Description(source, None, config, sum(tensor.count for tensor in tensors.values()), frozenset(tensors))


def _tensors(
    model: str, commit: str, paths: Collection[str], config: Mapping[str, Any]
) -> tuple[int | None, frozenset[str]]:
    if SINGLE in paths:  # an index beside it is left over
        shapes = hub.tensor_shapes(model, commit, SINGLE)
        return sum(map(math.prod, shapes.values())), frozenset(shapes)
    index = parse_object(hub.read_small(model, commit, INDEX), INDEX)
    metadata, names = (index.get(field) for field in ("metadata", "weight_map"))
    count = _count(metadata if isinstance(metadata, dict) else {}, config)
    return count, frozenset(names) if isinstance(names, dict) else frozenset()


def _count(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    if isinstance(count := metadata.get("total_parameters"), int):
        return count
    parts = (config, config.get("text_config") or {})
    kind = next((part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name)), None)
    size, value_bytes = metadata.get("total_size"), BYTES.get(str(kind))
    return size // value_bytes if value_bytes and isinstance(size, int) else None
