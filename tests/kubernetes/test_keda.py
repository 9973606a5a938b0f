"""The stand-in's HorizontalPodAutoscaler against what Kubernetes documents of its behaviour."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.keda import SYNC_S, Autoscaler

BEHAVIOR: dict[str, Any] = {
    "scaleUp": {
        "stabilizationWindowSeconds": 30,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    },
}


def replicas(wanted: dict[float, int], until_s: float, start: int) -> list[tuple[float, int]]:
    """When the replicas change and to how many; *wanted* says from when on how many the load needs."""
    scaler, now, found = Autoscaler(), start, []
    for step in range(int(until_s / SYNC_S) + 1):
        now_s = step * SYNC_S
        asked = wanted[max(each for each in wanted if each <= now_s)]
        then = scaler.next(now_s, now, asked, BEHAVIOR)
        if then != now:
            scaler.changed.append((now_s, then - now))
            found.append((now_s, then))
        now = then
    return found


def test_up_needs_a_load_that_lasts_and_doubles_at_most_in_a_minute() -> None:
    assert replicas({0: 1, 60: 8, 75: 1}, 300, 1) == []
    assert replicas({0: 1, 60: 8}, 300, 1) == [(75, 2), (135, 4), (195, 8)]


def test_down_waits_longer_and_takes_one_in_a_minute() -> None:
    assert replicas({0: 3, 60: 1}, 900, 3) == [(345, 2), (405, 1)]
    assert replicas({0: 3, 60: 1, 300: 3}, 600, 3) == []
