"""Candidates: checkpoints of a model that somebody published, measured beside the variants that are made of it.

A candidate has to be the same model with other weights: of the same class, shapes, vocabulary and token ids. Only its
weights and its config.json are taken; tokenizer, chat template and generation config are the model's own.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import RootModel

from scoring.capacity.reader import EXPERTS, EXPERTS_PER_TOKEN
from stages.parts.base.errors import UnusableModel
from stages.parts.base.formats import FORMATS
from stages.parts.base.record import Record
from stages.parts.model.checkpoint import CONFIG
from stages.parts.model.description import (
    CHAT_FILES,
    Description,
    chat_template,
    describe_model,
    small_files_of,
    text_of,
)

VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""The files that may give tokens their ids, the most exact first."""
SHAPES: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "tie_word_embeddings", "layer_types", "sliding_window"),
    *(*EXPERTS, *EXPERTS_PER_TOKEN),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state"),
)
"""The fields of config.json that decide the shapes of weights, or what they are multiplied with."""
LONGEST_NAME: Final = 40
HINT: Final = "a candidate is the same model with other weights: leave it out of --candidate and optimize.candidates"


class Candidate(Record):
    """What ``check`` found of a candidate, for the stage that fetches it."""

    name: str
    """That of its variant."""
    source: str
    revision: str
    commit: str
    stored: dict[str, Any]
    """``published_as`` of its config.json."""
    note: str = ""
    """What else differs from the model; empty if nothing does."""


class Candidates(RootModel[tuple[Candidate, ...]]):
    """Several, as JSON."""


def names_of(candidates: Collection[str], model: str, published: str) -> dict[str, str]:
    """Name the variants of *candidates*, which are ``org/name`` or ``org/name@revision``, in their order.

    A name is the repository's in lower case, without what it has in common with the beginning of the *model*'s:
    ``fp8-dynamic`` for ``org/Qwen3-4B-FP8-dynamic`` of ``Qwen/Qwen3-4B``. If that is a format's, such as that in which
    the model was *published*, or another candidate's, the organization precedes it, and a number follows if needed.
    """
    names: dict[str, str] = {}
    own = model.rpartition("/")[2].lower()
    for text in candidates:
        organization, _, repository = split(text)[0].lower().rpartition("/")
        short = _valid(repository.removeprefix(own)) or _valid(repository)
        longer = _valid(f"{organization}-{short}")
        numbered = (f"{longer}-{number}" for number in itertools.count(2))
        taken = {*FORMATS, published, *names}
        names[next(name for name in itertools.chain((short, longer), numbered) if name not in taken)] = text
    return names


def split(candidate: str) -> tuple[str, str]:
    """Split ``org/name@revision``; the revision is ``main`` unless it is given."""
    source, _, revision = candidate.partition("@")
    return source, revision or "main"


def with_candidates(base: Description, candidates: Collection[str], model: str) -> Description:
    """Describe *candidates* beside the model *base*. Raises the errors of ``describe_model``."""
    described = {}
    for name, text in names_of(candidates, model, base.format).items():
        try:
            described[name] = describe_model(*split(text))
        except UnusableModel as error:
            raise UnusableModel(f"candidate {text}: {error}", hint=error.hint) from error
    return replace(base, candidates=described)


def compare(base: Description, candidate: Description) -> str:
    """Check by small files that *candidate* is the model *base* with other weights. Returns what differs but does not
    matter, in one sentence, or an empty text.

    Raises:
        UnusableModel: it is another model; the message names what differs. Otherwise the errors of ``describe_model``.
    """
    if differ := _different_config(base.config, candidate.config):
        raise another(candidate.model, differ)
    both = [name for name in VOCABULARIES if name in _files(base) and name in _files(candidate)]
    if not both:
        raise another(candidate.model, "it has no tokenizer of the same kind, whose token ids could be compared")
    same = {name for name, digest in base.digests.items() if candidate.digests.get(name) == digest}
    names = {both[0], *CHAT_FILES} - same
    with small_files_of(base, names) as ours, small_files_of(candidate, names) as theirs:
        if both[0] in names and (why := _different_ids(ours / both[0], theirs / both[0])):
            raise another(candidate.model, why)
        if chat_template(ours) != chat_template(theirs):
            return "its own chat template differs from the model's, which is used in its place"
    return ""


def another(candidate: str, difference: str) -> UnusableModel:
    """Make the error for a candidate that is another model."""
    return UnusableModel(f"candidate {candidate} is another model: {difference}", hint=HINT)


def _valid(name: str) -> str:
    """Turn the part of a repository's name into a variant's, which names folders and Kubernetes' objects."""
    return re.sub(r"[^a-z0-9]+", "-", name)[-LONGEST_NAME:].strip("-")


def _different_config(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    for field in ("architectures", "model_type"):
        if base.get(field) != candidate.get(field):
            return f"{field} in {CONFIG} is {candidate.get(field)}, and the model's is {base.get(field)}"
    ours, theirs = (config.get("text_config") or config for config in (base, candidate))
    for field in SHAPES:
        if field in ours and field in theirs and ours[field] != theirs[field]:
            return f"{field} is {theirs[field]}, and the model's is {ours[field]}"
    return ""


def _files(described: Description) -> Collection[str]:
    if described.directory:
        return [path.name for path in described.directory.iterdir()]
    return described.digests.keys()


def _different_ids(ours: Path, theirs: Path) -> str:
    """Name a token whose id differs; of files that are not JSON, say that they do. Empty if none does."""
    if ours.name != "tokenizer.json":
        return f"its {ours.name} differs" if ours.read_bytes() != theirs.read_bytes() else ""
    own, other = _ids(ours), _ids(theirs)
    for token in sorted(own.keys() | other.keys(), key=lambda token: own.get(token, other.get(token, 0))):
        if own.get(token) != other.get(token):
            return f"token {token!r} has the id {other.get(token)}, and {own.get(token)} in the model"
    return ""


def _ids(tokenizer: Path) -> dict[str, int]:
    try:
        content = json.loads(text_of(tokenizer) or "{}")
    except ValueError:
        content = {}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: each token with its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
