"""How many parameters a model has, by kind, and how many bytes each variant stores and loads for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pydantic import Field, computed_field

from scoring.capacity.architecture import Architecture, Layer, NotSizeable
from scoring.capacity.storage import HALF, Storage
from scoring.closed import PlanRecord

UNEXPLAINED: Final = 0.01
"""The checkpoint may lack at most this share of the parameters that config.json describes (biases, other norms)."""


class Parameters(PlanRecord):
    """Counts of parameters by kind."""

    embedding: int
    head: int
    """The output head; 0 if it is the embedding."""
    attention: int
    mlp: int
    experts: int
    routers: int
    state_space: int
    vectors: int
    """Norms, biases and convolutions."""
    other: int
    """In the checkpoint, but not described by config.json: for images or sound, or for speculation."""
    inactive: int = Field(exclude=True)
    """Parameters of the experts that a token does not pass."""
    looked_up: int = Field(exclude=True)
    """Parameters of embeddings that are not the output head as well."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        kinds = (self.attention, self.mlp, self.experts, self.routers, self.state_space, self.vectors, self.other)
        return self.embedding + self.head + sum(kinds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def active(self) -> int:
        """Those that one token passes, in the usual count: the embedding is included."""
        return self.total - self.inactive

    @property
    def multiplied(self) -> int:
        """Those that one token is multiplied with: the active ones without the embedding's lookup and other parts."""
        return self.active - self.other - self.looked_up


def with_stored(model: Architecture, stored: int | None) -> Architecture:
    """Count as ``other`` what config.json does not explain of the parameters *stored* in the checkpoint, if their
    number is known. Raise NotSizeable if the checkpoint has fewer parameters than config.json describes."""
    if stored is None:
        return model
    described = count_parameters(model).total
    if stored < described * (1 - UNEXPLAINED):
        raise NotSizeable(
            f"config.json describes {described:,} parameters, but the checkpoint has {stored:,}: "
            f"type {model.model_type} has another form here"
        )
    return replace(model, other=max(0, stored - described))


def count_parameters(model: Architecture) -> Parameters:
    by_kind = dict.fromkeys(("attention", "mlp", "experts", "state space"), 0)
    inactive = 0
    for layer, layers in model.counted.items():
        for matrix in layer.matrices(model.hidden):
            by_kind[matrix.kind] += layers * matrix.parameters
            if matrix.kind == "experts":
                idle = matrix.count - layer.feed_forward.active
                inactive += layers * matrix.parameters // matrix.count * idle
    embedding = model.vocabulary * model.hidden
    return Parameters(
        embedding=embedding + model.tables,
        head=0 if model.tied else embedding,
        attention=by_kind["attention"],
        mlp=by_kind["mlp"],
        experts=by_kind["experts"],
        routers=sum(layer.router for layer in model.layers),
        state_space=by_kind["state space"],
        vectors=model.outside + sum(layers * _vectors(layer) for layer, layers in model.counted.items()),
        other=model.other,
        inactive=inactive,
        looked_up=model.tables + (0 if model.tied else embedding),
    )


def stored_bytes(model: Architecture, storage: Storage) -> int:
    """Bytes of a variant's safetensors files, without their headers."""
    total = count_parameters(model).total * HALF + storage.unexplained_bytes
    for layer, layers in model.counted.items():
        for matrix in layer.matrices(model.hidden):
            total += layers * (storage.stored_bytes(matrix) - matrix.parameters * HALF)
    return total


def explained(model: Architecture, storage: Storage, weights_bytes: int) -> Storage:
    """Complete the *storage* of a published checkpoint of that many bytes; 0 if their number is not known."""
    unexplained = weights_bytes - stored_bytes(model, storage) if weights_bytes else 0
    return replace(storage, unexplained_bytes=unexplained)


def loaded_bytes(model: Architecture, storage: Storage, tensor_parallel_size: int) -> tuple[int, ...]:
    """Bytes that one GPU holds of each layer, followed by those of the embedding, the head and the rest.

    Tensor parallelism divides matrices, embedding and head. Norms, routers and what is not divided are on every GPU.
    More GPUs than KV heads hold copies of these, which are not counted: they are below one percent.
    """
    size, embedding = tensor_parallel_size, model.vocabulary * model.hidden * HALF // tensor_parallel_size
    tables = model.tables * HALF // tensor_parallel_size

    def layer_bytes(layer: Layer) -> int:
        matrices = (
            storage.loaded_bytes(matrix) // (1 if matrix.split == "none" else size)
            for matrix in layer.matrices(model.hidden)
        )
        return sum(matrices) + (_vectors(layer) + layer.router) * HALF

    by_layer = {layer: layer_bytes(layer) for layer in model.counted}
    undivided = (model.other + model.outside) * HALF  # vLLM loads the other parts, or most of them
    undivided += storage.unexplained_bytes // size  # mostly layers in 16 bits, which it divides
    return (*map(by_layer.__getitem__, model.layers), embedding, 0 if model.tied else embedding, undivided + tables)


def _vectors(layer: Layer) -> int:
    return layer.vectors + (layer.state_space.vectors if layer.state_space else 0)
