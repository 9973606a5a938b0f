"""Runs a command in a pod that has the store's volume, with the command's own output and exit code."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

from pipeline.argo.follow import show_until_ended
from pipeline.argo.status import run_state
from pipeline.argo.submission import TITLE, of_template
from pipeline.argo.template import read
from pipeline.settings.config import RunConfig
from pipeline.workflow.parameters import COMMAND, STORE_COMMAND, store_settings
from stages.parts.base.errors import Interrupted, RunFailed
from stages.parts.base.program import PRINTED
from stages.parts.base.store import canonical_json
from stages.parts.cluster.api import AlreadyExists, Cluster
from stages.parts.cluster.kinds import WORKFLOWS


def call(cluster: Cluster, config: RunConfig, words: Sequence[str]) -> tuple[str, int]:
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
