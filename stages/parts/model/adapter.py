"""LoRA adapters: what their small files say, and whether they were made for a base model.

An adapter is ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them. For a layer with a matrix
of (outputs, inputs) it has ``lora_A`` of (rank, inputs) and ``lora_B`` of (outputs, rank).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import ConfigError, UnusableModel
from stages.parts.base.store import ModelStore
from stages.parts.model import hub
from stages.parts.model.checkpoint import content_of, parse_object
from stages.parts.model.description import Description, local_sizes, tensor_shapes
from stages.parts.model.name import ModelName
from stages.parts.model.safetensors import read_header
from stages.parts.model.unservable import unservable
from stages.parts.records.acquired import ACQUIRED, Acquired

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
FOLDER: Final = "adapters"
"""Of a release: a folder for each adapter, called as clients call it."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""
SHOWN: Final = 3
"""Differences from the base that one message names."""
LORA: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
"""A tensor's name: the layer, and which of its two matrices."""
RESIZED: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
"""The base's own embedding, which PEFT keeps if the vocabulary was changed."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adapter:
    """What an adapter says of itself."""

    source: str
    config: Mapping[str, Any]
    shapes: Shapes
    """Of its tensors, by name."""


def parse_source(source: str) -> tuple[ModelName, str]:
    """Parse ``org/name``, ``org/name@revision`` or a path. Raises: InvalidName."""
    path, _, revision = source.partition("@") if not source.startswith("/") else (source, "", "")
    return ModelName.parse(path), revision or "main"


def adapters_in(directory: Path) -> dict[str, Path]:
    """Find the adapters of a release, by name."""
    return {path.name: path for path in sorted((directory / FOLDER).glob("*"))}


def check_adapters(
    described: Description, adapters: Mapping[str, str], store: ModelStore | None = None
) -> dict[str, Adapter]:
    """Describe the adapters of a model. Reads the store, if it has them or the model, rather than the Hub. Raises
    UnusableModel if one can't be served or was made for another base, ConfigError if it is called like the model, and
    the errors of ``hub.describe``."""
    if described.model in adapters:
        raise ConfigError(f"serving.adapters: {described.model} is the model itself", hint="give it another name")
    found = {}
    for name, source in adapters.items():
        record = Acquired.read_if_intact(store.adapter(name) / ACQUIRED) if store else None
        kept = record is not None and source == f"{record.model}@{record.commit}"
        found[name] = read_adapter(store.adapter(name), source) if store and kept else describe_adapter(source)
    shapes = tensor_shapes(described, store.base if store else None) if adapters else {}
    for adapter in found.values():
        refuse_misfit(adapter, shapes, described.model)
    return found


def describe_adapter(source: str) -> Adapter:
    """Read the configuration and the header of an adapter on the Hub or in a directory; raises as ``read_adapter``, and
    the errors of ``hub.describe``."""
    name, revision = parse_source(source)
    if name.directory:
        return read_adapter(name.directory, source)
    listing = hub.describe(name.id, revision)
    check_files(listing.paths, source)
    config = parse_object(hub.read_small(name.id, listing.commit, CONFIG), CONFIG)
    tensors = hub.read_tensors(name.id, listing.commit, WEIGHTS)
    return _checked(Adapter(source, config, {tensor.name: tensor.shape for tensor in tensors}))


def read_adapter(directory: Path, source: str) -> Adapter:
    """Read the adapter in a directory. Raises UnusableModel if it can't be served, DamagedModel if a file does not
    parse, InvalidName if there is no such directory."""
    check_files(local_sizes(directory), source)
    config = parse_object(content_of(directory / CONFIG), CONFIG)
    header = read_header(directory / WEIGHTS)
    return _checked(Adapter(source, config, {name: tensor.shape for name, tensor in header.items()}))


def check_files(paths: Mapping[str, int] | list[str], source: str) -> None:
    """Refuse, with UnusableModel, what is no adapter or has only pickles."""
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in paths]:
        pickled = WEIGHTS in missing and any(Path(path).suffix in (".bin", ".pt", ".pth") for path in paths)
        what = "holds its weights only as pickles" if pickled else f"has no {missing[0]}, so it is no LoRA adapter"
        hint = unservable().no_pickles if pickled else "name an adapter as PEFT writes it"
        raise UnusableModel(f"{source} {what}", hint=hint)


def changed_layers(names: Iterable[str]) -> set[str]:
    """Name the kinds of layers that an adapter with tensors of these *names* changes, such as ``q_proj``, and
    ``experts`` for those in experts."""
    layers = {match[1] for name in names if (match := LORA.fullmatch(name))}
    return {layer.rpartition(".")[2] for layer in layers} | {"experts" for layer in layers if ".experts." in layer}


def max_lora_rank(config: Mapping[str, Any]) -> int:
    """Find the smallest of ``RANKS`` that has room for an adapter's ranks; 0 if none has, or they are not numbers."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else [pattern])]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        return 0
    return next((rank for rank in RANKS if rank >= max(ranks)), 0)


