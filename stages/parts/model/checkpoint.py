"""Checks whether a directory is a model that can be served safely: its files, and whether they are consistent.

This module imports no model library and runs none of the model's own code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from scoring.names import REFERENCE
from stages.parts.base.errors import DamagedModel, UnusableModel
from stages.parts.base.files import from_json, read_object, safe_relative
from stages.parts.base.settings import from_yaml
from stages.parts.model.published import format_of
from stages.parts.model.safetensors import LARGEST_SMALL_BYTES, damaged, find_not_finite, read_header
from stages.parts.model.unservable import refuse_kind, unknown_layout, unservable

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CARD: Final = "README.md"
LONGEST_CARD: Final = 1 << 20
"""Characters of a model card that are read."""
SMALL: Final = (
    CONFIG,
    INDEX,
    "generation_config.json",
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", CARD),
)
"""The files that serving needs besides the weights, at the root of the repository. None of them is code."""
OTHER_PARTS: Final = ("vision_config", "audio_config", "text_config")
"""Fields of config.json, one of which a model has that sees or hears."""
FUSED_EXPERTS: Final = re.compile(
    r"(^|\.)(experts\.(gate_up_proj|gate_proj|up_proj|down_proj)|block_sparse_moe\.(input|output)_linear\.weight)$"
)
"""Names of tensors that hold all experts of a layer."""
TOKENIZERS: Final = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class Checkpoint:
    """What a checked checkpoint, or an adapter, says about itself."""

    architecture: str
    license: str | None
    """The identifier from the model card."""
    parameters: int
    """Count of weights over all tensors, as many as they were before they were packed."""
    format: str = REFERENCE
    """That in which the publisher stores them; fp16 for 16 or 32 bit."""


def small_files(paths: Iterable[str]) -> list[str]:
    """Choose the files among a repository's *paths* that serving needs besides the weights.

    Raises:
        UnusableModel: the repository has no weights that are safe to load, no configuration or no tokenizer.
        InvalidName: the path of such a file leads out of the repository.
    """
    names = sorted(paths)
    for path in names:
        if _is_small(path.rpartition("/")[2]) or path.endswith(".safetensors"):
            safe_relative(path)
    if SINGLE not in names and INDEX not in names:
        raise unknown_layout(names, f"{SINGLE} or {INDEX}")
    if CONFIG not in names:
        raise UnusableModel("the repository has no config.json", hint=unservable().same_model)
    if not any(set(files) <= set(names) for files in TOKENIZERS):
        raise UnusableModel(
            "the repository has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)",
            hint="serving needs a tokenizer: copy the model to a directory, add the tokenizer's files and name it",
        )
    return [path for path in names if _is_small(path)]


def weight_files(paths: Collection[str], directory: Path) -> list[str]:
    """List the files that hold each tensor once. Reads the index in *directory* if there is one.

    Raises:
        DamagedModel: the index does not parse, or names a shard that is not among *paths*.
        UnusableModel: the index names a file that is not a safetensors file in the same folder.
    """
    if INDEX not in paths:
        return [SINGLE]
    shards = sorted(set(weight_map(content_of(directory / INDEX)).values()))
    missing = [shard for shard in shards if shard not in paths]
    if missing and SINGLE in paths:  # the index was left over beside the whole model
        return [SINGLE]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise damaged(f"{INDEX} names {missing[0]}{more}, which the repository does not have")
    for shard in shards:
        if "/" in shard or not shard.endswith(".safetensors"):
            hint = unservable().no_pickles
            raise UnusableModel(f"{INDEX} names {shard}, which is not a safetensors file in the same folder", hint=hint)
    return shards


def likely_weights(paths: Iterable[str]) -> list[str]:
    """List the files that probably hold the weights, by their names: for an estimate before the index can be read."""
    names = set(paths)
    shards = [name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    return shards if INDEX in names and shards else sorted(names & {SINGLE})


def chosen(small: Iterable[str], weights: Collection[str]) -> list[str]:
    """All files of the model. Weights in a single file need no index, and a left-over index would mislead vLLM."""
    return sorted({*small, *weights} - ({INDEX} if list(weights) == [SINGLE] else set()))


def read_config(paths: Collection[str], read: Callable[[str], bytes]) -> dict[str, Any]:
    """Read the config.json of a model whose files are *paths*, and refuse a model that can't be served.

    Raises:
        UnusableModel, InvalidName: see ``small_files`` and ``refuse_unservable``.
        DamagedModel: config.json is not a JSON object. What *read* raises is raised, too.
    """
    small_files(paths)
    config = parse_object(read(CONFIG), CONFIG)
    refuse_unservable(config, paths)
    return config


def refuse_unservable(config: Mapping[str, Any], paths: Collection[str] = ()) -> None:
    """Refuse, with UnusableModel, a model that config.json or the names of its files show to be of another kind, to
    need its own code, or to be quantized in a way that can't be served."""
    if not isinstance(config.get("text_config") or {}, Mapping):
        raise damaged("text_config in config.json is not a JSON object")
    refuse_kind(config, paths)
    _refuse_own_code(config, CONFIG, config)
    format_of(config, paths)
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(config.get("model_type"), str)):
        raise UnusableModel("config.json names no 'architectures' and 'model_type'", hint=unservable().same_model)


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a model takes pictures, by its config.json."""
    return isinstance(config.get("vision_config"), dict)


def why_not_quantized(names: Iterable[str]) -> str:
    """Say why a model with tensors of these names can't be quantized; empty if that is not known."""
    fused = min((name for name in names if FUSED_EXPERTS.search(name)), default="")
    return fused and f"the experts of a layer are stored as one tensor ({fused}), which can't be quantized"


