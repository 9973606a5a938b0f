"""Who reaches the address of all models on a cluster with clients: whoever has a key. What each may do is decided at
the model's own address, to which a request goes from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pipeline.cluster import gateway
from pipeline.cluster.objects import labelled
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.shared_address import ENVOY_GATEWAY, SHARED

POLICY: Final = "slipway-shared-address"


def of(namespace: str, policies: Iterable[Object]) -> list[Object]:
    """Make the policy of the shared address by that of the models' own among *policies*; none if there is none."""
    own = [body["spec"]["apiKeyAuth"] for body in policies if body["kind"] == "SecurityPolicy"]
    if not own:
        return []
    keys = {name: own[0][name] for name in ("credentialRefs", "extractFrom")}  # it stays in the request
    spec = {"targetSelectors": [gateway.ROUTE | {"matchLabels": SHARED}], "apiKeyAuth": keys}
    return [labelled(ENVOY_GATEWAY, "SecurityPolicy", POLICY, namespace, spec=spec)]
