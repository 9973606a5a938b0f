from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from stages.parts.base.errors import MeasurementFailed, ServerFailed
from stages.parts.vllm.client import Access
from stages.parts.vllm.probes import ANSWER_TOKENS, PROMPTS, check_probes, record_probes
from tests.stages.parts.vllm.answering import Answering, Asked

SURE, NEARLY, HARDLY = math.log(0.9), math.log(0.88), math.log(0.001)


class Model:
    """Answers every question with the same token, and gives the set probabilities to a text that it reads."""

    def __init__(self, token: int = 5, said: float = SURE, read: float = SURE, likeliest: float = SURE) -> None:
        self.token, self.said, self.read, self.likeliest = token, said, read, likeliest
        self.first_id = 1

    def answer(self, path: str, asked: Asked) -> tuple[int, Any]:
        make = self._reading if "prompt_logprobs" in asked else self._saying
        choices = [make(prompt, int(asked["max_tokens"])) for prompt in asked["prompt"]]
        return 200, {"choices": [each | {"index": place} for place, each in enumerate(choices)]}

    def _saying(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {
            "prompt_token_ids": [self.first_id, len(prompt)],
            "token_ids": [self.token] * tokens,
            "logprobs": {"tokens": ["!"] * tokens, "token_logprobs": [self.said] * tokens},
        }

    def _reading(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        places = [
            {str(token): {"logprob": self.read, "rank": 2}, "99": {"logprob": self.likeliest, "rank": 1}}
            for token in prompt[1:]
        ]
        return {"prompt_logprobs": [None, *places]}


def checked(now: Model) -> float:
    with Answering(Model().answer) as before:
        recorded = record_probes(Access(before.url, "m"))
    with Answering(now.answer) as server:
        return check_probes(Access(server.url, "m"), recorded)


def test_every_prompt_is_recorded_with_its_answer_token_by_token() -> None:
    with Answering(Model().answer) as server:
        recorded = record_probes(Access(server.url, "m", "secret"))
    assert [each.prompt for each in recorded] == list(PROMPTS)
    assert all(each.token_ids == (5,) * ANSWER_TOKENS for each in recorded)
    assert all(each.logprobs == (SURE,) * ANSWER_TOKENS for each in recorded)
    assert len(server.asked) == 1


def test_the_same_model_agrees_and_a_little_noise_passes() -> None:
    assert checked(Model()) == 1.0
    found = checked(Model(said=NEARLY, read=NEARLY, likeliest=NEARLY))
    assert found >= 0.95


def test_a_server_that_returns_200_and_garbage_fails() -> None:
    found = checked(Model(token=7, read=HARDLY))
    assert found < 0.1


def test_a_flipped_near_tie_changes_all_text_after_it_and_passes() -> None:
    found = checked(Model(token=7, read=NEARLY, likeliest=SURE))
    assert found >= 0.95


def test_another_tokenization_of_the_prompts_does_not_agree() -> None:
    other = Model()
    other.first_id = 2
    assert checked(other) == 0.0


@pytest.mark.parametrize("broken", [math.nan, None, "high"])
def test_probabilities_that_are_not_numbers_are_a_failure_of_the_server(broken: Any) -> None:
    with pytest.raises(ServerFailed, match="usable answer"):
        checked(Model(read=broken))


def test_without_recorded_answers_nothing_can_be_compared() -> None:
    with pytest.raises(MeasurementFailed, match="no answers were recorded"):
        check_probes(Access("http://127.0.0.1:9", "m"), ())
