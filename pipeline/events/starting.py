"""Creating the Workflow that the Sensor would create, once."""

from __future__ import annotations

import copy
import uuid

from pipeline.argo.status import arguments_of
from pipeline.argo.submission import SUBMISSION
from pipeline.argo.template import installed
from stages.parts.base.errors import EventRefused
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import WORKFLOWS, Object
from stages.parts.cluster.refusals import Taken


def start(cluster: Cluster, workflow: Object) -> Object:
    """Create *workflow*, whose name follows from model and commit.

    Raises:
        EventRefused: this commit's run was started before.
        NotInstalled: the template is not there, or is another version's.
        AccessDenied: workflows may not be created here.
    """
    given = arguments_of(workflow)
    installed(cluster, given)
    mine, submission = copy.deepcopy(workflow), uuid.uuid4().hex
    mine["metadata"].setdefault("annotations", {})[SUBMISSION] = submission
    try:
        return cluster.create(WORKFLOWS, mine)
    except Taken as error:
        there = cluster.get(WORKFLOWS, mine["metadata"]["name"])
        if there["metadata"].get("annotations", {}).get(SUBMISSION) == submission:
            return there  # the answer to our own first try was lost
        name = there["metadata"]["name"]
        raise EventRefused(
            f"a run of {given['model']} at {given['revision']} was started before: {name}",
            hint=f"slipway show {name}, or once more: slipway retry {name}",
        ) from error
