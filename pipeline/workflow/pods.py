"""What a cluster needs to know about a stage's pod besides its program: node, identity, rights, scratch space, metrics.

Everything here but the store's volume is empty for one machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml
from hera.workflows import Env, Parameter, Resources, models

from pipeline.settings.platform import DEFAULT_REPOSITORY, LOCKS, NO_REPOSITORY, STORE_MOUNT, Platform, Stage
from stages.parts.base.program import OUTPUTS_VARIABLE
from stages.parts.base.store import STORE_VARIABLE
from stages.parts.base.templates import rendered
from stages.rollout.kserve.objects import PART_OF, USER

OUTPUTS_MOUNT: Final = "/outputs"
SCRATCH: Final = {"tmp": "/tmp", "cache": "/cache"}  # noqa: S108
"""Writable folders, since the root file system is read-only."""
SHARED_MEMORY: Final = "shm"
CERTIFICATES: Final = "certificates"
"""The volume with the certificate authorities that pods trust."""
CERTIFICATES_MOUNT: Final = "/etc/slipway"
TRUSTED: Final = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), f"{CERTIFICATES_MOUNT}/ca.crt")
GPU_PODS: Final = "gpu-pods"
"""The semaphore: a key of the ConfigMap ``LOCKS``."""
CONTAINER: Final = yaml.safe_load(Path(__file__).with_name("container.yaml").read_text(encoding="utf-8"))
ACCOUNTS: Final = dict.fromkeys(("rollout", "ending"), "slipway-serve") | {"watch": "slipway-watch"}
"""The service accounts of the stages that talk to the cluster."""


def of_workflow(
    platform: Platform, name: str, about: dict[str, str], of_run: dict[str, str], *, metrics: bool = True
) -> dict[str, Any]:
    """Return the fields of a WorkflowTemplate but its arguments and tasks. Those that are no run have no *metrics*.

    *about* and *of_run* are the annotations of the template and of its Workflows, as ``titled`` makes them.
    """
    (common,) = rendered(
        Path(__file__).with_name("pods.yaml.jinja"),
        platform=platform,
        cluster=platform.cluster,
        user=USER,
        scratch=[*SCRATCH],
        certificates=CERTIFICATES,
        usual=(None, NO_REPOSITORY, DEFAULT_REPOSITORY),
    )
    spec = models.WorkflowSpec.model_validate(common)
    fields = {
        "name": name,
        "namespace": platform.namespace,
        "labels": {"app.kubernetes.io/name": name} | PART_OF,
        "annotations": about,
        "workflow_metadata": models.WorkflowMetadata(labels=PART_OF, annotations=of_run),
        **{name: getattr(spec, name) for name in spec.model_fields_set},
    }
    if metrics and platform.cluster:
        fields["metrics"] = metrics_of("run", "{{workflow.duration}}", status="{{workflow.status}}")
    return fields


def titled(title: str, description: str) -> dict[str, str]:
    """Return the annotations that Argo's UI shows of a run, as Markdown."""
    return {"workflows.argoproj.io/title": title, "workflows.argoproj.io/description": description}


def of_stage(
    name: str, asks: Stage, platform: Platform, *, variant: str = "none", metrics: bool = True
) -> dict[str, Any]:
    """Return the fields of a stage's container template except volumes, environment and synchronization.

    *variant* is a reference to the variant's name, for the metrics.
    """
    memory, gpus = None if asks.memory == "auto" else asks.memory, asks.gpus if isinstance(asks.gpus, int) else 0
    fields: dict[str, Any] = {
        "resources": Resources(cpu_request=asks.cpu, memory_request=memory, memory_limit=memory, gpus=gpus or None),
        "active_deadline_seconds": asks.deadline_s,
    }
    if platform.cluster is None:
        return fields
    nodes = platform.nodes_of(asks)
    fields["node_selector"] = nodes.selector or None
    fields["tolerations"] = [
        models.Toleration(**toleration.model_dump(exclude_none=True)) for toleration in nodes.tolerations
    ] or None
    if name in ACCOUNTS:
        fields |= {"service_account_name": ACCOUNTS[name], "automount_service_account_token": True}
    # The network policies select pods by these labels.
    fields["labels"] = PART_OF | {"app.kubernetes.io/component": name}
    if platform.cluster.queue and asks.gpus:
        fields["labels"]["kueue.x-k8s.io/queue-name"] = platform.cluster.queue
    fields["security_context"] = models.SecurityContext.model_validate(CONTAINER["securityContext"])
    if metrics:
        labels = {"stage": name, "variant": variant, "status": "{{status}}"}
        fields["metrics"] = metrics_of("stage", "{{duration}}", **labels)
    return fields


def environment(platform: Platform, *further: Env) -> list[Env]:
    """Return the variables that every pod has, with *further* ones."""
    cluster, caches = platform.cluster, CONTAINER["environment"]
    general = caches | (TRUSTED if cluster.certificates else {}) | cluster.environment if cluster else {}
    return [
        *(Env(name=STORE_VARIABLE, value=STORE_MOUNT), Env(name=OUTPUTS_VARIABLE, value=OUTPUTS_MOUNT)),
        *further,
        *(Env(name=name, value=value) for name, value in general.items()),
    ]


def output(name: str, default: str | None = None) -> Parameter:
    """Return an output that a program writes to a file of its name."""
    return Parameter(name=name, value_from=models.ValueFrom(path=f"{OUTPUTS_MOUNT}/{name}", default=default))


def mounts(asks: Stage, platform: Platform) -> list[models.VolumeMount]:
    """Return where a stage's container has these volumes."""
    paths = {"store": STORE_MOUNT, "outputs": OUTPUTS_MOUNT}
    if platform.cluster:
        paths |= {**SCRATCH, **({SHARED_MEMORY: "/dev/shm"} if asks.shm else {})}  # noqa: S108
    result = [models.VolumeMount(name=name, mount_path=path) for name, path in paths.items()]
    if platform.cluster and platform.cluster.certificates:
        result.append(models.VolumeMount(name=CERTIFICATES, mount_path=CERTIFICATES_MOUNT, read_only=True))
    return result


def shared_memory(asks: Stage, platform: Platform) -> list[models.Volume] | None:
    """Return a volume of the template's own, because its size differs by stage."""
    if platform.cluster is None or asks.shm is None:
        return None
    limit = None if asks.shm == "auto" else asks.shm
    memory = models.EmptyDirVolumeSource(medium="Memory", size_limit=limit)
    return [models.Volume(name=SHARED_MEMORY, empty_dir=memory)]


def synchronization(asks: Stage, platform: Platform, mutex: str | None) -> models.Synchronization | None:
    """Return the locks of a stage: its own, and that of all pods with GPUs."""
    mutexes = [models.Mutex(name=mutex)] if mutex else None
    key = models.ConfigMapKeySelector(name=LOCKS, key=GPU_PODS)
    semaphores = [models.SemaphoreRef(config_map_key_ref=key)] if platform.cluster and asks.gpus else None
    return models.Synchronization(mutexes=mutexes, semaphores=semaphores) if mutexes or semaphores else None


def metrics_of(unit: str, duration: str, **labels: str) -> models.Metrics:
    """Return what Argo's controller tells of a run, a stage or an approval: see ``metrics.yaml.jinja``."""
    by = [{"key": key, "value": value} for key, value in labels.items()]
    (prometheus,) = rendered(Path(__file__).with_name("metrics.yaml.jinja"), unit=unit, duration=duration, labels=by)
    return models.Metrics(prometheus=prometheus)
