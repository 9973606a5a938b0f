from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.evaluate.trace import Trace, load_trace, read_trace
from stages.parts.base.errors import ConfigError
from tests.extras import need
from tests.serving import DEMO


def trace_file(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_texts_and_lengths_are_read_and_empty_lines_left_out(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path, {"prompt": "Hi\u2028there", "output_tokens": 3}, "", {"prompt_tokens": 5, "output_tokens": 7}
    )
    found = [(each.line, each.prompt, each.prompt_tokens, each.output_tokens) for each in read_trace(path)]
    assert found == [(1, "Hi\u2028there", 0, 3), (3, None, 5, 7)]


def test_every_wrong_line_is_named_with_its_number_and_its_mistake(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        {"prompt": "good", "output_tokens": 3},
        "{",
        {"prompt": "Hi"},
        {"prompt": "", "output_tokens": 1},
        {"prompt_tokens": 0, "output_tokens": 1},
        {"prompt_tokens": 4, "output_tokens": True},
        {"prompt": "Hi", "prompt_tokens": 4, "output_tokens": 1},
        [1],
    )
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    said = str(error.value).splitlines()
    assert said[0] == f"7 mistakes in the trace {path}"
    assert [line.strip().partition(":")[0] for line in said[1:]] == [f"line {number}" for number in range(2, 9)]
    for part in (
        "not JSON",
        "not of the form",
        "prompt is not a text",
        "prompt_tokens is not a number above 0 (got 0)",
    ):
        assert part in str(error.value)


def test_of_very_many_wrong_lines_the_first_are_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(trace_file(tmp_path, *["x"] * 50))
    assert "line 20: " in str(error.value)
    assert "line 21: " not in str(error.value)
    assert "… and 30 more" in str(error.value)


def test_an_empty_and_a_binary_trace_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(trace_file(tmp_path, ""))
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_trace(tmp_path / "trace.jsonl")


class TestWithTheDemoModel:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Trace:
        need("transformers")
        lines = [
            {"prompt": "The function returns a list", "output_tokens": 3},
            {"prompt_tokens": 50, "output_tokens": 7},
        ]
        return load_trace(str(trace_file(tmp_path, *lines)), DEMO / "model", seed=1)

    def test_texts_are_counted_and_too_long_lines_named(self, trace: Trace) -> None:
        text, lengths = trace.requests
        assert 3 <= text.prompt_tokens <= 15
        trace.check_fits(57)
        with pytest.raises(ConfigError, match=r"served with 56 tokens\n +line 2 needs 50 \+ 7 = 57 tokens"):
            trace.check_fits(56)
        assert lengths.prompt_tokens == 50

    def test_each_round_goes_on_where_the_last_one_stopped(self, trace: Trace, tmp_path: Path) -> None:
        path = tmp_path / "sent.jsonl"
        assert trace.write(path, 0, 3) == [3, 7, 3]
        assert trace.write(path, 3, 2) == [7, 3]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["output_tokens"] for line in lines] == [7, 3]
        assert lines[1]["prompt"] == "The function returns a list"

    def test_lengths_become_random_texts_the_same_at_each_call_and_others_in_each_round(
        self, trace: Trace, tmp_path: Path
    ) -> None:
        texts = []
        for start in (1, 1, 3):
            trace.write(tmp_path / "sent.jsonl", start, 1)
            texts.append(json.loads((tmp_path / "sent.jsonl").read_text())["prompt"])
        assert texts[0] == texts[1] != texts[2]
        counted = [len(trace.tokenizer(text).input_ids) for text in texts]
        assert all(abs(each - 50) <= 2 for each in counted)
