"""Drills of servers that withstand them, and of servers that do not, over HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from scoring.profile import Profile
from stages.parts.base.errors import ConfigError, DrillFailed, NothingToServe
from stages.parts.base.workload import Slo, Workload
from stages.parts.records.drills import Drill
from stages.parts.releases.release import METRICS
from stages.rollout import pressure
from stages.rollout import scene as scenes
from stages.rollout.drills import BY_NAME
from stages.rollout.scene import Scene
from stages.select.selection import select
from tests.samples import measured_store
from tests.stages.rollout.stage import GOOD, SETTINGS, Stage

WORKLOAD = Workload(
    name="small",
    prompt_tokens=8,
    output_tokens=4,
    concurrency=4,
    slo=Slo(ttft_ms=2000, tpot_ms=500),
    quality_tasks=("none",),
)
NO_TARGETS = WORKLOAD.model_copy(update={"slo": None})
QUICK: dict[str, Any] = {"first_s": 0.01, "token_s": 0.005, "context": 512}
PEAK_PER_S = 20.0
BUSY: dict[str, Any] = {"first_s": 0.1, "slots": 4, "token_s": 0.01, "context": 512}
"""It answers 30 requests a second."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "lasting", lambda _, short, __: 30 if short == 100 else short / 4)
    monkeypatch.setattr(scenes, "RECOVERY_S", 3.0)
    monkeypatch.setattr(scenes, "TIMEOUT_S", 4.0)
    monkeypatch.setattr(pressure, "LATE_MS", 1500.0)
    monkeypatch.setattr(pressure, "FILLING_S", 0.4)
    monkeypatch.setattr(pressure, "OPENED_S", 10.0)


def scene(stage: Stage, workload: Workload = WORKLOAD, **changed: Any) -> Scene:
    given = {"peak_per_s": PEAK_PER_S, "short": True} | changed
    return Scene(stage.store, stage.target, workload, SETTINGS, **given)


def drilled(stage: Stage, name: str, workload: Workload = WORKLOAD, **behaviour: Any) -> Drill:
    stage.served(**behaviour)
    result = BY_NAME[name](scene(stage, workload))
    assert result.release == GOOD
    return result


def test_twice_the_peak_is_withstood_if_as_many_are_answered_as_at_the_peak(stage: Stage) -> None:
    result = drilled(stage, "load", **QUICK)
    assert result.failures == ()
    assert result.answers.failed == 0
    assert result.figures["answered_per_s"] > result.figures["answered_at_peak_per_s"] / 2
    assert result.figures["within_targets"] > 0.9
    assert result.figures["peak_per_s"] == PEAK_PER_S


def test_refusals_at_twice_the_peak_are_no_loss(stage: Stage) -> None:
    result = drilled(stage, "load", **BUSY, waits=4)
    assert result.failures == ()
    assert result.answers.refused == result.answers.failed > 0


