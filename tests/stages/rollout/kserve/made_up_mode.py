"""A mode of KServe that Slipway does not have: ``route`` for clusters with a deployment mode of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from stages.parts.cluster.kinds import Object
from stages.rollout.kserve import route
from stages.rollout.kserve.objects import KServeEndpoint
from stages.rollout.kserve.route import RouteTarget

NAME: Final = "made-up"
LABEL: Final = "example.com/made-up"


class MadeUpTarget(RouteTarget):
    def deploy(self, release: str) -> None:
        super().deploy(release)
        self.cluster.merge(MODE.services, self.service_name(release), {"metadata": {"labels": {LABEL: "true"}}})


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    objects: list[dict[str, Any]] = route.MODE.render(endpoint, shares)
    for service in objects[: len(shares)]:
        service["metadata"]["labels"][LABEL] = "true"
    return objects


MODE = dataclasses.replace(
    route.MODE,
    name=NAME,
    target=MadeUpTarget,
    owns=lambda service: LABEL in service["metadata"].get("labels", {}),
    suits=lambda setup: setup.default_mode == "MadeUp",
    render=render,
)
