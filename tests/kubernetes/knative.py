"""Plays Knative's autoscaler: replicas of revisions by the requests that they have.

The average over the window of a revision's annotation is compared with its target; what was wanted at any time within
its delay for scaling down counts. A new revision has its initial scale. Its panic mode is left out.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

from tests.kubernetes.objects import Object

ANNOTATION: Final = "autoscaling.knative.dev"


@dataclass
class KnativeAutoscaler:
    pace: float = 0.01
    """How long one second of the autoscaler takes here."""
    _loads: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _wanted: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def replicas(self, revision: str, predictor: Object, load: float) -> int:
        """The replicas that a revision should have.

        Args:
            load: the requests that all of its pods have now.
        """
        now_s, said = time.monotonic() / self.pace, predictor["annotations"]
        loads = self._loads.setdefault(revision, [])
        loads.append((now_s, load))
        within = [each for when, each in loads if when > now_s - _seconds(said, "window")]
        needed = math.ceil(sum(within) / len(within) / predictor["scaleTarget"])
        wanted = self._wanted.setdefault(revision, [])
        if not wanted:
            needed = max(needed, int(said[f"{ANNOTATION}/initial-scale"]))
        wanted.append((now_s, min(predictor["maxReplicas"], max(predictor["minReplicas"], needed))))
        delay_s = _seconds(said, "scale-down-delay")
        return max(each for when, each in wanted if when > now_s - delay_s or when == now_s)


def _seconds(annotations: Object, name: str) -> float:
    return float(annotations[f"{ANNOTATION}/{name}"].removesuffix("s"))
