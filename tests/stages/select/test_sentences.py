"""Every number in the sentence that says why is one of the record's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from scoring.decide import Decision, decide
from scoring.metrics import METRICS, odds
from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.records.production import Change, Production
from stages.report.choice import verdict
from stages.select.candidates import changes
from stages.select.decision import METRIC_WORDS, reason_of
from stages.select.selection import select
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
    limits = {name: {"kl_divergence": float(chance.random() < 0.05)} for name in VARIANTS}
    return pd.DataFrame.from_dict(rows, orient="index"), samples, limits


def check(said: str, winner: str, found: Decision | Production, moved: Mapping[str, Change]) -> None:
    """*said* against the record's numbers; every sentence of it is one of those known here."""
    chances = _chances(found)
    edge = r"(\.|: the evidence does not show which variants meet the constraints\.)"
    only, best = " is the only variant that can be chosen", " has the highest score"
    if match := re.match(rf"(\S+){only}(?:, with a probability of (\S+) of being chosen again)?{edge}", said):
        assert match[1] == winner
        assert len(chances) == 1
        assert found.separated == (match[2] is None) == (match[3] == ".")
        assert match[2] in (None, odds(chances[winner]))
    elif match := re.match(rf"(\S+){best}, with a probability of (\S+) of having it again{edge}", said):
        assert match[1] == winner == max(chances, key=lambda name: chances[name])
        assert match[2] == odds(chances[winner])
        assert found.separated == (match[3] == ".")
    else:
        match = re.match(r"(.+) could each score highest: .* (\S+) is preferred: it[^.]+\.", said)
        assert match, said
        listed = dict(re.findall(r"(\w+) \(([^)]+)\)", match[1]))
        assert listed == {name: odds(chances[name]) for name in listed}
        assert match[2] == winner
        assert winner in listed
        assert len(listed) > 1
        assert not found.separated
    if match := re.search(r"Against fp16: (.+?)\.( Excluded:|$)", said):
        told = re.findall(r"([\w ]+?) ([+-][\d.]+)%( \(within noise\))?", match[1])
        assert [word.strip() for word, _, _ in told] == list(METRIC_WORDS.values())
        assert moved
        for metric, (_, percent, within) in zip(METRICS, told, strict=True):
            assert float(percent) == pytest.approx(100 * moved[metric].value, abs=0.0501)
            # The tiles of the report's first screen say the same.
            assert bool(within) == (verdict(metric, moved[metric]) == "level" and moved[metric].value != 0)
    else:
        assert winner == "fp16"
        assert not moved


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
        rows: dict[Any, Any] = raw.to_dict(orient="index")
        moved = {}
        if found.winner != "fp16":
            moved = changes(rows[found.winner], rows["fp16"], samples[found.winner], samples["fp16"])
        said = reason_of(found, moved, excluded)
        check(said, found.winner, found, moved)
        for name, reasons in excluded.items():
            assert f"{name}: {reasons}" in said.partition(" Excluded: ")[2]
        if match := re.search(r"ranks first under (\d+)%", said):
            assert match[1] == f"{100 * found.near_weights[found.winner]:.0f}"
    assert told > FRAMES / 2
    assert {(True, True), (True, False)} <= kinds


def test_noise_of_another_pair_is_not_attributed_to_the_winner():
    rows = {
        name: {"quality": 0.8, "latency": latency, "throughput": 100.0, "memory": 1e9}
        for name, latency in (("fp16", 100.0), ("awq", 97.0), ("gptq", 98.0))
    }
    shaky = np.random.default_rng(0).normal(0, 20, DRAWS)
    samples: dict[str, Any] = {name: {"latency": np.full(DRAWS, row["latency"])} for name, row in rows.items()}
    samples["gptq"] = {"latency": 98.0 + shaky}
    found = decide(pd.DataFrame.from_dict(rows, orient="index"), Profile(name="own"), samples)
    assert found.noise["latency"] > 30
    moved = changes(rows["awq"], rows["fp16"], samples["awq"], samples["fp16"])
    assert "p95 latency -3.0%, throughput" in reason_of(found, moved, {})
    assert verdict("latency", moved["latency"]) == "better"


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_published_decision_agrees_with_its_sentence(path, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    store: ModelStore = measured_store(tmp_path)
    outcome(store, "run-1", "evaluate", "gptq", "failed", why="vLLM did not start")
    _, decision, _ = select(store, profile_of(path), VARIANTS)
    (winner,) = [each for each in decision.candidates if each.variant == decision.winner]
    check(decision.reason, decision.winner, decision, winner.change)
    assert "gptq: evaluate failed: vLLM did not start" in decision.reason
    for each in decision.candidates:
        if each.score is not None:
            weighed = sum(decision.weights[name] * each.normalized[name] for name in METRICS)
            assert each.score == pytest.approx(weighed, abs=1e-8)
