"""Runs the installed WorkflowTemplates, and compares them with those that this version and configuration would install.

A Workflow names a template and gives it arguments: a run, once, or a command in a pod that has the store's volume, with
the command's own output and exit code.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pipeline.argo.follow import show_until_ended
from pipeline.argo.status import arguments_of, ended, run_state, tasks
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import DEFAULT_REPOSITORY
from pipeline.workflow.parameters import COMMAND, NAME, STORE_COMMAND, store_settings
from stages.parts.base.errors import Interrupted, NotInstalled, RunFailed
from stages.parts.base.files import canonical_json, digest_of
from stages.parts.base.program import PRINTED
from stages.parts.cluster.api import Absent, AlreadyExists, Cluster
from stages.parts.cluster.kinds import TEMPLATES, WORKFLOWS, Object

KEY_LABEL: Final = "slipway/key"
SUBMISSION: Final = "slipway/submission"
"""Distinguishes our workflow from one that another process submitted under the same name at the same moment."""
TITLE: Final = "workflows.argoproj.io/title"
VOLATILE: Final = frozenset({"resolve-key"})
"""Parameters that do not change what is run: with --refresh the key is random."""
LAST: Final = {"secondsAfterCompletion": 315_360_000}
"""How long a model's last run is kept, ten years: what is run next is compared with it."""
RUN_NAME: Final = re.compile(r"^slipway-[0-9a-f]{10}-\d{6}-(?P<number>\d+)$")


def read(cluster: Cluster, name: str) -> Object:
    """Read one of our WorkflowTemplates. Raises: NotInstalled: it, or Argo, is missing."""
    try:
        return cluster.get(TEMPLATES, name)
    except Absent as error:
        cluster.require(TEMPLATES)
        text = f"the template {name} is not installed in namespace {cluster.namespace}"
        raise NotInstalled(text, hint="slipway install --platform NAME") from error


def installed(cluster: Cluster, arguments: Mapping[str, str]) -> Object:
    """Return the installed template, which has a parameter for each of *arguments*."""
    template = read(cluster, NAME)
    parameters = [parameter["name"] for parameter in template["spec"].get("arguments", {}).get("parameters", [])]
    if lacking := ", ".join(name for name in arguments if name not in parameters):
        text = f"the installed template {NAME} is another version's: it has no parameter {lacking}"
        raise NotInstalled(text, hint="slipway install --platform NAME")
    return template


def compare(template: Object, config: RunConfig) -> str:
    """Return the first field in which the installed template differs from that of *config*; empty if none does.

    Arguments don't count: each run brings its own.
    """
    rendered, applied = rendered_as(template, config)["spec"], template["spec"]
    names, applied_names = ([task["name"] for task in tasks(spec)] for spec in (rendered, applied))
    if sorted(names) != sorted(applied_names):
        raise NotInstalled(
            f"the installed template {NAME} has other tasks than this configuration: {', '.join(applied_names)}",
            hint=f"slipway install --platform {config.platform.name}, with the same --config and --set",
        )
    return difference({key: value for key, value in rendered.items() if key != "arguments"}, applied, "spec")


def rendered_as(template: Object, config: RunConfig) -> Object:
    """Render *config*, with what ``install`` found out about the cluster when it applied *template*."""
    from pipeline.workflow.definition import workflow_template
    from pipeline.workflow.stage_templates import EXIT_HANDLER

    cluster = config.platform.cluster
    publishes = template["spec"].get("onExit") == EXIT_HANDLER
    if cluster and cluster.artifact_repository is None and publishes:
        config = with_cluster(config, {"artifact_repository": DEFAULT_REPOSITORY})
    return workflow_template(config)


def with_cluster(config: RunConfig, changed: Mapping[str, str | None]) -> RunConfig:
    """*config* with other settings of its platform's cluster."""
    cluster = config.cluster.model_copy(update=dict(changed))
    return config.model_copy(update={"platform": config.platform.model_copy(update={"cluster": cluster})})


def difference(rendered: Any, applied: Any, path: str) -> str:
    """Return the first field of *rendered* that is missing or different in *applied*; empty if none.

    Defaults that the cluster adds don't count.
    """
    if isinstance(rendered, dict) and isinstance(applied, dict):
        pairs = [(f"{path}.{key}", value, applied.get(key)) for key, value in rendered.items()]
    elif isinstance(rendered, list) and isinstance(applied, list) and len(rendered) == len(applied):
        pairs = [(f"{path}[{at}]", *pair) for at, pair in enumerate(zip(rendered, applied, strict=True))]
    else:
        return "" if rendered == applied else path
    return next(filter(None, (difference(mine, its, field) for field, mine, its in pairs)), "")


