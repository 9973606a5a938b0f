"""What a model's small files say about its size: config.json, the index or a safetensors header, never the weights."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from scoring.capacity.families import BYTES
from stages.parts.base.errors import DamagedModel, InvalidName, ModelNotFound
from stages.parts.base.files import from_json
from stages.parts.base.store import ModelStore
from stages.parts.model import checkpoint, hub
from stages.parts.model.name import ModelName
from stages.parts.model.published import PublishedFormat, format_of
from stages.parts.model.safetensors import read_headers
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest

CHAT_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a chat template may be."""
REQUESTS: Final = 16
"""Headers that are read at a time."""
LOCAL_PREFIX: Final = "local-"
LOCAL_DIGITS: Final = 40
"""Hexadecimal digits of the sha256: as many as a commit on the Hub has."""
LOCAL_COMMIT: Final = re.compile(f"{LOCAL_PREFIX}[0-9a-f]{{{LOCAL_DIGITS}}}")


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
    weights_bytes: int = 0
    """Of the files that hold the weights."""
    directory: Path | None = None
    """Where its files lie; None on the Hub."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the files on the Hub, by path, in the Hub's algorithms."""
    revision: str = ""
    candidates: Mapping[str, Description] = field(default_factory=dict)
    """Other checkpoints of the same model, by the names of their variants."""
    note: str = ""
    """What of a candidate differs from the model, but does not matter."""

    @cached_property
    def form(self) -> PublishedFormat:
        """The format in which it was published. Its name is that of the reference variant."""
        return format_of(self.config)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()} if self.directory else {*self.digests}

    @property
    def all(self) -> dict[str, Description]:
        """The model and its candidates, by the names of their variants."""
        return {self.form.name: self, **self.candidates}


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
    config = checkpoint.read_config(listing.paths, partial(hub.read_small, name.id, listing.commit))
    weights = checkpoint.likely_weights(listing.paths)
    count, tensors = _tensors(name.id, listing.commit, listing.paths, config)
    return Description(
        name.id,
        listing.commit,
        config,
        count,
        tensors,
        sum(file.size_bytes for file in listing.files if file.path in weights),
        digests={file.path: str(file.sha256 or file.git_sha1) for file in listing.files},
        revision=revision,
    )


def describe_commit(store: ModelStore, source: str, commit: str) -> Description:
    """Like ``describe_model``, but read from the store if it has the model at this commit, without asking the Hub."""
    acquired = Acquired.read(store.base / ACQUIRED)
    if acquired and acquired.commit == commit:
        return describe_directory(store.base, source)
    return describe_model(source, commit)


@contextlib.contextmanager
def small_files_of(described: Description, names: Collection[str] = (checkpoint.CONFIG, *CHAT_FILES)) -> Iterator[Path]:
    """Find a directory that has files of a model, by default its configuration and chat templates: the store's or the
    model's own, or one that is filled from the Hub and removed afterwards. Raises the errors of ``describe_model``."""
    if described.commit is None:
        yield described.directory or Path()
        return
    with tempfile.TemporaryDirectory(prefix="slipway-files-") as folder:
        for name in described.digests.keys() & set(names):
            (Path(folder) / name).write_bytes(hub.read_small(described.model, described.commit, name))
        yield Path(folder)


def chat_template(directory: Path) -> str:
    """Read the chat templates of the model's tokenizer, all of them as one text; empty without one."""
    templates = [text_of(directory / name) for name in ("chat_template.jinja", "chat_template.json")]
    with contextlib.suppress(ValueError, AttributeError):
        stated = from_json(text_of(directory / "tokenizer_config.json")).get("chat_template")
        templates.append(stated if isinstance(stated, str) else json.dumps(stated) if stated else "")
    return "\n".join(filter(None, templates))


def text_of(path: Path) -> str:
    """Read a file; empty if it can't be read as text."""
    with contextlib.suppress(OSError, UnicodeDecodeError, DamagedModel):
        return checkpoint.content_of(path).decode()
    return ""


