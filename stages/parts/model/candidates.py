"""Candidates: checkpoints of a model that somebody published, measured beside the variants that are made of it.

A candidate has to be the same model with other weights: of the same class, shapes, vocabulary and token ids. Only its
weights and its config.json are taken; tokenizer, chat template and generation config are the model's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic import RootModel

from scoring.names import PRODUCTION
from stages.parts.base.errors import UnusableModel
from stages.parts.base.files import from_json
from stages.parts.base.formats import FORMATS
from stages.parts.base.store import Record
from stages.parts.model import description
from stages.parts.model.safetensors import damaged

VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""The files that may give tokens their ids, the most exact first."""
SHAPE: Final = re.compile(
    r"architectures|model_type|tie_word_embeddings|layer_types|num_(?!nextn)\w+|\w+_(size|dim|rank)"
)
"""The fields of config.json that decide the shapes of weights."""
LONGEST_NAME: Final = 40


class CandidateCheckpoint(Record):
    """What ``check`` found of a candidate, for the stage that fetches it."""

    name: str
    """That of its variant."""
    source: str
    commit: str
    parameters: dict[str, Any]
    """Those of its variant."""
    note: str
    """What of it differs from the model, but does not matter."""

    @classmethod
    def of(cls, name: str, described: description.Description) -> Self:
        source, commit, revision = described.model, str(described.commit), described.revision
        parameters = {"source": source, "revision": revision, "commit": commit, **described.form.parameters}
        return cls(name=name, source=source, commit=commit, parameters=parameters, note=described.note)


class Candidates(RootModel[tuple[CandidateCheckpoint, ...]]):
    """Several, as JSON."""


def names_of(candidates: Collection[str], model: str, published: str) -> dict[str, str]:
    """Name the variants of *candidates*, which are ``org/name`` or ``org/name@revision``.

    A name is the repository's in lower case, without the words with which the *model*'s begins, too: ``fp8-dynamic``
    for ``org/Qwen3-4B-FP8-dynamic`` of ``Qwen/Qwen3-4B``. If that is the name of a format, such as that in which the
    model was *published*, or another candidate's, the organization precedes it, and a number follows if needed.
    """
    names: dict[str, str] = {}
    for text in candidates:
        organization, _, repository = text.partition("@")[0].rpartition("/")
        own, other = _words(model.rpartition("/")[2]), _words(repository)
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False))
        short = "-".join(other[len([*common]) :] or other)[-LONGEST_NAME:].strip("-")
        longer = "-".join([*_words(organization), short])[-LONGEST_NAME:].strip("-")
        choices = itertools.chain((short, longer), (f"{longer}-{number}" for number in itertools.count(2)))
        names[next(name for name in choices if name not in {*FORMATS, PRODUCTION, published, *names})] = text
    return names


def with_candidates(base: description.Description, candidates: Collection[str], model: str) -> description.Description:
    """Describe *candidates* beside the model *base*, and what of each differs but does not matter.

    Raises:
        UnusableModel: one is another model, or can't be served; the message names what differs. The other errors are
            those of ``describe_model``.
    """
    described = {}
    for name, text in names_of(candidates, model, base.form.name).items():
        source, _, revision = text.partition("@")
        try:
            candidate = description.describe_model(source, revision or "main")
        except UnusableModel as error:
            raise UnusableModel(f"candidate {text}: {error}", hint=error.hint) from error
        described[name] = replace(candidate, note=compare(base, candidate))
    return replace(base, candidates=described)


def compare(base: description.Description, candidate: description.Description) -> str:
    """Check by small files that *candidate* is the model *base* with other weights. Returns what differs but does not
    matter; empty if nothing does. Raises the errors of ``with_candidates``."""
    if differ := _different_shapes(base.config, candidate.config):
        raise another(candidate.model, differ)
    vocabulary = next((name for name in VOCABULARIES if {name} <= base.files & candidate.files), None)
    if vocabulary is None:
        raise another(candidate.model, "it has no tokenizer of the same kind, whose token ids could be compared")
    same = {name for name, digest in base.digests.items() if candidate.digests.get(name) == digest}
    names = {vocabulary, *description.CHAT_FILES} - same
    with description.small_files_of(base, names) as ours, description.small_files_of(candidate, names) as theirs:
        if vocabulary in names and (differ := _different_ids(ours / vocabulary, theirs / vocabulary)):
            raise another(candidate.model, differ)
        if description.chat_template(ours) != description.chat_template(theirs):
            return "its own chat template differs from the model's, which is used in its place"
    return ""


def another(candidate: str, difference: str) -> UnusableModel:
    """Make the error for a candidate that is another model."""
    hint = "a candidate is the same model with other weights: leave it out of --candidate and optimize.candidates"
    return UnusableModel(f"candidate {candidate} is another model: {difference}", hint=hint)


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def _different_shapes(*configs: Mapping[str, Any]) -> str:
    for ours, theirs in (configs, [config.get("text_config") or {} for config in configs]):
        for field in filter(SHAPE.fullmatch, ours):
            if field in theirs and ours[field] != theirs[field]:
                return f"{field} is {theirs[field]}, and the model's is {ours[field]}"
    return ""


def _different_ids(ours: Path, theirs: Path) -> str:
    """Name a token whose id differs; of a file that is not JSON, say that it does. Empty if nothing differs."""
    if ours.name != "tokenizer.json":
        return f"its {ours.name} differs" if ours.read_bytes() != theirs.read_bytes() else ""
    own, other = _ids(ours), _ids(theirs)
    for token in own.keys() | other.keys():
        if own.get(token) != other.get(token):
            return f"token {token!r} has the id {other.get(token)}, and {own.get(token)} in the model"
    return ""


def _ids(tokenizer: Path) -> dict[str, int]:
    try:
        content = from_json(description.text_of(tokenizer))
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: each token with its score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(f"{tokenizer.name} is not a tokenizer's") from error
