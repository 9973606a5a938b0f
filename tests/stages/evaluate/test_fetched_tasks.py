"""The tasks whose data come from the Hub, asked of an endpoint whose answers are known."""

from __future__ import annotations

import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.evaluate.preloaded import Preloaded
from stages.evaluate.quality import run_tasks, scores_of
from stages.evaluate.questions import written
from stages.evaluate.questions.instructions import follows, sentences
from stages.evaluate.questions.question import DATA
from stages.parts.base.errors import ConfigError
from stages.parts.base.workload import Workload
from tests.extras import need
from tests.hub.datasets import add_datasets
from tests.hub.server import HubServer
from tests.serving import REPOSITORY
from tests.stages.evaluate.scripted import Said, chat, model, prompt_of, scripted
from tests.stages.parts.vllm.answering import Answering, Asked

ITEMS = 20
WITHOUT_LANGUAGE = 16
GSM8K, IFEVAL = DATA["gsm8k"], DATA["ifeval"]
OURS = {row["prompt"]: row for row in written.rows()}


def solved(asked: Asked, right: bool) -> Said:
    prompt = prompt_of(asked)
    if "sacks" in prompt:
        has, more = map(int, re.findall(r"\d+", prompt)[:2])
        return chat(f"It has {has} and gets {more}.\n\nThe answer is {has + more if right else has:,}.")
    row = OURS.get(prompt)
    followed = obedient(row) if row else "Wheat grows on this field"
    return chat(followed if right else f"{followed}, " + "and so on " * 100)


def thought(asked: Asked, right: bool) -> Said:
    """The same, where the server took all of it for thoughts."""
    return {"message": {"content": None, "reasoning": solved(asked, right)["message"]["content"]}}


