from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.repeatability import check_conditions, conditions, decisions, finished, tell, verdict
from pipeline.settings.config import RunConfig, load
from scoring.profile import Profile
from stages.parts.base.errors import ConfigError, MissingRun
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import VARIANT, Variant
from tests.samples import evaluation, measured_store

BALANCED = Profile(name="balanced")
DEMO = Path(__file__).parents[1] / "demo" / "slipway.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three repeats that came to the same, and a fourth that was killed."""
    for name in ("01", "02", "03", "04.unfinished"):
        measured_store(tmp_path / "repeats" / name)
    return tmp_path / "repeats"


def measured_anew(store: ModelStore, name: str, quality: float, latency_ms: float) -> None:
    made = Variant.read(store.optimized(name) / VARIANT)
    assert made is not None
    evaluation(store, made, quality=quality, latency_ms=latency_ms, throughput=100.0, weights_bytes=1000)


def test_repeats_with_the_same_decision_are_repeatable(folder, capsys):
    made = decisions(finished(folder), BALANCED)
    assert len(made) == 3
    assert verdict(made) == (True, "the same each time: awq, decided")
    assert tell({"balanced": made}) == 0
    shown = capsys.readouterr().out
    assert shown.count("awq     decided") == 3
    assert "fp16 0.5" in shown


def test_a_repeat_that_comes_to_another_winner_is_a_difference(folder, capsys):
    measured_anew(finished(folder)[1], "fp16", 1.0, 1.0)
    made = decisions(finished(folder), BALANCED)
    assert verdict(made) == (False, "differs: awq, decided: 2; fp16, decided: 1")
    assert tell({"balanced": made}) == 1


def test_a_decision_without_a_winner_is_not_repeatable(folder):
    strict = Profile.model_validate({"name": "strict", "constraints": {"e2el_p95_ms": {"max": 1}}})
    made = decisions(finished(folder), strict)
    assert verdict(made) == (False, "no variant could be chosen, so nothing was repeated")
    assert tell({"strict": made}) == 1


def test_one_winner_with_another_outcome_is_a_difference(folder):
    first, *rest = decisions(finished(folder), BALANCED)
    assert first is not None
    made = [first.model_copy(update={"outcome": "unresolved"}), *rest]
    assert verdict(made) == (False, "differs: awq, decided: 2; awq, unresolved: 1")


def as_measured(store: ModelStore, config: RunConfig) -> None:
    """The evaluations of a store as if measured under *config*, here and now."""
    for name, each in conditions(store, config).items():
        found = Evaluation.read(store.evaluation(name))
        assert found is not None
        fields = {"workload": each.workload, "tool_versions": each.tool_versions, "hardware": each.hardware}
        found.model_copy(update={"key": each.key, **fields}).write(store.evaluation(name))


def test_only_repeats_of_the_same_conditions_are_kept(folder):
    config = load(DEMO, assignments=["optimize.variants=[fp16, awq, gptq]"])
    source, *repeats = finished(folder)
    for store in repeats:
        as_measured(store, config)
    check_conditions(repeats, conditions(source, config))
    serving = config.model_copy(update={"serving": config.serving.model_copy(update={"kv_cache_mib": 128})})
    workload = config.model_copy(update={"workload": config.workload.model_copy(update={"steady_s": 19})})
    for other, what in ((serving, "serving settings"), (workload, "workload")):
        with pytest.raises(ConfigError, match=rf"02: awq, other {what}; 02: fp16, other {what}; .*03: gptq"):
            check_conditions(repeats, conditions(source, other))


def test_repeats_of_other_variants_are_refused(folder):
    config = load(DEMO, assignments=["optimize.variants=[fp16, awq, gptq]"])
    source, repeat, _ = finished(folder)
    as_measured(repeat, config)
    (source.optimized("awq") / "config.json").write_text("[]")
    made = Variant.read(source.optimized("awq") / VARIANT)
    assert made is not None
    made.model_copy(update={"digest": "0" * 64}).write(source.optimized("awq") / VARIANT)
    repeat.evaluation("gptq").unlink()
    with pytest.raises(ConfigError, match=r"\(02: awq, other weights; 02: gptq, not measured then\)"):
        check_conditions([repeat], conditions(source, config))


def test_a_folder_is_decided_without_measuring(folder):
    command = [
        sys.executable,
        "-m",
        "benchmarks.repeatability",
        "--from",
        str(folder),
        "--profiles",
        "balanced,quality",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2].startswith("balanced  the same each time: awq, decided")
    assert ended.stdout.splitlines()[-1].startswith("quality   the same each time: fp16,")


def test_a_folder_without_repeats_is_a_clear_error(tmp_path):
    with pytest.raises(MissingRun, match="holds no repeats"):
        finished(tmp_path / "nothing")