def check_configuration(directory: Path, paths: Collection[str] = ()) -> str:
    """Check a model's configuration. Returns the architecture that config.json names.

    Args:
        paths: all files of the repository, of which *directory* may have only some.

    Raises:
        UnusableModel: see ``refuse_unservable``; or its tokenizer needs the model's own code.
        DamagedModel: a file does not parse.
    """
    config = parse_object(content_of(directory / CONFIG), CONFIG)
    if (tokenizer := directory / "tokenizer_config.json").exists():
        _refuse_own_code(parse_object(content_of(tokenizer), tokenizer.name), tokenizer.name, config)
    refuse_unservable(config, paths)
    return str(config["architectures"][0])


def _refuse_own_code(content: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
    if "auto_map" in content and not _known_to_transformers(config.get("model_type")):
        raise UnusableModel(
            f"the model needs its own code to load ('auto_map' in {name}), and slipway never runs a model's code",
            hint="name a model that Transformers supports without further code",
        )


def check(directory: Path, weights: Collection[str]) -> Checkpoint:
    """Read every header and every weight of the complete checkpoint in *directory*.

    Raises:
        DamagedModel: a shard or a tensor is truncated, missing or not finite; the message names it.
        UnusableModel: see ``check_configuration``.
    """
    architecture = check_configuration(directory)
    headers = {name: read_header(directory / name) for name in weights}
    shards = weight_map(content_of(directory / INDEX)) if list(weights) != [SINGLE] else {}
    if missing := [name for name, shard in shards.items() if name not in headers[shard]]:
        more = f"; {len(missing) - 1} more are missing" if len(missing) > 1 else ""
        raise damaged(f"{shards[missing[0]]} lacks tensor {missing[0]}, which {INDEX} says it holds{more}")
    for name, tensors in headers.items():
        if located := find_not_finite(tensors.values()):
            tensor, element = located
            raise damaged(f"{name}: tensor {tensor.name} holds NaN or an infinite value (first at element {element})")
    form = format_of(parse_object(content_of(directory / CONFIG), CONFIG))
    parameters = sum(form.count(tensor) for tensors in headers.values() for tensor in tensors.values())
    if not parameters:
        raise DamagedModel(f"{' '.join(weights)} holds no weights", hint="name another model or --revision")
    try:
        form.check({name: tensor for tensors in headers.values() for name, tensor in tensors.items()})
    except ValueError as error:
        raise damaged(str(error)) from error
    return Checkpoint(architecture, card_license(directory / CARD), parameters, form.name)


def card_license(card: Path) -> str | None:
    """Read the license in a model card's front matter; if that is 'other', the publisher's name for it."""
    if not card.exists():
        return None
    with card.open(encoding="utf-8-sig", errors="replace") as file:
        front_matter = re.match(r"---\r?\n(.*?)\r?\n---", file.read(LONGEST_CARD), re.DOTALL)
    try:
        data = from_yaml(front_matter[1]) if front_matter else None
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    value = data.get("license")
    if value == "other":
        value = data.get("license_name") or value
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) if value else None


def _is_small(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in SMALL) and path.count("/") <= path.startswith("additional_")


def _known_to_transformers(model_type: object) -> bool:
    """Whether Transformers itself supports it. Publishers often keep the 'auto_map' of a model that it now supports."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:  # this image has no Transformers; the stages that have it check again
        return True
    return str(model_type) in CONFIG_MAPPING_NAMES


def weight_map(index: bytes) -> dict[str, str]:
    """Read each tensor's shard from an index. Raises: DamagedModel; InvalidName: a shard's path leads elsewhere."""
    shards = parse_object(index, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise damaged(f"{INDEX} has no weight_map")
    for shard in set(shards.values()):
        safe_relative(shard)
    return shards


def config_in(directory: Path) -> dict[str, Any]:
    """Read config.json; empty if it can't be read: vLLM says then what is wrong."""
    return read_object(directory / CONFIG) or {}


def stated(config: Mapping[str, Any], *fields: str) -> Any:
    """Find the value of the first of these fields that is set, in config.json or in its part for the language model;
    None if none is."""
    parts = (config, config.get("text_config") or {})
    return next((part[name] for part in parts for name in fields if part.get(name)), None)


def content_of(path: Path) -> bytes:
    """Read a small file of a model. Raises: DamagedModel: it is too large to be one."""
    if (size := path.stat().st_size) > LARGEST_SMALL_BYTES:
        raise damaged(f"{path.name} has {size} bytes, which no such file has")
    return path.read_bytes()


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Parse the JSON object in the file *name*. Raises: DamagedModel: it is none."""
    try:
        value = from_json(content)
    except ValueError as error:
        raise damaged(f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise damaged(f"{name} is not a JSON object")
    return value