def obedient(row: dict[str, Any]) -> str:
    """A short text that follows all instructions of one of our own prompts."""
    told = dict(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    text = "Rain fell. Wind rose. Night came. Dawn broke. Birds sang."
    words = told.get("keywords:existence", {}).get("keywords", [])
    if frequent := told.get("keywords:frequency"):
        words = [frequent["keyword"]] * frequent["frequency"]
    text += "".join(f" {word}." for word in words)
    text += " [x]" * told.get("detectable_content:number_placeholders", {}).get("num_placeholders", 0)
    if bullets := told.get("detectable_format:number_bullet_lists"):
        text = "* Rain\n" * (bullets["num_bullets"] - 1) + f"* {text}"
    if paragraphs := told.get("length_constraints:number_paragraphs"):
        text = "Rain fell.\n***\n" * (paragraphs["num_paragraphs"] - 1) + text
    text = f"<<Rain>>\n{text}" if "detectable_format:title" in told else text
    text = f"{text}\nP.S. Rain." if "detectable_content:postscript" in told else text
    text += " " + told.get("startend:end_checker", {}).get("end_phrase", "")
    text = text.lower() if "change_case:english_lowercase" in told else text
    return f'"{text}"' if "startend:quotation" in told else text


@contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy, and who was asked for through it."""
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def served(endpoint: Answering) -> Any:
    """What a measurement needs to know of a server."""
    return SimpleNamespace(
        url=endpoint.url, name="m", arguments=(), max_model_len=lambda: 4096, check_alive=lambda: None
    )


def workload(*tasks: str) -> Workload:
    return Workload(name="w", prompt_tokens=8, output_tokens=8, concurrency=1, quality_tasks=tasks, quality_limit=15)


def test_the_share_of_right_answers_is_the_score_and_only_the_hub_is_asked_for_data_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("lm_eval")
    directory, log = model(tmp_path / "model"), tmp_path / "quality.log"
    with proxy() as (address, outside), HubServer() as hub:
        add_datasets(hub, ITEMS)
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        with Preloaded("stages.evaluate.harness", tmp_path / "harness.log") as harness:
            scores = {}
            for task, right in (("gsm8k", 11), ("ifeval", 6), ("instructions", 8), ("gsm8k", 15)):
                with scripted(right, thought if right in (6, 11) else solved) as endpoint:
                    asked = workload(task)
                    found = run_tasks(harness, served(endpoint), directory, asked, log, include_defaults=False)
                    assert all(each["temperature"] == 0 for each in endpoint.asked)
                    assert all(each["chat_template_kwargs"] == {"enable_thinking": False} for each in endpoint.asked)
                (score,) = scores_of(found)
                assert (score.task, score.items) == (task, 15)
                scores[task, right] = score.value
            fetched = [each.path for each in hub.requests if each.method == "GET" and "/resolve/" in each.path]
            rest = rest_of(harness, directory, log)
            base = model(tmp_path / "base", "")
            with scripted(0, solved) as endpoint, pytest.raises(ConfigError, match="no quality task of the workload"):
                run_tasks(harness, served(endpoint), base, workload("gsm8k", "ifeval"), log, include_defaults=False)
    assert scores == {("gsm8k", 11): 11 / 15, ("ifeval", 6): 6 / 15, ("instructions", 8): 8 / 15, ("gsm8k", 15): 1.0}
    assert fetched == [f"/datasets/{each.dataset}/resolve/{each.commit}/{each.path}" for each in (GSM8K, IFEVAL)]
    assert outside == []
    assert rest == list(range(15, ITEMS))


def rest_of(harness: Preloaded, directory: Path, log: Path) -> list[int]:
    """The numbers of the problems that are asked after the first fifteen."""
    without_limit = workload("gsm8k").model_copy(update={"quality_limit": None})
    with scripted(0, solved) as endpoint:
        found = run_tasks(
            harness,
            served(endpoint),
            directory,
            without_limit,
            log,
            include_defaults=False,
            parts={"gsm8k": (15, None)},
        )
    return [each["doc_id"] for each in found["samples"]["gsm8k"]]


FETCH = """
from stages.evaluate.questions import written
from stages.evaluate.questions.question import DATA
from stages.parts.base.errors import SlipwayError
from stages.parts.model.hub import dataset_file
for each in (DATA["gsm8k"], DATA["ifeval"]):
    try:
        print(dataset_file(each).stat().st_size)
    except SlipwayError as error:
        print(type(error).__name__, error)
"""


def test_what_was_fetched_needs_no_hub_and_what_was_not_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched() -> tuple[str, str]:
        said = subprocess.run([sys.executable, "-c", FETCH], capture_output=True, text=True, check=True).stdout
        gsm8k, ifeval = said.splitlines()
        return gsm8k, ifeval

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.pin(IFEVAL.dataset, IFEVAL.commit, {IFEVAL.path: b"{}\n"})
        gsm8k, ifeval = fetched()
        assert re.match(r"PermanentError .* does not give main/test-\S+ of the data set openai/gsm8k", gsm8k)
        assert ifeval == "3"
    gsm8k, ifeval = fetched()
    assert gsm8k.startswith("HubUnavailable ")
    assert ifeval == "3"


@pytest.mark.parametrize(
    ("name", "arguments", "right", "wrong"),
    [
        ("keywords:existence", {"keywords": ["sea"]}, "The Sea.", "The lake."),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "A b", "a A"),
        ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "Rock!"),
        ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "at least"}, "!!", "!"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two", "One two."),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a\n***\n***\nb"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            "First\n\n“Then, it",
            "Then\n\nfirst",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. more", "Bye. Perhaps"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. more", "P.S. more"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
        ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* * *"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1 a Part 2",
            "Part 1",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<A title>>", "<< >>"),
        ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say so."}, "say so. So.", "So. Say so."),
        ("startend:end_checker", {"end_phrase": "The end."}, '"It is the end."', "The end. Not."),
        ("startend:quotation", {}, '"all"', '"'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 1, "capital_relation": "at least"},
            "so LOUD",
            "So Loud",
        ),
        ("change_case:english_capital", {}, "LOUD 1", "LOUDLy"),
        ("change_case:english_lowercase", {}, "soft 1", "Soft"),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    assert follows(right, name, arguments | {"other": None})
    assert not follows(wrong, name, arguments)


def test_every_prompt_of_ours_can_be_followed_and_none_is_by_silence() -> None:
    assert len(OURS) == written.COUNT
    for row in OURS.values():
        told = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        assert all(follows(obedient(row), *each) for each in told), row["prompt"]
        assert not all(follows("", *each) for each in told)


def test_sentences_end_where_people_see_them_end() -> None:
    assert sentences('Mr. Ito said "Stop!" Then (e.g. here) he left... Why? No end') == 4
    assert sentences("") == 0
