"""Plays KEDA, its HorizontalPodAutoscalers and a Prometheus that scrapes pods as the PodMonitor says.

Every 15 s the value of a ScaledObject's query is compared with its threshold, and the Deployment gets other
``spec.replicas``, as KEDA 2.21 and Kubernetes 1.36 do it: nothing within a tenth of the target; up by the least that
was recommended within the window of scaleUp, down by the most within that of scaleDown; at most what the policies allow
in their period; bounds hold even if no value is known. Without a value, the fallback counts after its threshold of
failures. A Deployment keeps the replicas that it has when its ScaledObject is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Final

from tests.kubernetes.api import KubernetesServer
from tests.kubernetes.objects import Object, Refused
from tests.kubernetes.resources import hpa_name

SYNC_S: Final = 15.0
TOLERANCE: Final = 0.1
TERM: Final = re.compile(r"sum\(([\w:]+)\{([^}]*)\}\)")
RATE: Final = re.compile(r"sum\(rate\(([\w:]+)\{([^}]*)\}\[1m\]\)\)")
QUERY: Final = re.compile(r"\((?P<now>.+) > (?P<lately>.+)\) or (?P=lately) or \((?P=now)\)")
"""The greater of both, or the only one that there is."""
WINDOW_S: Final = 60.0
LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
SCRAPED: Final = {"slipway_endpoint": "slipway/endpoint", "slipway_release": "slipway/release"}
"""A series' labels that are its pod's."""


@dataclass
class Autoscaler:
    """What one HorizontalPodAutoscaler remembers. Times are in seconds of its own."""

    recommended: list[tuple[float, int]] = field(default_factory=list)
    changed: list[tuple[float, int]] = field(default_factory=list)
    """When replicas were added (positive) or removed."""
    failures: int = 0

    def next(self, now_s: float, replicas: int, wanted: int, behavior: Object) -> int:
        self.recommended.append((now_s, wanted))
        up, down = behavior["scaleUp"], behavior["scaleDown"]
        least = min(self._since(self.recommended, now_s - up["stabilizationWindowSeconds"]))
        most = max(self._since(self.recommended, now_s - down["stabilizationWindowSeconds"]))
        stable = most if replicas > most else max(replicas, least)
        if stable > replicas:
            stable = min(stable, max(self._allowed(now_s, replicas, each, 1) for each in up["policies"]))
        if stable < replicas:
            stable = max(stable, min(self._allowed(now_s, replicas, each, -1) for each in down["policies"]))
        return stable

    def _since(self, seen: list[tuple[float, int]], start_s: float) -> list[int]:
        return [value for when, value in seen if when > start_s or when == seen[-1][0]]

    def _allowed(self, now_s: float, replicas: int, policy: Object, sign: int) -> int:
        within = [each for when, each in self.changed if when > now_s - policy["periodSeconds"]]
        start = replicas - sum(each for each in within if each * sign > 0)
        step = policy["value"] if policy["type"] == "Pods" else math.ceil(start * policy["value"] / 100)
        return start + sign * int(step)


@dataclass
class Keda:
    server: KubernetesServer
    namespace: str
    pace: float = 0.01
    """How long one second of the autoscaler takes here."""
    prometheus: bool = True
    """Whether it answers."""
    within_floors: bool = False
    """Whether it is a time of the week between the start and the end of every floor."""
    autoscalers: set[str] = field(default_factory=set)
    """The names of its HorizontalPodAutoscalers."""
    _scalers: dict[str, Autoscaler] = field(default_factory=dict)
    _seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """The samples of each counter that a rate is asked of."""
    _due: float = 0.0

    def act(self) -> None:
        """Do what is due; to be called often."""
        if time.monotonic() < self._due or ("keda.sh/v1alpha1", "scaledobjects") not in self.server.objects.resources:
            return
        self._due = time.monotonic() + SYNC_S * self.pace
        there = {each["metadata"]["name"]: each for each in self.server.all("ScaledObject", self.namespace)}
        self._scalers = {name: self._scalers.get(name, Autoscaler()) for name in there}
        self.autoscalers = set(map(hpa_name, there.values()))
        with contextlib.suppress(StopIteration):  # its definition was removed meanwhile
            for name, each in there.items():
                self._scale(each, self._scalers[name])

    def _scale(self, scaled: Object, scaler: Autoscaler) -> None:
        spec = scaled["spec"]
        try:
            deployment = self.server.find("Deployment", spec["scaleTargetRef"]["name"], self.namespace)
        except Refused:
            wrong = "ScaledObject doesn't have correct scaleTargetRef specification"
            self._say(scaled, [_condition("Ready", False, wrong)])
            return
        now: int = deployment["spec"]["replicas"]
        value = self._value(spec["triggers"][0]["metadata"]["query"])
        scaler.failures = 0 if value is not None else scaler.failures + 1
        falls_back = scaler.failures > spec["fallback"]["failureThreshold"]
        wanted = _bounded(spec, self._wanted(spec, now, value, falls_back=falls_back))
        now_s = time.monotonic() / self.pace
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        known = _bounded(spec, now) == now and (value is not None or falls_back)
        then = scaler.next(now_s, now, wanted, behavior) if known else _bounded(spec, now)
        if then != now:
            scaler.changed.append((now_s, then - now))
            self.server.put(deployment | {"spec": deployment["spec"] | {"replicas": then}}, manager="hpa")
        trouble = "At least one trigger is falling back on this scaled object" if falls_back else ""
        states = [_condition("Ready", True), _condition("Active", bool(value)), _condition("Paused", False)]
        self._say(scaled, [*states, _condition("Fallback", falls_back, trouble)])

    def _wanted(self, spec: Object, now: int, value: float | None, *, falls_back: bool) -> int:
        if value is None:
            return max(now, spec["fallback"]["replicas"]) if falls_back else now  # currentReplicasIfHigher
        target = float(spec["triggers"][0]["metadata"]["threshold"])
        wanted = now if abs(value / (target * now) - 1) <= TOLERANCE else math.ceil(value / target)
        floors = [each["metadata"] for each in spec["triggers"] if each["type"] == "cron" and self.within_floors]
        return max(wanted, *(int(floor["desiredReplicas"]) for floor in floors), 0)

    def _value(self, query: str) -> float | None:
        """The answer of Prometheus; None: it has none."""
        asked = QUERY.fullmatch(query)
        assert asked, f"what does {query} mean?"
        found = [each for each in (self._now(asked["now"]), self._rate(asked["lately"])) if each is not None]
        return max(found) if self.prometheus and found else None

    def _now(self, query: str) -> float | None:
        terms = [self._series(*each) for each in TERM.findall(query)]
        return sum(map(sum, terms)) if all(terms) else None

    def _rate(self, query: str) -> float | None:
        asked = RATE.fullmatch(query)
        assert asked, f"what does {query} mean?"
        now_s, samples = time.monotonic(), self._seen.setdefault(query, [])
        samples.append((now_s, sum(self._series(*asked.groups()))))
        samples[:] = [each for each in samples if each[0] > now_s - WINDOW_S * self.pace]
        increase = sum(max(0.0, then[1] - before[1]) for before, then in itertools.pairwise(samples))
        return increase / (now_s - samples[0][0]) if len(samples) > 1 else None

    def _series(self, metric: str, selector: str) -> list[float]:
        asked = dict(LABEL.findall(selector))
        found: list[float] = []
        for pod in self.server.all("Pod", asked.pop("namespace")):
            labels = pod["metadata"].get("labels", {})
            if all(labels.get(SCRAPED[name]) == value for name, value in asked.items()):
                found += read(pod, metric)
        return found

    def _say(self, scaled: Object, conditions: list[Object]) -> None:
        status = {"conditions": conditions, "hpaName": hpa_name(scaled)}
        with contextlib.suppress(Refused):  # it was removed meanwhile
            self.server.set_status("ScaledObject", self.namespace, scaled["metadata"]["name"], status, manager="keda")


def _bounded(spec: Object, replicas: int) -> int:
    return int(min(spec["maxReplicaCount"], max(spec["minReplicaCount"], replicas)))


def read(pod: Object, metric: str) -> list[float]:
    """The values of a metric in a pod; none if it does not answer."""
    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    try:
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return []
    return [float(each.rpartition(" ")[2]) for each in lines if re.match(rf"{metric}[{{ ]", each)]


def _condition(name: str, true: bool, message: str = "") -> Object:
    return {"type": name, "status": "True" if true else "False", "message": message}
