"""How fast a server is: the time to the first token, the time per token, and how many sequences meet the targets.

A prefill is mostly limited by arithmetic and a decoding step by reading the weights and the cache from memory, each at
an assumed share of the peak (the roofline model: Williams, Waterman, Patterson 2009). Users who each wait for their
answer also wait for the prefills of the others. docs/plan.md compares the times with measured kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, Attention, LatentAttention
from scoring.capacity.assumptions import ASSUMED
from scoring.capacity.storage import HALF, Storage
from scoring.capacity.weights import Parameters, count_parameters, loaded_bytes
from scoring.closed import PlanRecord

ALL_REDUCES: Final = 2
"""Per layer: after attention and after the MLP."""


@dataclass(frozen=True)
class Requests:
    """The mean request."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class SpeedCalibration:
    """Measured divided by predicted times, of earlier evaluations on the same type of GPU; 1: nothing was measured."""

    ttft: float = 1.0
    tpot: float = 1.0
    evaluations: int = 0


class PredictedSpeed(PlanRecord):
    """One replica with that many sequences at once."""

    sequences: int
    ttft_ms: float
    tpot_ms: float
    requests_per_s: float
    output_tokens_per_s: float
    """Goodput if the targets are met: every request meets them."""


@dataclass(frozen=True)
class Roofline:
    """The roofline model of a variant on a number of GPUs."""

    model: Architecture
    storage: Storage
    accelerator: Accelerator
    gpus: int
    calibration: SpeedCalibration = SpeedCalibration()

    @cached_property
    def parameters(self) -> Parameters:
        return count_parameters(self.model)

    def speed(self, sequences: int, requests: Requests) -> PredictedSpeed:
        """Predict the mean speed while that many users each send a request, wait for the answer, and send the next."""
        halfway = requests.prompt_tokens + requests.output_tokens // 2  # tokens in the cache during an answer's middle
        prefill, step = self.prefill_s(requests.prompt_tokens), self.step_s(sequences, halfway)
        busy = sequences * prefill / (sequences * prefill + requests.output_tokens * step)
        queue = busy * prefill / (2 * (1 - busy))  # mean wait in an M/D/1 queue
        ttft = (queue + prefill + step) * self.calibration.ttft
        tpot = (step + (sequences - 1) * prefill / requests.output_tokens) * self.calibration.tpot
        rate = sequences / (ttft + (requests.output_tokens - 1) * tpot)
        return PredictedSpeed(
            sequences=sequences,
            ttft_ms=ttft * 1e3,
            tpot_ms=tpot * 1e3,
            requests_per_s=rate,
            output_tokens_per_s=rate * requests.output_tokens,
        )

    def prefill_s(self, tokens: int) -> float:
        """Predict the seconds to compute a prompt alone."""
        model, size = self.model, self.gpus
        head = self.parameters.head or self.parameters.embedding
        matrices = 2.0 * (self.parameters.multiplied - head) * tokens + 2.0 * head
        attention = sum(
            count * _attention_operations(layer.attention, tokens)
            for layer, count in model.counted.items()
            if layer.attention
        )
        operations = matrices / self._peak() + attention / (self.accelerator.tflops.bf16 * 1e12)
        compute = operations / (ASSUMED.compute_efficiency.value * size)
        memory = self._read_s(self._weights(tokens))  # of many experts, each has few tokens
        return max(compute, memory) + self._all_reduces_s(tokens) + ASSUMED.step_ms.value / 1e3

    def step_s(self, sequences: int, context: int) -> float:
        """Predict the seconds until each of that many sequences, *context* tokens long, has its next token."""
        size = self.gpus
        # A state is read and written.
        states = 2 * self.model.state_bytes(size, self.model.recurrent_bytes or HALF)
        memory = self._read_s(self._weights(sequences) + sequences * (self.model.kv_bytes(context, size) + states))
        compute = 2 * self.parameters.multiplied * sequences / (self._peak() * ASSUMED.compute_efficiency.value * size)
        return max(memory, compute) + self._all_reduces_s(sequences) + ASSUMED.step_ms.value / 1e3

    def _read_s(self, size_bytes: float) -> float:
        return size_bytes / (self.accelerator.bandwidth_gb_per_s * 1e9 * ASSUMED.bandwidth_efficiency.value)

    def _weights(self, batch: int) -> float:
        """Bytes of weights that a step reads from one GPU; of the experts those that a token uses."""
        return sum(loaded * (1 - unused**batch) for unused, loaded in self._loaded.items())

    @cached_property
    def _loaded(self) -> Mapping[float, float]:
        """Bytes of weights on one GPU, by the probability that a token does not use them."""
        *layers, embedding, head, _ = loaded_bytes(self.model, self.storage, self.gpus)
        by_unused: dict[float, float] = defaultdict(float, {0.0: head or embedding})
        for layer, loaded in zip(self.model.layers, layers, strict=True):
            feed_forward = layer.feed_forward
            matrices = layer.matrices(self.model.hidden)
            in_experts = sum(matrix.parameters for matrix in matrices if matrix.kind == "experts")
            share = in_experts / sum(matrix.parameters for matrix in matrices)
            by_unused[0.0] += loaded * (1 - share)
            if feed_forward.experts:
                by_unused[1 - feed_forward.active / feed_forward.experts] += loaded * share
        return by_unused

    def _all_reduces_s(self, tokens: int) -> float:
        size = self.gpus
        if size == 1:
            return 0.0
        one_way = self.accelerator.link_gb_per_s / 2 * 1e9 * ASSUMED.link_efficiency.value
        sent_bytes = 2 * (size - 1) / size * tokens * self.model.hidden * HALF
        seconds = sent_bytes / one_way + ASSUMED.link_latency_us.value / 1e6
        return ALL_REDUCES * len(self.model.layers) * seconds

    def _peak(self) -> float:
        """Operations per second in the type of the storage, or else in 16 bits."""
        tflops = self.accelerator.tflops
        return (getattr(tflops, self.storage.arithmetic) or tflops.bf16) * 1e12


def _attention_operations(attention: Attention | LatentAttention, tokens: int) -> float:
    """Operations of causal attention over a prompt in one layer: each query with the keys and values before it."""
    widths = (
        attention.nope_size + attention.rope_size + attention.value_size
        if isinstance(attention, LatentAttention)
        else 2 * attention.head_size
    )
    reach = min(tokens, attention.window or tokens)
    return 2.0 * attention.heads * widths * reach * (tokens - reach / 2)