def _checked(adapter: Adapter) -> Adapter:
    """Refuse what no base can be served with; what else vLLM refuses, vLLM is asked."""
    config, kind = adapter.config, str(adapter.config.get("peft_type"))
    unknown = [name for name in adapter.shapes if not (LORA.fullmatch(name) or RESIZED.fullmatch(name))]
    if kind != "LORA":
        why = f"is of PEFT's type {kind}, and vLLM serves LORA alone"
    elif not max_lora_rank(config):
        why = f"has the rank {config.get('r')}, and vLLM takes 1 to {RANKS[-1]}"
    elif "lm_head" in changed_layers(adapter.shapes):
        why = "changes lm_head, and vLLM then fails to compute the log-probabilities of prompts"
    elif unknown:
        why = f"holds {unknown[0]}, which is not of a LoRA and would be left out"
    else:
        return adapter
    raise UnusableModel(f"the adapter {adapter.source} {why}", hint="train a plain LoRA adapter of the model")


def refuse_misfit(adapter: Adapter, base: Shapes, model: str) -> None:
    """Refuse, with UnusableModel that names what differs, an adapter that was made for another base than *model*, whose
    tensors are *base*."""
    if differences := list(_differences(adapter, base)):
        named = adapter.config.get("base_model_name_or_path")
        note = f"; its {CONFIG} names {named}" if named and named != model else ""
        more = f"; {len(differences) - SHOWN} more differ" if len(differences) > SHOWN else ""
        raise UnusableModel(
            f"the adapter {adapter.source} was made for another base than {model}: "
            f"{'; '.join(differences[:SHOWN])}{more}{note}",
            hint="name an adapter of this model, or the model that it was made for",
        )


def _differences(adapter: Adapter, base: Shapes) -> Iterator[str]:
    layers: dict[str, set[str]] = defaultdict(set)
    """By the ends of their names: checkpoints and Transformers begin them differently."""
    for layer in {name.rpartition(".")[0] for name in base}:
        parts = layer.split(".")
        for start in range(len(parts)):
            layers[".".join(parts[start:])].add(layer)
    for name, shape in adapter.shapes.items():
        lora, resized = LORA.fullmatch(name), RESIZED.fullmatch(name)
        module = (lora or resized or [""])[1]
        found = _only(module, layers) or (_only("embed_tokens", layers) if module.endswith("lm_head") else None)
        matrix = base.get(f"{found}.weight", ())
        if found is None and ".experts" not in module:  # Transformers keeps them in one tensor: vLLM decides
            yield f"there is no layer {module}"
        elif resized and matrix and shape != matrix:
            yield f"{module} has {(*shape, 0)[0]} tokens, and {matrix[0]} in the model: its vocabulary was changed"
        elif lora and len(shape) == len(matrix) == 2:  # packed weights have other shapes
            turned = adapter.config.get("fan_in_fan_out") or "lora_embedding" in name
            outputs, inputs = reversed(matrix) if turned else matrix
            side, width, ours = ("inputs", inputs, shape[1]) if lora[2] == "A" else ("outputs", outputs, shape[0])
            if width != ours:
                yield f"{module} has {ours} {side}, and {width} in the model"


def _only(module: str, layers: Mapping[str, set[str]]) -> str | None:
    """Find the only layer whose name ends like the *module*'s, its number included."""
    parts = module.split(".")
    numbered = max((place for place, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    ends = (layers.get(".".join(parts[start:]), set()) for start in range(numbered + 1))
    return next((min(found) for found in ends if len(found) == 1), None)