@pytest.mark.parametrize(
    ("name", "behaviour", "reason"),
    [
        ("load", QUICK | {"fails_every": 10}, "requests were lost: 500"),
        # Those that wait longest may be given up before the rate is known.
        ("load", BUSY | {"thrashes_s": 0.02}, ("at twice the peak", "requests were lost: ReadTimeout")),
        pytest.param(
            "load", BUSY | {"slots": 2, "waits": 20, "beyond": 500}, "requests were lost: 500", marks=pytest.mark.slow
        ),
        ("overload", BUSY | {"slots": 2}, "requests wait instead of being refused"),
        pytest.param("overload", BUSY | {"waits": 4, "beyond": 500}, "requests were lost: 500", marks=pytest.mark.slow),
        ("overload", BUSY | {"waits": 4, "refuses_after_s": 2.5}, "refusals took"),
        ("overload", BUSY | {"waits": 4, "refuses_in_streams": 500}, "requests were lost: 500 too much to do"),
        ("long-context", QUICK | {"long_s": 10.0, "blocks": True}, "short requests beside a long one: "),
        ("long-context", QUICK | {"refuses_beyond_tokens": 300}, "no request of 512 tokens was answered"),
        ("kv-full", QUICK | {"kv_tokens": 3000, "kv_fails": True, "long_s": 1}, "requests were lost: 500"),
        ("kv-full", QUICK, "filled 0% of the KV cache, so that nothing is shown"),
        ("slow-client", QUICK | {"slots": 30, "padded": 1 << 18}, "requests were lost: ReadTimeout"),
        ("slow-client", QUICK | {"padded": 1 << 18, "leaks": True}, "requests still run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_endpoint_does_not_withstand_is_said(
    stage: Stage, name: str, behaviour: dict[str, Any], reason: str | tuple[str, ...]
) -> None:
    result = drilled(stage, name, NO_TARGETS, **behaviour)
    reasons = (reason,) if isinstance(reason, str) else reason
    assert any(each in failure for each in reasons for failure in result.failures), result


@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("overload", BUSY | {"waits": 4}),
        ("overload", BUSY | {"waits": 4, "refuses_in_streams": 503}),
        ("long-context", QUICK | {"long_s": 0.2}),
        ("kv-full", QUICK | {"kv_tokens": 4096, "long_s": 0.3}),
        ("slow-client", QUICK | {"padded": 1 << 18}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sound_endpoint_withstands(stage: Stage, name: str, behaviour: dict[str, Any]) -> None:
    result = drilled(stage, name, **behaviour)
    assert result.failures == ()
    assert result.figures["recovered_s"] < 3
    assert result.answers.requests > 0


def test_most_is_refused_of_ten_times_the_peak(stage: Stage) -> None:
    result = drilled(stage, "overload", **BUSY, waits=4)
    assert result.answers.refused > result.answers.requests / 2
    assert 0 < result.figures["refused_p95_ms"] < pressure.REFUSED_MS


def test_the_kv_cache_is_filled_and_the_context_is_that_of_the_server(stage: Stage) -> None:
    result = drilled(stage, "kv-full", **QUICK, kv_tokens=4096, long_s=0.3)
    assert result.figures["cache_used"] >= 0.95
    longest = BY_NAME["long-context"](scene(stage))
    assert longest.figures["context_tokens"] == 512


@pytest.mark.parametrize(
    ("times_ms", "targets", "reasons"),
    [
        ((2000.0, 500.0), True, []),
        ((2001.0, 500.0), True, ["others: TTFT 2001 ms, 100 ms before, allowed 2000 ms"]),
        ((450.0, 90.0), False, []),
        ((451.0, 91.0), False, ["others: TTFT 451 ms, 100 ms before, allowed 450 ms", "others: TPOT 91 ms, 10 ms"]),
        ((None, None), False, []),
    ],
)
def test_others_may_take_as_long_as_the_targets_allow_or_four_times_as_long_as_before(
    stage: Stage, times_ms: tuple[float | None, float | None], targets: bool, reasons: list[str]
) -> None:
    given = scene(stage, WORKLOAD if targets else NO_TARGETS).slower("others", times_ms, (100.0, 10.0))
    assert len(given) == len(reasons)
    assert all(each.startswith(reason) for each, reason in zip(given, reasons, strict=True))


def test_a_server_that_restarts_under_the_load_fails_the_drill(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.served(**QUICK)

    def send(self: Scene, rate_per_s: float, seconds: float) -> list[Any]:
        replies = original(self, rate_per_s, seconds)
        if rate_per_s > PEAK_PER_S:
            stage.target.stop(GOOD)
            stage.target.deploy(GOOD)
        return replies

    original = Scene.send
    monkeypatch.setattr(Scene, "send", send)
    assert BY_NAME["overload"](scene(stage)).failures == ("its server was restarted",)


def test_an_endpoint_that_stays_slow_has_not_recovered(stage: Stage) -> None:
    stage.served(**QUICK)
    before = scene(stage, NO_TARGETS).before()._replace(times_ms=(10.0, 5.0))
    stage.target.stop(GOOD)
    (stage.store.releases / GOOD / "behaviour.json").write_text('{"first_s": 0.5, "token_s": 0.005}')
    stage.target.deploy(GOOD)
    (slow, restarted) = scene(stage, NO_TARGETS).judged([], before, []).failures
    assert slow.startswith("not as before within 3 s: a request: TTFT ")
    assert restarted == "its server was restarted"


def test_requests_come_at_the_rate_whether_or_not_they_are_answered(stage: Stage) -> None:
    stage.served(**QUICK | {"first_s": 1.0})
    began = time.monotonic()
    replies = scene(stage).send(60, 2)
    assert 70 < len(replies) < 180
    sent = sorted(each.sent_s - began for each in replies)
    assert sent[-1] > 1.5
    assert sum(at < 0.95 for at in sent) > 25, "before the first answer"


def test_the_peak_is_what_the_release_was_measured_to_serve(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    _, decision, _ = select(measured_store(tmp_path / "measured"), Profile(name="balanced"), ["fp16", "awq", "gptq"])
    stage.served(**QUICK)
    decision.write(stage.store.releases / GOOD / METRICS)
    in_tokens = decision.chosen.raw["throughput"]
    assert scene(stage, peak_per_s=None).peak == pytest.approx(in_tokens / 4)
    assert scene(stage, peak_per_s=5).peak == 5


def test_nothing_is_drilled_without_an_endpoint_a_peak_or_an_answer(stage: Stage) -> None:
    with pytest.raises(NothingToServe, match="is not being served on local"):
        BY_NAME["load"](scene(stage))
    stage.served(**QUICK)
    with pytest.raises(ConfigError, match="the peak is not known"):
        BY_NAME["load"](scene(stage, peak_per_s=None))
    assert scene(stage, WORKLOAD.model_copy(update={"request_rate_per_s": 3.0}), peak_per_s=None).peak == 3
    (stage.store.releases / GOOD / "behaviour.json").write_text('{"fails_every": 1}')
    stage.target.stop(GOOD)
    stage.target.deploy(GOOD)
    for _ in range(3):
        scene(stage).send(10, 0.3)
    with pytest.raises(DrillFailed, match="no request is answered at half of the peak: 500"):
        BY_NAME["overload"](scene(stage))
