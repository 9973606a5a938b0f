"""The file of samples: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stages.parts.base.errors import DamagedModel
from stages.parts.base.files import sha256_of
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.figures import load_of, task_score
from stages.parts.samples.lines import (
    AccuracyItem,
    HeldOutDocument,
    LoadRun,
    LoadSamples,
    PerplexityItem,
    Samples,
    TimedRequest,
    read_samples,
    write_samples,
)
from tests.samples import MODEL, base, evaluation, variant

FIRST = LoadSamples(
    LoadRun(restart=0, phase="round", number=0, concurrency=4, duration_s=7.163168466000002),
    (
        TimedRequest(
            restart=0,
            phase="round",
            number=0,
            start_s=0.0,
            ttft_ms=137.934,
            tpot_ms=8.531,
            e2el_ms=675.381,
            itl_ms=(31.981, 7.464),
            prompt_tokens=132,
            output_tokens=64,
        ),
    ),
)
TRIAL = LoadSamples(
    LoadRun(
        restart=0,
        phase="trial",
        number=2,
        rate_per_s=12.5,
        concurrency=3,
        duration_s=2.5,
        targets_ms=(1000.0, 100.0),
        held=True,
    ),
    (
        TimedRequest(
            restart=0,
            phase="trial",
            number=2,
            start_s=0.25,
            ttft_ms=169.659,
            tpot_ms=8.205,
            e2el_ms=686.593,
            itl_ms=(),
            prompt_tokens=117,
            output_tokens=64,
        ),
    ),
)
ENDED_EARLY = LoadSamples(TRIAL.run.model_copy(update={"number": 3, "rate_per_s": 50.0, "held": False}), ())
SAMPLES = Samples(
    rounds=(FIRST,),
    items=(
        AccuracyItem(
            restart=0, task="demo_group", subtask="demo_few", doc_id=7, doc_hash="0c4b", weight=1.5, correct=1.0
        ),
        PerplexityItem(
            restart=0, task="demo_perplexity", doc_id=51, doc_hash="4dee", loglikelihood=-1324.5, bytes=1236
        ),
    ),
    held_out=(
        HeldOutDocument(
            document=31, tokens=(68, 43, 81), listed=((43, 9), (81, 68)), logprobs=((-0.25, -1.5), (-0.75, -2.0))
        ),
    ),
    trials=(TRIAL, ENDED_EARLY),
)


@pytest.fixture
def measured(tmp_path: Path) -> Evaluation:
    """An evaluation of a single round."""
    store = ModelStore(tmp_path / "store", MODEL)
    made = variant(store, "awq", base(store))
    found = evaluation(store, made, quality=0.5, latency_ms=10.0, throughput=100.0, weights_bytes=1000)
    return found.model_copy(update={"rounds": found.rounds[:1]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "awq.samples.jsonl"


def test_what_is_written_is_read_again(measured: Evaluation, path: Path) -> None:
    assert write_samples(path, measured.key, SAMPLES) == sha256_of(path)
    assert read_samples(path, measured) == SAMPLES
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["head", "load", "request", "load", "request", "load", "accuracy", "perplexity", "held_out"]


def test_rounds_are_read_in_the_order_of_their_numbers_and_each_with_its_own_requests(
    measured: Evaluation, path: Path
) -> None:
    label = {"restart": 1, "number": 1}
    later = LoadSamples(
        FIRST.run.model_copy(update=label), tuple(each.model_copy(update=label) for each in FIRST.requests * 2)
    )
    write_samples(path, measured.key, replace(SAMPLES, rounds=(later, FIRST)))
    both = measured.model_copy(update={"rounds": measured.rounds * 2})
    assert read_samples(path, both).rounds == (FIRST, later)
    assert [load_of(each).requests for each in read_samples(path, both).rounds] == [1, 2]


@pytest.mark.parametrize(
    ("line", "changed", "named"),
    [
        (2, {"ttft_ms": "fast"}, r"line 3: request\.ttft_ms Input should be a valid number"),
        (2, {"tttf_ms": 1.0}, r"line 3: request\.tttf_ms Extra inputs are not permitted"),
        (1, {"duration_s": 0}, r"line 2: load\.duration_s Input should be greater than 0"),
        (6, {"kind": "guess"}, "line 7: .*does not match any of the expected tags"),
        (8, {"logprobs": [["a", "b"]]}, r"line 9: held_out\.logprobs\.0\.0"),
    ],
)
def test_an_invalid_line_is_damage_and_named(
    measured: Evaluation, path: Path, line: int, changed: dict[str, object], named: str
) -> None:
    write_samples(path, measured.key, SAMPLES)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changed)
    path.write_text("\n".join(lines))
    with pytest.raises(DamagedModel, match=named):
        read_samples(path, measured)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "cannot be read"),
        ('{"kind": "head", "evaluation": "KEY"', "cannot be read: line 1"),
        ('{"kind": "head", "evaluation": "another"}\n', "belong to another evaluation"),
        ('{"kind": "head", "evaluation": "KEY"}\n', "hold 0 rounds, but 1 were measured"),
        ('{"kind": "head", "evaluation": "KEY"}\n{"kind": "round", "rounds": 0}\n', "line 2: .*expected tags"),
        (
            '{"kind": "head", "evaluation": "KEY"}\n'
            '{"kind": "load", "restart": 0, "phase": "round", "number": 0, "concurrency": 4, "duration_s": 7.0}\n',
            "lack the requests of a run",
        ),
    ],
)
def test_an_incomplete_file_is_damage(measured: Evaluation, path: Path, content: str, named: str) -> None:
    path.write_text(content.replace("KEY", measured.key))
    with pytest.raises(DamagedModel, match=named):
        read_samples(path, measured)


def test_a_missing_file_is_damage(measured: Evaluation, path: Path) -> None:
    with pytest.raises(DamagedModel, match="cannot be read: No such file"):
        read_samples(path, measured)


def test_a_task_is_scored_by_the_items_of_its_own_kind(measured: Evaluation) -> None:
    perplexity = measured.quality[0].model_copy(update={"task": "demo_perplexity", "kind": "perplexity"})
    found = task_score(perplexity, SAMPLES)
    assert found is not None
    assert found.items == 1
    assert task_score(perplexity.model_copy(update={"kind": "accuracy"}), SAMPLES) is None