def tensor_shapes(described: Description, base: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a model's tensors from the headers of its weight files: those in its directory or in *base*,
    or on the Hub. Raises the errors of ``describe_model``."""
    model, commit = described.model, described.commit
    if commit is None:
        directory = ModelName.parse(model).directory or base or Path(model)
        files = checkpoint.weight_files(local_sizes(directory), directory)
        return {name: tensor.shape for name, tensor in read_headers(directory / path for path in files).items()}
    files = [checkpoint.SINGLE]
    if checkpoint.SINGLE not in hub.describe(model, commit).paths:
        files = sorted(set(checkpoint.weight_map(hub.read_small(model, commit, checkpoint.INDEX)).values()))
    with ThreadPoolExecutor(REQUESTS) as pool:
        headers = pool.map(lambda path: hub.read_tensors(model, commit, path), files)
        return {tensor.name: tensor.shape for header in headers for tensor in header}


def describe_directory(directory: Path, source: str) -> Description:
    """Describe the model in a directory. Reads the headers of all weight files.

    Raises the errors of ``describe_model``."""
    if not directory.is_dir():
        raise ModelNotFound(f"there is no directory {source}", hint="a name without './' or '/' is one on the Hub")
    paths = local_sizes(directory)
    config = checkpoint.read_config(paths, lambda name: checkpoint.content_of(directory / name))
    files = checkpoint.weight_files(paths, directory)
    tensors = read_headers(directory / path for path in files)
    size = sum(paths[path] for path in files)
    count = sum(map(format_of(config).count, tensors.values()))
    return Description(source, None, config, count, frozenset(tensors), size, directory)


def _tensors(
    model: str, commit: str, paths: Collection[str], config: Mapping[str, Any]
) -> tuple[int | None, frozenset[str]]:
    if checkpoint.SINGLE in paths:  # an index beside it is left over
        tensors = hub.read_tensors(model, commit, checkpoint.SINGLE)
        return sum(map(format_of(config).count, tensors)), frozenset(tensor.name for tensor in tensors)
    index = checkpoint.parse_object(hub.read_small(model, commit, checkpoint.INDEX), checkpoint.INDEX)
    metadata, names = (index.get(field) for field in ("metadata", "weight_map"))
    count = _count(metadata if isinstance(metadata, dict) else {}, config)
    return count, frozenset(names) if isinstance(names, dict) else frozenset()


def _count(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    if format_of(config).method:  # config.json tells it better than an index of packed weights
        return None
    if isinstance(count := metadata.get("total_parameters"), int):
        return count
    size, value_bytes = metadata.get("total_size"), BYTES.get(str(checkpoint.stated(config, "dtype", "torch_dtype")))
    return size // value_bytes if value_bytes and isinstance(size, int) else None


def local_commit(directory: Path) -> str:
    """Compute a commit name for the files of *directory* that serving needs; it changes when any of them changes."""
    paths = local_sizes(directory)
    names = checkpoint.chosen(checkpoint.small_files(paths), checkpoint.weight_files(paths, directory))
    return commit_name(files_digest(tuple(File.of(directory, name) for name in names)))


def commit_name(digest: str) -> str:
    """Make the commit name of the local files with this ``files_digest``."""
    return LOCAL_PREFIX + digest[:LOCAL_DIGITS]


def local_sizes(directory: Path) -> dict[str, int]:
    """List the sizes in bytes of the files in a directory and one level below. Follows symbolic links, and refuses
    broken ones with DamagedModel, and a directory that does not exist with InvalidName."""
    if not directory.is_dir():
        hint = "give a name as on the Hub ('org/name'), or a directory that exists"
        raise InvalidName(f"there is no directory {directory}", hint=hint)
    sizes = {}
    for path in sorted([*directory.glob("*"), *directory.glob("*/*")]):
        if path.is_symlink() and not path.exists():
            raise DamagedModel(f"{path} is a broken link", hint="repair or remove it")
        if path.is_file():
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes
