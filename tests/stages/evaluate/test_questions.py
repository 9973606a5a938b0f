"""Our own quality tasks, asked of an endpoint whose answers are known."""

from __future__ import annotations

import hashlib
import json
import math
import re
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from scoring.constraints import Constraints
from scoring.criteria import Criteria
from stages.evaluate.quality import items_of, scores_of
from stages.evaluate.questions import OWN, RECIPE, written
from stages.evaluate.questions.instructions import MIXED
from stages.evaluate.questions.question import DATA, Served
from stages.evaluate.questions.requests import SEED, Function, drawn, same, without_fence, written_calls
from stages.parts.base.errors import ServerFailed
from stages.parts.base.files import digest_of
from stages.parts.model.corpora import read_documents
from stages.parts.samples.evidence import Measured, gates_of
from stages.parts.samples.lines import AccuracyItem, PerplexityItem, Samples
from stages.parts.vllm.client import Access
from tests.demo.corpus import ngrams
from tests.stages.evaluate.scripted import Said, ask, chat, model, prompt_of, scripted
from tests.stages.parts.vllm.answering import Asked

QUESTIONS = 60
PLAIN = ""


@cache
def wanted_by(seed: int) -> dict[str, tuple[Function, Any]]:
    return {words: (function, arguments) for function, words, arguments in drawn(seed)}


def structured(asked: Asked, right: bool) -> Said:
    words = re.findall(r"A customer writes:\n\n(.+)\n", prompt_of(asked))[0]
    _, wanted = wanted_by(SEED)[words]
    text = json.dumps(wanted)
    return chat(f"```json\n{text}\n```" if right else text[:-1])


def called(asked: Asked, right: bool) -> Said:
    function, arguments = wanted_by(SEED + 1)[prompt_of(asked)]
    assert function.name in [each["function"]["name"] for each in asked["tools"]]
    given = arguments if right else dict.fromkeys(arguments)
    if asked["tool_choice"] == "auto":
        call = {"function": {"name": function.name, "arguments": json.dumps(given)}}
        return {"message": {"content": None, "tool_calls": [call]}}
    return chat(f"<tool_call>\n{json.dumps({'name': function.name, 'arguments': given})}\n</tool_call>")


def recalled(asked: Asked, right: bool) -> Said:
    prompt = prompt_of(asked)
    place = re.findall(r"access code of the (\w+ \w+)", prompt)[-1]
    (code,) = re.findall(rf"access code of the {place} is (\d+)", prompt)
    text = code if right else "1234567"
    return chat(text) if "messages" in asked else {"text": f" {text}. And so on."}


@pytest.mark.parametrize(
    ("task", "script"),
    [("structured_output", structured), ("tool_calls", called), ("long_context", recalled)],
)
@pytest.mark.parametrize("right", [0, 37, QUESTIONS])
def test_a_task_s_score_is_the_share_of_right_answers(tmp_path: Path, task: str, script: Any, right: int) -> None:
    with scripted(right, script) as server:
        found = ask(server, model(tmp_path / "model"), task, part=[0, QUESTIONS])
    (score,) = scores_of(found)
    assert (score.task, score.kind, score.value, score.items) == (task, "accuracy", right / QUESTIONS, QUESTIONS)
    items = [each for each in items_of(found) if isinstance(each, AccuracyItem)]
    assert sum(each.correct for each in items) == right
    assert [each.doc_id for each in items] == list(range(QUESTIONS))
    assert len({each.doc_hash for each in items}) == QUESTIONS
    assert all(each.tokens for each in items), "the server's own count of each answer"


@pytest.mark.parametrize(("task", "script"), [("structured_output", structured), ("tool_calls", called)])
def test_a_model_that_breaks_json_or_calls_fails_the_gate(tmp_path: Path, task: str, script: Any) -> None:
    answers = {}
    for name, right in (("fp16", 400), ("broken", 320)):
        with scripted(right, script) as server:
            found = ask(server, model(tmp_path / "model"), task, part=[0, 400])
        answers[name] = Measured(Samples(items=tuple(items_of(found))), 1.0)
    gates = gates_of(answers, Criteria(), Constraints())
    assert gates["fp16"].verdict == "pass"
    assert gates["broken"].verdict == "fail"
    assert f"loses 20.0% of {task}" in gates["broken"].reasons[0]


def test_calls_that_the_server_finds_count_like_those_that_stay_in_the_text(tmp_path: Path) -> None:
    with scripted(7, called) as server:
        found = ask(server, model(tmp_path / "model"), "tool_calls", parses_calls=True, part=[0, 10])
    assert scores_of(found)[0].value == 0.7
    assert {each["tool_choice"] for each in server.asked} == {"auto"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [("f", {}), ("g", {})]),
        ('{"name": "f", "parameters": {"a": {"name": 2}}}', [("f", {"a": {"name": 2}})]),
        ('{"name": "f", "arguments": {"a": 1}', []),
        ("I would call f({a}).", []),
    ],
)
def test_calls_are_found_in_the_forms_that_models_write(text: str, calls: list[Any]) -> None:
    assert written_calls(text) == calls


