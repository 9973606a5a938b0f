from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stages.evaluate.distributions import LISTED, held_out_digest, measure_distributions
from stages.parts.base.errors import ConfigError, ServerFailed, UnknownName
from stages.parts.base.settings import CONFIGS
from stages.parts.base.workload import Workload
from stages.parts.model.corpora import read_documents
from stages.parts.samples.lines import HeldOutDocument
from stages.parts.vllm.client import Access
from tests.demo.corpus import ngrams
from tests.stages.parts.vllm.answering import Answering, Asked

VOCABULARY = 40


def workload(**changed: Any) -> Workload:
    given = {"name": "w", "prompt_tokens": 8, "output_tokens": 8, "concurrency": 1}
    return Workload.model_validate(given | {"quality_tasks": ("t",)} | changed)


def answer(path: str, asked: Asked) -> tuple[int, Any]:
    """A token per character; token n is the likelier the smaller n is. The rank of a token that is told because the
    text has it may be wrong, as in vLLM's AVX2 build."""
    if path == "/tokenize":
        return 200, {"tokens": [ord(each) % VOCABULARY for each in asked["prompt"]]}
    if path == "/v1/chat/completions":
        return 200, {"choices": [{"index": 0, "token_ids": continued(asked["messages"][0]["content"])}]}
    if "return_token_ids" in asked:
        choices = [{"index": number, "token_ids": continued(each)} for number, each in enumerate(asked["prompt"])]
        return 200, {"choices": choices}
    logprobs, likeliest = [-1.0 - token for token in range(VOCABULARY)], asked["prompt_logprobs"]
    places = [
        {
            str(each): {"logprob": logprobs[each], "rank": each + 1 if each < likeliest else 1, "decoded_token": "x"}
            for each in {token, *range(likeliest)}
        }
        for prompt in asked["prompt"]
        for token in prompt
    ]
    lengths = [len(prompt) for prompt in asked["prompt"]]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    told = [[None, *places[start + 1 : start + size]] for start, size in zip(starts, lengths, strict=True)]
    return 200, {"choices": [{"index": number, "prompt_logprobs": each} for number, each in enumerate(told)]}


def continued(prompt: str) -> list[int]:
    """The tokens of the prompt from its end."""
    return [ord(each) for each in reversed(prompt)]


def measured(
    server: Answering, tmp_path: Path, texts: list[str], *, chats: bool = False, **changed: Any
) -> list[HeldOutDocument]:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    given = workload(divergence_text=str(path), **changed)
    return measure_distributions(Access(server.url, "m"), given, 1024, chats=chats)


def test_the_likeliest_tokens_of_each_position_are_kept_in_order(tmp_path: Path) -> None:
    with Answering(answer) as server:
        documents = measured(server, tmp_path, ["one text", "zz"])
    assert [each.document for each in documents] == [0, 1]
    assert documents[0].tokens == tuple(ord(each) % VOCABULARY for each in "one text")
    # 'e' is token 21, beyond the first 20: it is told, and left out.
    assert documents[0].listed == (tuple(range(LISTED)),) * 7
    assert documents[0].logprobs == (tuple(-1.0 - token for token in range(LISTED)),) * 7


def test_as_many_documents_and_tokens_are_asked_for_as_the_workload_says(tmp_path: Path) -> None:
    with Answering(answer) as server:
        documents = measured(server, tmp_path, ["x" * 500] * 30, divergence_documents=20, divergence_tokens=50)
    assert [len(each.tokens) for each in documents] == [50] * 20
    assert [len(each["prompt"]) for each in server.asked if "prompt_logprobs" in each] == [8, 8, 4]


@pytest.mark.parametrize("chats", [False, True])
def test_the_beginning_of_each_text_is_continued_in_the_order_of_the_texts(tmp_path: Path, chats: bool) -> None:
    texts = [f"{number} the first half, the second half" for number in range(12)]
    with Answering(answer) as server:
        documents = measured(server, tmp_path, texts, chats=chats)
    said = ["".join(map(chr, reversed(each.continued))) for each in documents]
    begins = "Continue this text:\n\n" if chats else ""
    assert said == [begins + text[: len(text) // 2 + 1].rstrip() for text in texts]
    assert all(each["temperature"] == 0 for each in server.asked if "return_token_ids" in each)


def test_short_documents_count_but_single_tokens_do_not(tmp_path: Path) -> None:
    with Answering(answer) as server:
        assert [len(each.tokens) for each in measured(server, tmp_path, ["abc", "x", "ab"])] == [3, 2]
        with pytest.raises(ConfigError, match="no document of two tokens"):
            measured(server, tmp_path, ["x"])


def test_without_documents_nothing_is_requested(tmp_path: Path) -> None:
    with Answering(answer) as server:
        assert measured(server, tmp_path, ["text"], divergence_documents=0) == []
    assert not server.asked


@pytest.mark.parametrize("told", [None, [None], [None, {"1": {"logprob": math.nan, "rank": 1}}, {"1": {"rank": 1}}]])
def test_an_answer_without_distributions_is_the_server_s_failure(tmp_path: Path, told: Any) -> None:
    def silent(path: str, asked: Asked) -> tuple[int, Any]:
        choices = [{"index": number, "prompt_logprobs": told} for number in range(len(asked["prompt"]))]
        return answer(path, asked) if path == "/tokenize" else (200, {"choices": choices})

    with Answering(silent) as server, pytest.raises(ServerFailed, match="usable answer"):
        measured(server, tmp_path, ["abc"])


def test_the_text_is_known_by_its_content_and_none_is_none(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("text")
    other.write_text("text")
    assert held_out_digest(workload(divergence_text=str(one))) == held_out_digest(workload(divergence_text=str(other)))
    other.write_text("another")
    assert held_out_digest(workload(divergence_text=str(one))) != held_out_digest(workload(divergence_text=str(other)))
    assert held_out_digest(workload(divergence_documents=0, divergence_text="/no/such.txt")) is None


def test_a_missing_text_is_named_before_anything_is_measured() -> None:
    with pytest.raises(UnknownName, match="unknown held-out text 'python-doc'") as raised:
        held_out_digest(workload(divergence_text="python-doc"))
    assert "did you mean 'python-docs'?" in raised.value.hint
    with pytest.raises(ConfigError, match=r"no held-out text /no/such\.txt"):
        held_out_digest(workload(divergence_text="/no/such.txt"))


def test_the_held_out_text_shares_nothing_with_the_calibration_text() -> None:
    held_out = read_documents("python-docs", "held-out")
    calibration = read_documents("python-docs", "calibration")
    seen = {gram for text in calibration for gram in ngrams(text)}
    assert len(seen) > 10_000
    assert all(seen.isdisjoint(ngrams(text)) for text in held_out)
    assert len(held_out) >= workload().divergence_documents
    assert (CONFIGS / "held-out" / "python-docs.txt").stat().st_size < 200_000
