"""What a cluster needs to know about a stage's pod besides its program: node, identity, rights, scratch space, metrics.

Everything here is empty for one machine.
"""

from __future__ import annotations

from typing import Any, Final

from hera.workflows import Env, models

from pipeline.settings.platform import DEFAULT_REPOSITORY, LOCKS, NO_REPOSITORY, ClusterSettings, Nodes, Platform, Stage

USER: Final = 8737
"""User and group of every image, and owner of the files in the store."""
CACHE_MOUNT: Final = "/cache"
SCRATCH: Final = {"tmp": "/tmp", "cache": CACHE_MOUNT}  # noqa: S108
"""Writable folders, since the root file system is read-only."""
SHARED_MEMORY: Final = "shm"
CACHES: Final = {
    "HOME": CACHE_MOUNT,
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "HF_HOME": f"{CACHE_MOUNT}/huggingface",
    "VLLM_CACHE_ROOT": f"{CACHE_MOUNT}/vllm",
    "TRITON_CACHE_DIR": f"{CACHE_MOUNT}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_MOUNT}/torchinductor",
}
CERTIFICATES: Final = "certificates"
"""The volume with the certificate authorities that pods trust."""
CERTIFICATES_MOUNT: Final = "/etc/slipway"
TRUSTED: Final = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), f"{CERTIFICATES_MOUNT}/ca.crt")
GPU_PODS: Final = "gpu-pods"
"""The semaphore: a key of the ConfigMap ``LOCKS``."""
STAGES_ACCOUNT: Final = "slipway-stages"
"""The service account of most stages: it has no rights and no token."""
EXECUTOR_ACCOUNT: Final = "slipway-executor"
"""The service account of Argo's own container in each pod, which reports the task's result."""
ACCOUNTS: Final = dict.fromkeys(("rollout", "ending"), "slipway-serve")
"""The service accounts of the stages that talk to the cluster."""
KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
STAY: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Autoscalers must not evict hours of work to save a node."""
STAGE_BUCKETS_S: Final = (1, 10, 60, 300, 900, 3600, 10_800, 43_200)
RUN_BUCKETS_S: Final = (60, 600, 1800, 3600, 10_800, 43_200, 86_400, 259_200)


def of_workflow(platform: Platform) -> dict[str, Any]:
    """Fields of the WorkflowTemplate."""
    cluster = platform.cluster
    if cluster is None:
        return {}
    return {
        "service_account_name": STAGES_ACCOUNT,
        "automount_service_account_token": False,
        "executor": models.ExecutorConfig(service_account_name=EXECUTOR_ACCOUNT),
        "security_context": models.PodSecurityContext(
            run_as_non_root=True,
            run_as_user=USER,
            run_as_group=USER,
            fs_group=USER,
            # Changing the owner of every file of a terabyte for each pod would take too long.
            fs_group_change_policy="OnRootMismatch",
            seccomp_profile=models.SeccompProfile(type="RuntimeDefault"),
        ),
        "pod_metadata": models.Metadata(annotations=STAY),
        "pod_priority_class_name": cluster.priority_class,
        "pod_gc": models.PodGC(strategy="OnPodSuccess", delete_delay_duration="10m"),
        "ttl_strategy": models.TTLStrategy(
            seconds_after_success=cluster.kept_s, seconds_after_failure=2 * cluster.kept_s
        ),
        "active_deadline_seconds": cluster.deadline_s,
        "metrics": _run_metrics(),
        **_artifacts(cluster),
    }


def of_stage(name: str, asks: Stage, platform: Platform, *, variant: str | None) -> dict[str, Any]:
    """Fields of a stage's container template except volumes and synchronization.

    Args:
        variant: a reference to the variant's name, for the metrics.
    """
    if platform.cluster is None:
        return {}
    return {
        **_placement(platform.nodes_of(asks)),
        **_identity(name),
        "labels": _labels(name, asks, platform.cluster),
        "metrics": _stage_metrics(name, variant or "none"),
        "security_context": models.SecurityContext(
            allow_privilege_escalation=False,
            capabilities=models.Capabilities(drop=["ALL"]),
            read_only_root_filesystem=True,
            run_as_non_root=True,
        ),
    }


def environment(platform: Platform) -> list[Env]:
    if platform.cluster is None:
        return []
    trusted = TRUSTED if platform.cluster.certificates else {}
    return [Env(name=name, value=value) for name, value in (CACHES | trusted | platform.cluster.environment).items()]


def volumes(platform: Platform) -> list[models.Volume]:
    if platform.cluster is None:
        return []
    found = [models.Volume(name=name, empty_dir=models.EmptyDirVolumeSource()) for name in SCRATCH]
    if platform.cluster.certificates:
        source = models.ConfigMapVolumeSource(name=platform.cluster.certificates)
        found.append(models.Volume(name=CERTIFICATES, config_map=source))
    return found


def mounts(asks: Stage, platform: Platform) -> list[models.VolumeMount]:
    if platform.cluster is None:
        return []
    writable = {**SCRATCH, **({SHARED_MEMORY: "/dev/shm"} if asks.shm else {})}  # noqa: S108
    found = [models.VolumeMount(name=name, mount_path=path) for name, path in writable.items()]
    if platform.cluster.certificates:
        found.append(models.VolumeMount(name=CERTIFICATES, mount_path=CERTIFICATES_MOUNT, read_only=True))
    return found


def shared_memory(asks: Stage, platform: Platform) -> list[models.Volume] | None:
    """A volume of the template's own, because its size differs by stage."""
    if platform.cluster is None or asks.shm is None:
        return None
    limit = None if asks.shm == "auto" else asks.shm
    memory = models.EmptyDirVolumeSource(medium="Memory", size_limit=limit)
    return [models.Volume(name=SHARED_MEMORY, empty_dir=memory)]


