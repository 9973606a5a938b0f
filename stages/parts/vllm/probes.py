"""Fixed questions to a server: they are answered once when a variant is measured, and again wherever it is served
later.

They need only plain HTTP on a base URL, so that a rollout can ask any server with vLLM's completions API.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from scoring.probes import agreement
from stages.parts.base.errors import MeasurementFailed
from stages.parts.records.evaluation import Probe
from stages.parts.vllm.client import Access, complete, given, usable

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


def record_probes(access: Access, prompts: Sequence[str] = PROMPTS, tokens: int = ANSWER_TOKENS) -> tuple[Probe, ...]:
    """Ask for the model's greedy answers."""
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


def check_probes(access: Access, recorded: Sequence[Probe]) -> float:
    """Ask the recorded questions again, in two requests, and return how far the answers agree: 0–1, where 1 is the same
    (``scoring.probes``). Raises MeasurementFailed if there are no recorded answers."""
    if not recorded:
        raise MeasurementFailed("no answers were recorded to compare with", hint="evaluate the variant again")
    most = max(len(probe.token_ids) for probe in recorded)
    answers = record_probes(access, [probe.prompt for probe in recorded], most)
    texts = [(*probe.prompt_ids, *probe.token_ids) for probe in (*recorded, *answers)]
    read = complete(access, texts, max_tokens=1, prompt_logprobs=1)
    with usable(access.url):
        return fmean(map(_agreement, recorded, answers, read[: len(recorded)], read[len(recorded) :]))


def _agreement(recorded: Probe, answer: Probe, read: dict[str, Any], read_answer: dict[str, Any]) -> float:
    """Args: read, read_answer: the probabilities that the server gives to the recorded text and to its own answer."""
    if answer.prompt_ids != recorded.prompt_ids:
        return 0.0  # the prompt is no longer tokenized as when it was recorded
    recomputed, _ = _probabilities(recorded, read)
    answered, likeliest = _probabilities(answer, read_answer)
    return agreement(recorded.logprobs, recomputed, answered, likeliest)


def _probabilities(probe: Probe, read: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Log-probabilities of the answer's tokens, and of the likeliest token at each position."""
    places = given(read)[len(probe.prompt_ids) - 1 :]
    tokens = [place[str(token)]["logprob"] for place, token in zip(places, probe.token_ids, strict=True)]
    likeliest = [max(token["logprob"] for token in place.values()) for place in places]
    return tokens, likeliest
