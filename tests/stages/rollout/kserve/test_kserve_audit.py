"""On a cluster the user is the kubeconfig's, and events on the endpoint tell what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.cluster.kinds import EVENTS
from stages.parts.releases.release import history
from stages.rollout.commands import abort
from stages.rollout.kserve.applied import LONGEST_NOTE, event
from stages.rollout.kserve.llm import llm_name
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS


def told(kserve: OnKServe) -> list[dict[str, Any]]:
    return sorted(kserve.cluster().list(EVENTS)[0], key=lambda each: each["eventTime"])


@pytest.mark.parametrize("mode", MODES)
def test_events_on_the_endpoint_name_who_did_what(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.first()
    kserve.make(NEXT)
    roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until="10")
    kserve.server.user = "joe@example.com"
    abort(kserve.store, kserve.connect(), "too slow for us")
    assert [(each.what, each.by) for each in history(kserve.store)[-1].acts] == [
        ("began", "jane@example.com"),
        ("gave up", "joe@example.com"),
    ]
    events = told(kserve)
    assert [each["reason"] for each in events] == ["Promoted", "Started", "GaveUp", "RolledBack"]
    assert [each["type"] for each in events] == ["Normal", "Normal", "Warning", "Warning"]
    kind, name = ("HTTPRoute", kserve.route) if mode == "route" else ("InferenceService", kserve.name)
    if mode == "llm":
        kind, name = "LLMInferenceService", llm_name(kserve.endpoint(), GOOD)
    assert {(each["regarding"]["kind"], each["regarding"]["name"]) for each in events} == {(kind, name)}
    assert events[-1]["note"] == (f"{NEXT}: too slow for us; began by jane@example.com; gave up by joe@example.com")


def test_a_rollout_does_not_need_the_right_to_tell(standard: OnKServe) -> None:
    standard.server.forbidden |= {("create", "events"), ("create", "selfsubjectreviews")}
    standard.make(GOOD)
    assert standard.roll(GOOD).state == "promoted"
    assert history(standard.store)[-1].acts[0].by == "unknown"


def test_a_setting_that_restarts_pods_is_in_the_history(standard: OnKServe) -> None:
    standard.first()
    standard.roll(GOOD)
    assert len(history(standard.store)) == 1, "nothing was changed"
    standard.settings = standard.settings.model_copy(update={"cpu": "8"})
    standard.roll(GOOD)
    last = history(standard.store)[-1]
    assert (last.kind, last.release) == ("settings", GOOD)
    assert told(standard)[-1]["reason"] == "Promoted"


def test_a_long_note_is_cut_to_what_the_api_takes() -> None:
    on = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "b", "uid": "c"}}
    assert len(event(on, "Promoted", "é" * 2000)["note"].encode()) <= LONGEST_NOTE
