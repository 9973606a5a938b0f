"""Submits a run once: a Workflow that names the installed template and gives it arguments."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from pipeline.argo.status import ended
from pipeline.argo.template import installed
from pipeline.workflow.parameters import NAME
from stages.parts.base.store import canonical_json
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import WORKFLOWS, Object
from stages.parts.cluster.refusals import Absent, AlreadyExists

KEY_LABEL: Final = "slipway/key"
SUBMISSION: Final = "slipway/submission"
"""Distinguishes our workflow from one that another process submitted under the same name at the same moment."""
VOLATILE: Final = frozenset({"resolve-key"})
"""Parameters that do not change what is run: with --refresh the key is random."""
RUN_NAME: Final = re.compile(r"^slipway-[0-9a-f]{10}-\d{6}-(?P<number>\d+)$")


def key_of(arguments: Mapping[str, str]) -> str:
    """A key of what is run: 16 hex digits of the sha256 of the model, the revision and every setting."""
    what = {name: value for name, value in arguments.items() if name not in VOLATILE}
    return hashlib.sha256(canonical_json(what).encode()).hexdigest()[:16]


def workflow(name: str, arguments: Mapping[str, str], *, submission: str = "") -> Object:
    """The Workflow of one run."""
    return {
        "apiVersion": WORKFLOWS.api_version,
        "kind": WORKFLOWS.name,
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/part-of": NAME,
                "workflows.argoproj.io/workflow-template": NAME,
                KEY_LABEL: key_of(arguments),
            },
            "annotations": {"workflows.argoproj.io/title": arguments["model"], SUBMISSION: submission},
        },
        "spec": {
            "workflowTemplateRef": {"name": NAME},
            "arguments": {"parameters": [{"name": name, "value": value} for name, value in arguments.items()]},
        },
    }


def submit(cluster: Cluster, arguments: Mapping[str, str], *, force: bool = False) -> tuple[Object, bool]:
    """Submit a run, unless one with the same arguments is active. Returns the workflow, and whether it is new.

    Args:
        force: submit it in any case.

    Raises:
        NotInstalled: the template is missing, or is another version's.
        AccessDenied: workflows may not be created here.
    """
    installed(cluster, arguments)
    key = key_of(arguments)
    same, _ = cluster.list(WORKFLOWS, labels=f"{KEY_LABEL}={key}")
    active = [each for each in same if not ended(each) and not each["spec"].get("shutdown")]
    if active and not force:
        return max(active, key=lambda each: str(each["metadata"]["creationTimestamp"])), False
    submission = uuid.uuid4().hex
    number = 1 + max((_number(each) for each in same), default=0)
    while True:
        # The same run gets the same name on a day, so that only one of several submitters can create it.
        name = f"{NAME}-{key[:10]}-{datetime.now(UTC):%y%m%d}-{number}"
        try:
            return cluster.create(WORKFLOWS, workflow(name, arguments, submission=submission)), True
        except AlreadyExists:
            number += 1
        try:
            there = cluster.get(WORKFLOWS, name)
        except Absent:
            continue
        ours = there["metadata"].get("annotations", {}).get(SUBMISSION) == submission
        if ours or not (force or ended(there)):
            return there, ours


def _number(each: Object) -> int:
    found = RUN_NAME.match(each["metadata"]["name"])
    return int(found["number"]) if found else 0
