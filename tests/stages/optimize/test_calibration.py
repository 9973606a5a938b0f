from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.optimize.job import KIND, calibration_digest, sequences
from stages.parts.base.errors import ConfigError, UnknownName
from stages.parts.base.optimize_settings import Calibration
from stages.parts.base.settings import CONFIGS
from stages.parts.model.corpora import read_documents, text_path
from tests.stages.optimize.tiny import make_tokenizer, words


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_name_is_a_file_in_configs() -> None:
    assert text_path("python-docs", KIND) == CONFIGS / "calibration" / "python-docs.txt"
    assert len(read_documents("python-docs", KIND)) > 1


def test_the_error_for_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(UnknownName, match="unknown calibration text 'python-doc'") as caught:
        text_path("python-doc", KIND)
    assert "did you mean 'python-docs'?" in caught.value.hint


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no calibration text .*missing\.txt"):
        text_path(str(tmp_path / "missing.txt"), KIND)


def test_form_feeds_separate_documents(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "one\n\nstill one\n\f\ntwo\n\f\n")
    assert read_documents(path, KIND) == ["one\n\nstill one", "two"]


def test_blank_lines_separate_documents_if_there_is_no_form_feed(tmp_path: Path) -> None:
    assert read_documents(written(tmp_path / "a.txt", "one\nstill one\n\n\ntwo\n"), KIND) == ["one\nstill one", "two"]


def test_documents_come_from_the_text_field_of_a_jsonl_file(tmp_path: Path) -> None:
    rows = [{"text": "one\u2028line"}, {"text": "two\n\nparagraphs", "id": 7}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read_documents(written(tmp_path / "a.jsonl", lines + "\n\n"), KIND) == ["one\u2028line", "two\n\nparagraphs"]


@pytest.mark.parametrize("line", ["not JSON", '{"content": "x"}', '["text"]', '{"text": 5}'])
def test_the_error_names_a_wrong_line_of_a_jsonl_file(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2 of the calibration text .*a\.jsonl"):
        read_documents(written(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line), KIND)


@pytest.mark.parametrize("text", ["", " \n\n \f\n"])
def test_an_empty_text_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_documents(written(tmp_path / "a.txt", text), KIND)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00\x00")
    with pytest.raises(ConfigError, match=r"can't be read: .*utf-8"):
        read_documents(str(tmp_path / "a.txt"), KIND)


def test_sequences_are_full_and_depend_on_the_seed() -> None:
    documents = [words(50, seed) for seed in range(20)]
    tokenizer = make_tokenizer()
    first = sequences(documents, tokenizer, Calibration(samples=6, seed=1), 32)
    assert [len(each) for each in first] == [32] * 6
    assert first == sequences(documents, tokenizer, Calibration(samples=6, seed=1), 32)
    assert first != sequences(documents, tokenizer, Calibration(samples=6, seed=2), 32)


def test_the_error_for_a_short_text_says_how_many_sequences_it_gives() -> None:
    with pytest.raises(ConfigError, match="gives 2 sequences of 16 tokens, but 128 are needed"):
        sequences([words(20), words(20, seed=1)], make_tokenizer(), Calibration(samples=128), 16)


def test_the_digest_depends_on_the_content_and_the_cut_but_not_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here = Calibration(text=written(tmp_path / "a.txt", "one"))
    there = Calibration(text=written(tmp_path / "elsewhere" / "a.txt", "one"))
    other = Calibration(text=written(tmp_path / "b.txt", "two"))
    digest = calibration_digest(here, 512)
    assert calibration_digest(there, 512) == digest
    changed = [calibration_digest(other, 512), calibration_digest(here, 256)]
    changed += [calibration_digest(here.model_copy(update=change), 512) for change in ({"samples": 8}, {"seed": 1})]
    assert len({digest, *changed}) == 5
