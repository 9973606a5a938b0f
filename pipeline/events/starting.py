"""The Workflow that a push starts: the same as the one that manifests/events/sensor.yaml creates."""

from __future__ import annotations

import uuid

from pipeline.argo.submission import SUBMISSION, of_template
from pipeline.argo.template import installed
from pipeline.events.push import Push
from pipeline.workflow.parameters import NAME
from stages.parts.base.errors import EventRefused
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import WORKFLOWS, Object
from stages.parts.cluster.refusals import AlreadyExists


def workflow(push: Push) -> Object:
    """Return the Workflow that runs what was pushed."""
    body = of_template(NAME, push.name, arguments(push))
    body["metadata"]["labels"]["slipway/trigger"] = push.provider
    return body


def arguments(push: Push) -> dict[str, str]:
    """Return the parameters of that Workflow. All others keep the defaults of the installed template."""
    return {
        "model": push.model,
        "revision": push.commit,
        "model-directory": push.model_directory,
        "resolve-key": push.resolve_key,
        "serve": "true",
    }


def start(cluster: Cluster, push: Push) -> Object:
    """Create the push's Workflow and return it.

    Raises:
        EventRefused: a run of this commit was started before.
        NotInstalled: the template is missing, or is another version's.
    """
    installed(cluster, arguments(push))
    body, submission = workflow(push), uuid.uuid4().hex
    body["metadata"]["annotations"] = {SUBMISSION: submission}
    try:
        return cluster.create(WORKFLOWS, body)
    except AlreadyExists as error:
        existing = cluster.get(WORKFLOWS, push.name)
        if existing["metadata"].get("annotations", {}).get(SUBMISSION) == submission:
            return existing  # the answer to our own first request was lost
        raise EventRefused(
            f"a run of {push.model} at {push.commit} was started before: {push.name}",
            hint=f"slipway show {push.name}, or to run it again: slipway retry {push.name}",
        ) from error
