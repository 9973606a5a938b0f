"""Every number in the sentence that says why is one of the record's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from scoring.decide import Decision, decide
from scoring.metrics import METRICS, odds
from scoring.profile import Profile
from stages.records import Production
from stages.select.decision import METRIC_WORDS, in_words
from stages.select.selection import select
from stages.store import ModelStore
from tests.samples import measured_store, outcome

PROFILES = sorted((Path(__file__).parents[3] / "configs" / "profiles").glob("*.yaml"))
FRAMES = 40
DRAWS = 400
VARIANTS = ["fp16", "awq", "gptq"]


def profile_of(path: Path) -> Profile:
    return Profile.model_validate({"name": path.stem} | yaml.safe_load(path.read_text()))


def frame(seed: int) -> tuple[pd.DataFrame, dict[str, dict[str, np.ndarray]], dict[str, dict[str, float]]]:
    """Three variants a little or a lot apart, measured with little or much noise; now and then one lacks a metric."""
    chance = np.random.default_rng(seed)
    apart, noise = chance.choice([0.002, 0.03, 0.3]), chance.choice([0.002, 0.03, 0.1])
    middle = {"quality": 0.6, "latency": 300.0, "throughput": 900.0, "memory": 5e6}
    rows = {
        name: {metric: value * np.exp(chance.normal(0, apart)) for metric, value in middle.items()} for name in VARIANTS
    }
    for row in rows.values():
        row["quality"] = min(row["quality"], 1.0)
    samples = {
        name: {
            metric: value * np.exp(chance.normal(0, noise, DRAWS))
            for metric, value in row.items()
            if metric != "memory"
        }
        for name, row in rows.items()
    }
    if chance.random() < 0.2:
        rows["gptq"]["latency"] = float("nan")
    limits = {name: {"requests_failed": float(chance.random() < 0.05), "kl_divergence": 0.01} for name in VARIANTS}
    return pd.DataFrame.from_dict(rows, orient="index"), samples, limits


def check(said: str, winner: str, found: Decision | Production, raw: dict[str, dict[str, float]]) -> None:
    """*said* against the record's numbers; every sentence of it is one of those known here."""
    chances = _chances(found)
    noise = found.noise
    if match := re.match(r"(\S+) is the only variant that can be chosen\.", said):
        assert match[1] == winner
        assert len(chances) == 1
    elif match := re.match(r"(\S+) has the highest score, with a probability of (\S+) to have it again\.", said):
        assert match[1] == winner == max(chances, key=lambda name: chances[name])
        assert match[2] == odds(chances[winner])
        assert found.separated
    else:
        match = re.match(r"(.+) could each score highest: .* (\S+) is preferred: it[^.]+\.", said)
        assert match, said
        listed = dict(re.findall(r"(\w+) \(([^)]+)\)", match[1]))
        assert listed == {name: odds(chances[name]) for name in listed}
        assert match[2] == winner
        assert winner in listed
        assert len(listed) > 1
        assert not found.separated
    if match := re.search(r"Against fp16: (.+?)\.( Out:|$)", said):
        told = re.findall(r"([\w ]+?) ([+-][\d.]+)%( \(within noise\))?", match[1])
        assert [word.strip() for word, _, _ in told] == list(METRIC_WORDS.values())
        for metric, (_, percent, within) in zip(METRICS, told, strict=True):
            value, reference = raw[winner][metric], raw["fp16"][metric]
            assert float(percent) == pytest.approx(100 * (value / reference - 1), abs=0.0501)
            assert bool(within) == (0 < abs(value - reference) <= noise[metric])
    else:
        assert winner == "fp16"


def _chances(found: Decision | Production) -> dict[str, float]:
    if isinstance(found, Decision):
        return found.win_probability
    return {each.variant: each.win_probability for each in found.candidates if each.win_probability is not None}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_winner_and_the_sentence_agree_with_the_numbers(path):
    profile, told = profile_of(path), 0
    kinds = set()
    for seed in range(FRAMES):
        raw, samples, limits = frame(seed)
        found = decide(raw, profile, samples, limits)
        if found.winner is None:
            assert set(found.excluded) == set(VARIANTS)
            continue
        told += 1
        kinds.add((len(found.eligible) > 1, found.separated))
        excluded = {name: "; ".join(reasons) for name, reasons in found.excluded.items()}
        said = in_words(found, raw, excluded)
        check(said, found.winner, found, raw.to_dict(orient="index"))
        for name, reasons in excluded.items():
            assert f"{name}: {reasons}" in said.partition(" Out: ")[2]
        if match := re.search(r"it is first under (\d+)%", said):
            assert match[1] == f"{100 * found.near_weights[found.winner]:.0f}"
    assert told > FRAMES / 2
    assert {(True, True), (True, False)} <= kinds


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_what_is_published_agrees_with_its_sentence(path, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    store: ModelStore = measured_store(tmp_path)
    outcome(store, "run-1", "evaluate", "gptq", "failed", why="vLLM did not start")
    _, decision, _ = select(store, profile_of(path), VARIANTS)
    check(decision.reason, decision.winner, decision, {each.variant: each.raw for each in decision.candidates})
    assert "gptq: evaluate failed: vLLM did not start" in decision.reason
    for each in decision.candidates:
        if each.score is not None:
            weighed = sum(decision.weights[name] * each.normalized[name] for name in METRICS)
            assert each.score == pytest.approx(weighed, abs=1e-8)