def test_a_model_without_a_chat_template_continues_texts_and_is_asked_nothing_else(tmp_path: Path) -> None:
    with scripted(10, recalled) as server:
        found = ask(server, model(tmp_path / "model", PLAIN), "tool_calls", "long_context", part=[0, 20])
    assert found["left_out"] == {"tool_calls": "the model's tokenizer has no chat template"}
    (score,) = scores_of(found)
    assert (score.task, score.value) == ("long_context", 0.5)
    assert not any("messages" in each for each in server.asked)


def test_a_template_that_ignores_tools_is_not_asked_for_calls(tmp_path: Path) -> None:
    with scripted(4, structured) as server:
        found = ask(server, model(tmp_path / "model", "{{ messages }}"), "tool_calls", "structured_output", part=[0, 4])
    assert list(found["left_out"]) == ["tool_calls"]
    assert [score.task for score in scores_of(found)] == ["structured_output"]


def test_the_items_keep_their_numbers_and_questions_however_they_are_divided(tmp_path: Path) -> None:
    directory, parts = model(tmp_path / "model"), []
    for start, stop in ((0, 20), (0, 5), (5, 20)):
        with scripted(20, recalled) as server:
            found = ask(server, directory, "long_context", part=[start, stop])
        parts.append([(each.doc_id, each.doc_hash) for each in items_of(found) if isinstance(each, AccuracyItem)])
    whole, first, rest = parts
    assert whole == first + rest


@pytest.mark.parametrize("served", [1024, 4096])
def test_the_context_is_as_long_as_what_is_served_and_the_facts_are_all_over_it(tmp_path: Path, served: int) -> None:
    with scripted(99, recalled) as server:
        ask(server, model(tmp_path / "model"), "long_context", max_model_len=served, part=[0, 40])
    texts = {prompt_of(each).rpartition("\n\n")[0] for each in server.asked if "messages" in each}
    longest = max(texts, key=len)
    assert 0.85 * served - 160 < len(longest.split()) <= served - 160
    depths = [found.start() / len(longest) for found in re.finditer("The access code", longest)]
    assert depths[0] == 0
    assert depths[-1] > 0.9
    assert max(b - a for a, b in pairwise(depths)) < 3 / len(depths)


def test_a_text_s_perplexity_is_that_of_all_its_tokens(tmp_path: Path) -> None:
    def likely(asked: Asked, right: bool) -> Said:
        # A token for each byte, each with one bit; the first has no probability.
        places = [{"7": {"logprob": -math.log(2), "rank": 3}} for _ in range(len(asked["prompt"].encode()))]
        return {"text": "", "prompt_logprobs": [None, *places]}

    with scripted(0, likely) as server:
        found = ask(server, model(tmp_path / "model", PLAIN), "perplexity_prose", "perplexity_code")
    assert [(score.kind, score.value) for score in scores_of(found)] == [("perplexity", pytest.approx(1.0))] * 2
    items = [each for each in items_of(found) if isinstance(each, PerplexityItem)]
    assert sorted(each.bytes for each in items) == sorted(len(each["prompt"].encode()) for each in server.asked)


def test_a_server_that_refuses_or_breaks_the_protocol_is_an_error_and_no_wrong_answer(tmp_path: Path) -> None:
    with scripted(0, lambda asked, right: {"text": "no probabilities"}) as server, pytest.raises(ServerFailed):
        ask(server, model(tmp_path / "model"), "perplexity_prose", part=[0, 3])


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        ({"a": 1, "b": ["X "]}, True),
        ({"a": 1, "b": ["x"], "c": 0}, False),
        ({"a": True, "b": ["x"]}, False),
        ({"a": 1.0, "b": ["x"]}, False),
        ({"a": 1, "b": "x"}, False),
        ([], False),
        (None, False),
    ],
)
def test_values_are_the_same_if_they_and_their_types_are(found: Any, is_same: bool) -> None:
    assert same(found, {"a": 1, "b": ["x"]}) is is_same


def test_a_code_block_may_surround_an_answer_but_nothing_else_may() -> None:
    assert without_fence("```json\n{}\n```") == "{}\n"
    assert without_fence(" {} ") == "{}"
    assert without_fence("Here it is: ```{}```") == "Here it is: ```{}```"


def test_the_questions_change_only_with_their_recipe(tmp_path: Path) -> None:
    """If this fails, raise ``RECIPE``: answers to the former questions must not be compared with new ones."""
    with scripted(0, recalled) as server:
        served = Served(Access(server.url, "m"), model(tmp_path / "model"), 1024)
        tasks = [task for name, task in OWN.items() if name not in DATA]
        asked = [each.digest for task in tasks for each in islice(task.questions(served), 50)]
        asked.append(digest_of(written.rows()[:MIXED]))
    digest = hashlib.sha256("".join(asked).encode()).hexdigest()
    assert (RECIPE, digest[:16]) == (2, "ec7dc9011eb4c08c")


def test_the_texts_of_other_kinds_share_nothing_with_the_calibration_text_and_fit_every_context() -> None:
    calibration = read_documents("python-docs", "calibration")
    seen = {gram for text in calibration for gram in ngrams(text)}
    for name in ("prose", "code"):
        texts = read_documents(name, "held-out")
        assert len(texts) == len(set(texts)) == 40
        assert all(seen.isdisjoint(ngrams(text)) for text in texts)
        assert all(400 < len(text) < 1000 for text in texts)