def gpu_semaphore(asks: Stage, platform: Platform) -> list[models.SemaphoreRef] | None:
    if platform.cluster is None or not asks.gpus:
        return None
    return [models.SemaphoreRef(config_map_key_ref=models.ConfigMapKeySelector(name=LOCKS, key=GPU_PODS))]


def _placement(nodes: Nodes) -> dict[str, Any]:
    tolerations = [models.Toleration(**toleration.model_dump(exclude_none=True)) for toleration in nodes.tolerations]
    return {"node_selector": nodes.selector or None, "tolerations": tolerations or None}


def _identity(stage: str) -> dict[str, Any]:
    if stage not in ACCOUNTS:
        return {}
    return {"service_account_name": ACCOUNTS[stage], "automount_service_account_token": True}


def _labels(stage: str, asks: Stage, cluster: ClusterSettings) -> dict[str, str]:
    """The labels by which the network policies select a pod."""
    labels = {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/component": stage}
    return labels | ({KUEUE_QUEUE: cluster.queue} if cluster.queue and asks.gpus else {})


def _artifacts(cluster: ClusterSettings) -> dict[str, Any]:
    if cluster.artifact_repository in (None, NO_REPOSITORY, DEFAULT_REPOSITORY):
        return {}
    return {"artifact_repository_ref": models.ArtifactRepositoryRef(key=cluster.artifact_repository)}


def _run_metrics() -> models.Metrics:
    labels = [models.MetricLabel(key="status", value="{{workflow.status}}")]
    return _metrics("run", "{{workflow.duration}}", labels, RUN_BUCKETS_S)


def _stage_metrics(stage: str, variant: str) -> models.Metrics:
    values = {"stage": stage, "variant": variant, "status": "{{status}}"}
    labels = [models.MetricLabel(key=key, value=value) for key, value in values.items()]
    return _metrics("stage", "{{duration}}", labels, STAGE_BUCKETS_S)


def _metrics(what: str, duration: str, labels: list[models.MetricLabel], buckets: tuple[float, ...]) -> models.Metrics:
    return models.Metrics(
        prometheus=[
            models.Prometheus(
                name=f"slipway_{what}s_total",
                help=f"{what.capitalize()}s that have ended, by outcome",
                labels=labels,
                counter=models.Counter(value="1"),
            ),
            models.Prometheus(
                name=f"slipway_{what}_duration_seconds",
                help=f"How long a {what} took",
                labels=labels,
                histogram=models.Histogram(value=duration, buckets=list(buckets)),
            ),
        ]
    )