def of_template(template: str, name: str, arguments: Mapping[str, str]) -> Object:
    return {
        "apiVersion": WORKFLOWS.api_version,
        "kind": WORKFLOWS.name,
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/part-of": NAME, "workflows.argoproj.io/workflow-template": template},
        },
        "spec": {
            "workflowTemplateRef": {"name": template},
            "arguments": {"parameters": [{"name": name, "value": value} for name, value in arguments.items()]},
        },
    }


def submit(cluster: Cluster, arguments: Mapping[str, str], *, force: bool = False) -> tuple[Object, bool]:
    """Submit a run, unless, without *force*, one with the same arguments is active.

    Returns the workflow, and whether it is new.
    """
    installed(cluster, arguments)
    # What is run: the model, the revision and every setting.
    lasting = {name: value for name, value in arguments.items() if name not in VOLATILE}
    key = digest_of(lasting)[:16]
    earlier, _ = cluster.list(WORKFLOWS, labels=f"{KEY_LABEL}={key}")
    active = [one for one in earlier if not ended(one) and not one["spec"].get("shutdown")]
    if active and not force:
        return max(active, key=lambda one: str(one["metadata"]["creationTimestamp"])), False
    numbers = (int(match["number"]) for one in earlier if (match := RUN_NAME.match(one["metadata"]["name"])))
    number = 1 + max(numbers, default=0)
    while True:
        # The same run gets the same name on a day, so that only one of several submitters can create it.
        name = f"{NAME}-{key[:10]}-{datetime.now(UTC):%y%m%d}-{number}"
        workflow = of_template(NAME, name, arguments)
        workflow["metadata"]["labels"][KEY_LABEL] = key
        workflow["metadata"]["annotations"] = {TITLE: arguments["model"]}
        workflow["spec"]["ttlStrategy"] = LAST
        number += 1
        with contextlib.suppress(Absent):  # somebody else's, and removed at once
            run, is_ours = create_once(cluster, workflow)
            if is_ours:
                _let_expire(cluster, run)
            if is_ours or not (force or ended(run)):
                return run, is_ours


def _let_expire(cluster: Cluster, last: Object) -> None:
    """Let the runs of a model before its *last* one expire as their template says."""
    for run in cluster.list(WORKFLOWS)[0]:
        same = arguments_of(run).get("model-directory") == arguments_of(last).get("model-directory")
        name = run["metadata"]["name"]
        if same and run["spec"].get("ttlStrategy") == LAST and name != last["metadata"]["name"]:
            with contextlib.suppress(Absent):
                cluster.merge(WORKFLOWS, name, {"spec": {"ttlStrategy": None}})


def create_once(cluster: Cluster, workflow: Object) -> tuple[Object, bool]:
    """Create a workflow, unless there is one of its name. Returns the one that there is then, and whether it is ours: a
    request whose answer was lost is sent again."""
    metadata, submission = workflow["metadata"], uuid.uuid4().hex
    metadata["annotations"] = {**metadata.get("annotations", {}), SUBMISSION: submission}
    try:
        return cluster.create(WORKFLOWS, workflow), True
    except AlreadyExists:
        existing = cluster.get(WORKFLOWS, metadata["name"])
        return existing, existing["metadata"].get("annotations", {}).get(SUBMISSION) == submission


def call_in_pod(cluster: Cluster, config: RunConfig, words: Sequence[str]) -> tuple[str, int]:
    """Run ``slipway WORDS`` where the store is. Returns what it printed, and its exit code; its progress is on stderr.

    Raises:
        NotInstalled: the template is missing, or the pod's image can't be pulled; nothing was done.
        RunFailed: the command failed without a result, with its message, hint and exit code.
        Interrupted: by Ctrl-C; the command continues.
    """
    read(cluster, STORE_COMMAND)
    name = f"{STORE_COMMAND}-{secrets.token_hex(5)}"
    arguments = {"arguments": canonical_json(list(words)), "config": store_settings(config)}
    workflow = of_template(STORE_COMMAND, name, arguments)
    workflow["metadata"]["annotations"] = {TITLE: " ".join(("slipway", *words))}
    with contextlib.suppress(AlreadyExists):  # the response to the first try was lost
        cluster.create(WORKFLOWS, workflow)
    continues = Interrupted(f"the command continues in the cluster, as the workflow {name}")
    # Without its image it must not begin by itself once that is mended.
    ended = run_state(show_until_ended(cluster, name, interrupted=continues, unpulled="Terminate"))
    node = next((node for node in ended.nodes if node.name == COMMAND), None)
    if node and ((printed := node.outputs.get(PRINTED, "")) or ended.phase == "Succeeded"):
        return printed, node.exit_code or 0
    if node is None or not node.message:
        raise RunFailed(f"the workflow {name} {ended.phase.lower()}: {ended.message or 'no message'}")
    raise RunFailed(node.message, hint=node.hint, exit_code=node.exit_code or RunFailed.exit_code)
