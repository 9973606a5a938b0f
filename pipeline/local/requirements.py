"""Checks whether this machine has what a workflow needs, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.local.manifest import Template
from pipeline.local.resources import MachineResources, literal, request
from pipeline.local.workflow import Workflow
from stages.parts.base.errors import ConfigError


def check(
    workflow: Workflow, mounts: Mapping[str, Path], capacity: MachineResources, environment: Mapping[str, str]
) -> None:
    """Check GPUs, folders and secrets.

    Raises:
        ConfigError: names each task and what it lacks.
    """

    def lacks(template: Template) -> Iterator[str]:
        resources, volumes = template.resources, workflow.volumes(template)
        if lack := request(literal(resources.requests), literal(resources.limits)).lacking_gpus(capacity):
            yield lack
        for mount in template.program.volume_mounts:
            if volumes[mount.name].persistent_volume_claim and mount.mount_path not in mounts:
                yield f"mounts volume {mount.name!r} at {mount.mount_path}, and no local folder stands for it"
        for name, optional in template.program.secrets().items():
            if not optional and name not in environment:
                yield f"needs a secret: set the environment variable {name}"

    lines = [f"    {task} {lack}" for task, template in workflow.used() for lack in lacks(template)]
    if lines:
        raise ConfigError(
            "this machine can't run the workflow\n" + "\n".join(lines),
            hint="change what the platform's configuration asks for, or run it on a larger machine",
        )
