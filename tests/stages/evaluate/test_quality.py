from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.evaluate.preloaded import Preloaded
from stages.evaluate.quality import check_tasks, group_shares, items_of, run_tasks, scores_of
from stages.parts.base.errors import ConfigError, HubUnavailable, MeasurementFailed, UnknownName
from stages.parts.base.serving_settings import Serving
from stages.parts.base.workload import Workload
from stages.parts.samples.figures import bits_per_byte_interval
from stages.parts.samples.lines import AccuracyItem, PerplexityItem
from stages.parts.vllm.server import Server, ServerSpec, running
from tests.extras import need
from tests.serving import DEMO, REPOSITORY, STAND_IN

OWN_TASK = """
task: own
dataset_path: json
output_type: generate_until
metric_list:
  - metric: {metric}
"""
UNREACHABLE = """
task: own
dataset_path: {path}
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
"""


def workload(*tasks: str, tasks_path: Path | None = None) -> Workload:
    return Workload(
        name="w",
        prompt_tokens=8,
        output_tokens=8,
        concurrency=1,
        quality_tasks=tasks,
        tasks_path=str(tasks_path) if tasks_path else None,
    )


def sample(doc_id: int, metric: str, value: Any, name: str = "none") -> dict[str, Any]:
    return {"doc_id": doc_id, "doc_hash": f"h{doc_id}", "filter": name, metric: value}


def harness(**tasks: tuple[dict[str, float], list[dict[str, Any]]]) -> dict[str, Any]:
    """What the harness leaves."""
    return {
        "results": {task: metrics for task, (metrics, _) in tasks.items()},
        "subtasks": {},
        "items": {task: len(samples) for task, (_, samples) in tasks.items()},
        "samples": {task: samples for task, (_, samples) in tasks.items()},
    }


def test_accuracy_has_lm_eval_s_standard_error_as_its_interval() -> None:
    metrics = {"acc,none": 0.75, "acc_stderr,none": 0.05, "acc_norm,none": 0.8, "acc_norm_stderr,none": 0.04}
    (score,) = scores_of(harness(arc=(metrics, [sample(i, "acc", i != 0) for i in range(4)])))
    assert (score.kind, score.value, score.score, score.items) == ("accuracy", 0.75, 0.75, 4)
    assert (score.low, score.high) == pytest.approx((0.75 - 1.96 * 0.05, 0.75 + 1.96 * 0.05), abs=1e-5)
    assert score.metrics == metrics


def test_an_accuracy_s_interval_stays_between_none_and_all() -> None:
    (score,) = scores_of(harness(arc=({"acc,none": 0.99, "acc_stderr,none": 0.05}, [sample(0, "acc", 1.0)])))
    assert score.high == 1.0


def test_perplexity_is_taken_as_bits_per_byte_and_scored_as_a_probability() -> None:
    documents = [(-math.log(2) * 2 * size, size) for size in (10, 50, 200)]
    samples = [sample(i, "bits_per_byte", list(document)) for i, document in enumerate(documents)]
    (score,) = scores_of(harness(text=({"bits_per_byte,none": 2.0, "word_perplexity,none": 9e9}, samples)))
    assert (score.kind, score.value, score.score) == ("perplexity", 2.0, 0.25)
    assert (score.low, score.high) == pytest.approx((2.0, 2.0))


def test_the_bootstrap_interval_is_repeatable_holds_the_value_and_narrows_with_more_documents() -> None:
    few = [
        PerplexityItem(restart=0, task="text", doc_id=i, loglikelihood=-10.0 * (1 + i % 5), bytes=20) for i in range(20)
    ]
    value = -sum(each.loglikelihood for each in few) / sum(each.bytes for each in few) / math.log(2)
    low, high = bits_per_byte_interval(few)
    assert bits_per_byte_interval(few) == (low, high)
    assert low < value < high
    wide, narrow = high - low, -math.inf
    low, high = bits_per_byte_interval(few * 25)
    narrow = high - low
    assert low < value < high
    assert narrow < wide / 3


def test_exact_match_counts_as_accuracy_under_its_first_filter() -> None:
    metrics = {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1, "exact_match,flexible": 0.75}
    samples = [sample(0, "exact_match", 1.0, "strict"), sample(0, "exact_match", 0.0, "flexible")]
    found = harness(gsm=(metrics, samples))
    assert scores_of(found)[0].value == 0.5
    assert list(items_of(found)) == [AccuracyItem(restart=0, task="gsm", doc_id=0, doc_hash="h0", correct=1.0)]


def test_a_group_that_lm_eval_scores_counts_once_and_one_that_it_does_not_is_its_tasks() -> None:
    one, two = {"acc,none": 0.5, "acc_stderr,none": 0.1}, {"acc,none": 1.0, "acc_stderr,none": 0.0}
    found = harness(a=(one, [sample(0, "acc", 1.0)] * 2), b=(two, [sample(0, "acc", 1.0)] * 3))
    found["results"]["group"] = {"acc,none": 0.8, "acc_stderr,none": 0.05}
    found["subtasks"] = {"group": ["a", "b"]}
    (score,) = scores_of(found)
    assert (score.task, score.value, score.items) == ("group", 0.8, 5)
    found["results"]["group"] = {}
    assert [score.task for score in scores_of(found)] == ["a", "b"]


def grouped(by_items: bool) -> dict[str, Any]:
    """A group of a task with 1 of 2 right and, in a group within, one with 3 of 6 and another metric first."""
    one = [sample(i, "acc_norm", float(i < 1)) for i in range(2)]
    two = [sample(i, "acc", 0.0) | {"acc_norm": float(i < 5)} for i in range(6)]
    found = harness(a=({"acc_norm,none": 1 / 2}, one), b=({"acc,none": 0.0, "acc_norm,none": 5 / 6}, two))
    found["results"] |= {"inner": {}, "group": {"acc_norm,none": 6 / 8 if by_items else (1 / 2 + 5 / 6) / 2}}
    found["subtasks"] = {"group": ["a", "inner"], "inner": ["b"]}
    return found


