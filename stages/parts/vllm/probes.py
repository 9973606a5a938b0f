"""Fixed questions to a server: they are answered once when a variant is measured, and again wherever it is served
later.

They need only plain HTTP on a base URL, so that a rollout can ask any server with vLLM's completions API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from scoring.probes import Compared, agreement, common_prefix, compared
from stages.parts.base.errors import MeasurementFailed
from stages.parts.records.evaluation import Probe
from stages.parts.vllm.client import Access
from stages.parts.vllm.completions import complete, given, usable

PROMPTS: Final = (
    "The capital of France is",
    "Water boils when its temperature reaches",
    "To read a file line by line in Python, first",
    "Once upon a time there was a small village where",
    "The function returns a list of all the values that",
    "Question: What is two plus two?\nAnswer:",
    "If the connection is closed before the answer arrives, the client",
    "Monday, Tuesday, Wednesday,",
)
ANSWER_TOKENS: Final = 16
ANOTHER_QUESTION: Final = Compared(likeness=0.0, consistency=0.0, same_tokens=0)
"""The prompt is no longer tokenized as when it was recorded."""


@dataclass(frozen=True)
class ProbeCheck:
    """How a server's answers compare with recorded ones."""

    probes: tuple[Compared, ...]

    @property
    def agreement(self) -> float:
        """0–1, where 1 is the same; see ``scoring.probes``."""
        return agreement(self.probes)


def record_probes(access: Access) -> tuple[Probe, ...]:
    """Ask for the model's greedy answers to ``PROMPTS``."""
    return _answers(access, PROMPTS, ANSWER_TOKENS)


def check_probes(access: Access, recorded: Sequence[Probe]) -> ProbeCheck:
    """Ask the recorded questions again and compare the answers; this takes two requests. Raises MeasurementFailed if
    there are no recorded answers."""
    if not recorded:
        raise MeasurementFailed("no answers were recorded to compare with", hint="evaluate the variant again")
    most = max(len(probe.token_ids) for probe in recorded)
    answers = _answers(access, [probe.prompt for probe in recorded], most)
    texts = [(*probe.prompt_ids, *probe.token_ids) for probe in (*recorded, *answers)]
    read = complete(access, texts, max_tokens=1, prompt_logprobs=1)
    with usable(access.url):
        return ProbeCheck(tuple(map(_compared, recorded, answers, read[: len(recorded)], read[len(recorded) :])))


def _answers(access: Access, prompts: Sequence[str], tokens: int) -> tuple[Probe, ...]:
    # A model that ends its answer at once would give nothing to compare.
    choices = complete(access, prompts, max_tokens=tokens, ignore_eos=True, logprobs=1, return_token_ids=True)
    with usable(access.url):
        return tuple(
            Probe(
                prompt=prompt,
                prompt_ids=tuple(choice["prompt_token_ids"]),
                tokens=tuple(choice["logprobs"]["tokens"]),
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            )
            for prompt, choice in zip(prompts, choices, strict=True)
        )


def _compared(recorded: Probe, answer: Probe, read: dict[str, Any], read_answer: dict[str, Any]) -> Compared:
    """Args: read, read_answer: the probabilities that the server gives to the recorded text and to its own answer."""
    if answer.prompt_ids != recorded.prompt_ids:
        return ANOTHER_QUESTION
    recomputed, _ = _probabilities(recorded, read)
    answered, likeliest = _probabilities(answer, read_answer)
    agreeing = common_prefix(recorded.token_ids, answer.token_ids)
    return compared(recorded.logprobs, recomputed, answered, likeliest, agreeing)


def _probabilities(probe: Probe, read: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Log-probabilities of the answer's tokens, and of the likeliest token at each position."""
    places = given(read)[len(probe.prompt_ids) - 1 :]
    tokens = [place[str(token)]["logprob"] for place, token in zip(places, probe.token_ids, strict=True)]
    likeliest = [max(token["logprob"] for token in place.values()) for place in places]
    return tokens, likeliest
