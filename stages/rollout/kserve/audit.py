"""Who acts on a cluster, and the events by which others there see what a rollout did: ``kubectl events``."""

from __future__ import annotations

import socket
import uuid
from datetime import UTC, datetime
from typing import Final

from stages.parts.base.errors import SlipwayError
from stages.parts.cluster.api import FIELD_MANAGER, Cluster
from stages.parts.cluster.kinds import EVENTS, USER_REVIEWS, Object

BAD: Final = ("RolledBack", "GaveUp")
LONGEST_NOTE: Final = 1024
"""In bytes; the API refuses a longer one."""


def cluster_user(cluster: Cluster) -> str:
    """Ask which user the cluster takes the caller for; "unknown" if it does not say."""
    body = {"apiVersion": USER_REVIEWS.api_version, "kind": USER_REVIEWS.name}
    try:
        return str(cluster.request("POST", USER_REVIEWS.path(None), body=body)["status"]["userInfo"]["username"])
    except (SlipwayError, KeyError):  # Kubernetes before 1.28, or the right was taken away
        return "unknown"


def event(regarding: Object, reason: str, note: str) -> Object:
    """Build an event on an InferenceService or HTTPRoute."""
    metadata = regarding["metadata"]
    identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.name,
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": FIELD_MANAGER,
        "reportingInstance": socket.gethostname(),
        "action": "Rollout",
        "reason": reason,
        "type": "Warning" if reason in BAD else "Normal",
        "regarding": {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"], **identity},
        "note": note.encode()[:LONGEST_NOTE].decode(errors="ignore"),
    }