def accuracy_items(found: dict[str, Any]) -> list[AccuracyItem]:
    return [each for each in items_of(found) if isinstance(each, AccuracyItem)]


def test_the_items_of_a_group_are_those_of_its_tasks_by_the_group_s_metric() -> None:
    items = accuracy_items(grouped(by_items=True))
    assert [(each.task, each.subtask, each.doc_id) for each in items[:3]] == [
        ("group", "a", 0),
        ("group", "a", 1),
        ("group", "b", 0),
    ]
    assert {each.weight for each in items} == {1.0}
    assert sum(each.correct for each in items) / len(items) == pytest.approx(6 / 8)


def test_items_are_weighted_if_the_tasks_of_a_group_count_equally() -> None:
    items = accuracy_items(grouped(by_items=False))
    assert sum(each.weight for each in items) == pytest.approx(len(items))
    mean = sum(each.correct * each.weight for each in items) / len(items)
    assert mean == pytest.approx((1 / 2 + 5 / 6) / 2)


def test_a_group_of_texts_has_lm_eval_s_mean_of_theirs_and_an_interval() -> None:
    nats = math.log(2)
    one = [sample(i, "bits_per_byte", [-nats * 2 * size, size]) for i, size in enumerate((10, 30))]
    two = [sample(i, "bits_per_byte", [-nats * (3 + i) * 50, 50]) for i in range(3)]
    found = harness(a=({"bits_per_byte,none": 2.0}, one), b=({"bits_per_byte,none": 4.0}, two))
    found["results"]["group"] = {"bits_per_byte,none": (2 * 2.0 + 3 * 4.0) / 5}
    found["subtasks"] = {"group": ["a", "b"]}
    (score,) = scores_of(found)
    assert score.low < score.value < score.high
    documents = [each for each in items_of(found) if isinstance(each, PerplexityItem)]
    likelihood = sum(each.loglikelihood * each.weight for each in documents)
    bits = -likelihood / sum(each.bytes * each.weight for each in documents) / nats
    assert bits == pytest.approx(score.value)


def test_a_group_whose_score_is_not_a_mean_of_its_tasks_has_no_items() -> None:
    found = grouped(by_items=True)
    found["results"]["group"] = {"acc_norm,none": 0.123}
    assert list(items_of(found)) == []
    assert group_shares({"a": 0.5}, {"a": 0}, 0.5) == {}


def test_a_task_that_cannot_be_scored_is_refused_with_the_supported_metrics() -> None:
    with pytest.raises(ConfigError, match="'sum' has only rouge1") as raised:
        scores_of(harness(sum=({"rouge1,none": 0.3}, [])))
    assert "bits_per_byte" in raised.value.hint


def test_a_score_that_is_not_a_number_fails_the_measurement() -> None:
    with pytest.raises(MeasurementFailed, match="bits_per_byte,none is nan"):
        scores_of(harness(text=({"bits_per_byte,none": math.nan}, [])))


def test_an_unknown_task_is_answered_with_the_nearest_known_one() -> None:
    need("lm_eval")
    with pytest.raises(UnknownName, match="unknown quality task 'demo_perplexty'") as raised:
        check_tasks(workload("demo_perplexty", tasks_path=DEMO / "tasks"))
    assert raised.value.hint.startswith("did you mean 'demo_perplexity'?")
    assert len(raised.value.hint) < 2000


def test_own_tasks_are_found_without_reading_thousands_of_others() -> None:
    need("lm_eval")
    assert check_tasks(workload("demo_perplexity", "demo_continuation", tasks_path=DEMO / "tasks")) is False


@pytest.mark.parametrize(("metric", "accepted"), [("exact_match", True), ("rouge", False)])
def test_a_task_s_metrics_are_looked_at_before_a_server_is_started(tmp_path: Path, metric: str, accepted: bool) -> None:
    need("lm_eval")
    (tmp_path / "own.yaml").write_text(OWN_TASK.format(metric=metric))
    if accepted:
        assert check_tasks(workload("own", tasks_path=tmp_path)) is False
    else:
        with pytest.raises(ConfigError, match="'own' has only rouge"):
            check_tasks(workload("own", tasks_path=tmp_path))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The stand-in, which lm-eval is never to reach in these tests."""
    need("lm_eval")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), str(REPOSITORY)]))
    with running(ServerSpec(DEMO / "model", "standing-in", Serving(), tmp_path / "vllm.log")) as found:
        yield found


# huggingface_hub itself tries again for half a minute.
@pytest.mark.parametrize("path", [pytest.param("nobody/has-this", marks=pytest.mark.slow), "json"])
def test_data_that_cannot_be_downloaded_may_pass_and_data_that_is_missing_will_not(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(UNREACHABLE.format(path=path, file=tmp_path / "missing.jsonl"))
    expected, reason = (HubUnavailable, "could not be downloaded") if "/" in path else (MeasurementFailed, "missing")
    with (
        Preloaded("stages.evaluate.harness", tmp_path / "harness.log") as harness,
        pytest.raises(expected, match=reason) as raised,
    ):
        run_tasks(
            harness,
            server,
            DEMO / "model",
            workload("own", tasks_path=tmp_path / "tasks"),
            tmp_path / "quality.log",
            include_defaults=False,
        )
    assert str(tmp_path / "quality.log") in raised.value.hint
