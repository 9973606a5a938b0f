"""The pods of one release: whether there is room for them, whether they answer, why they do not, and their counters.

Counters are read from the pods themselves: this needs nothing on the cluster besides KServe and has no delay, and the
one-machine platform does the same. If Prometheus is configured, they are read from there, for clusters where a mesh
blocks access to the pods. The counters of a pod that is gone are still included, so that sums never fall when the
number of replicas does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import httpx
from prometheus_client.samples import Sample

from stages.parts.base.errors import AccessDenied, NotEnoughGpus, NotTrusted, ServerFailed, TransientError
from stages.parts.base.program import StageFailure
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import NODES, PODS, QUOTAS, Object
from stages.parts.cluster.nodes import admits, free
from stages.parts.records.rollout import Counters
from stages.parts.vllm.client import HEALTH_TIMEOUT_S, http, read_metrics
from stages.parts.vllm.prometheus import METRICS, samples_in, sum_counters
from stages.rollout.kserve.modes import AUTO
from stages.rollout.kserve.objects import ENDPOINT, PORT, RELEASE, REVISION, VERIFIER, KServeEndpoint, condition
from stages.rollout.kserve.settings import Toleration

CRASHES: Final = 3
"""After so many restarts, a container that crashes again is considered broken."""
HOPELESS: Final = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
UNPULLED: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
SERVERS: Final = frozenset({"kserve-container", "user-container", "main"})
"""The names of the container that serves: KServe's, Knative's, and a LLMInferenceService's."""
ENDED: Final = ("Succeeded", "Failed")
"""The phases of pods that others take the place of, such as one that its node has evicted."""
KEPT: Final = "2h"
"""How far back Prometheus is queried for pods that are gone: longer than a step of a rollout."""
POOLS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels of nodes that a cloud provider adds when pods wait for them."""


@dataclass
class Pods:
    cluster: Cluster
    endpoint: KServeEndpoint
    _last: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    """The last samples of each server, by release and by pod with its restart count."""
    _restarts: dict[str, dict[str, int]] = field(default_factory=dict)

    def of(self, release: str) -> list[Object]:
        labels = f"{ENDPOINT}={self.endpoint.name},{RELEASE}={release}"
        pods, _ = self.cluster.list(PODS, self.endpoint.namespace, labels=labels)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, release: str, revision: str) -> bool:
        """Whether a pod of the predictor's *revision* accepts requests; raise ServerFailed if none ever will."""
        pods = [pod for pod in self.of(release) if _revision(pod) == revision]
        if any(condition(pod, "Ready") for pod in pods):
            return True
        for pod in pods:
            if why := _failure(pod):
                hint = f"kubectl -n {self.endpoint.namespace} logs {pod['metadata']['name']} --previous"
                raise ServerFailed(f"{pod['metadata']['name']}: {why}", hint=hint)
        return False

    def waits_for(self, release: str) -> str:
        reasons = ((pod["metadata"]["name"], _waiting(pod)) for pod in self.of(release))
        return next((f"{name}: {why}" for name, why in reasons if why), "")

    def counters(self, release: str) -> Counters:
        pods = self.of(release)
        restarts = self._restarts.setdefault(release, {})
        for pod in pods:
            name = pod["metadata"]["name"]
            restarts[name] = max(restarts.get(name, 0), _restarts(pod))
        address = self.endpoint.settings.prometheus
        scrapes = address in (None, AUTO)  # whether what was found reads these pods is not known
        samples = self._scrape(pods, release) if scrapes else self._query_prometheus(str(address), release)
        # A replica more or less is not a restart; a crash is.
        return sum_counters(samples, f"{sum(restarts.values())} restarts")

    def check_room(self, release: str) -> None:
        """Raise NotEnoughGpus unless ``scaling.minimum`` replicas of *release* get their GPUs, before any pod of it
        exists: a pod that waits for one would end the rollout only when its time to start is over, and a quota shows
        its refusal nowhere near the pods. It goes by the namespace's quotas and, where the caller may list nodes and
        pods, by the nodes that match. Nodes that a cloud may add are not counted on, nor held against it."""
        settings = self.endpoint.settings
        gpu, pods = settings.gpu, max(1, settings.scaling.minimum) - len(self.of(release))
        if gpu is None or pods <= 0:
            return
        gpus = self.endpoint.serving_of(release).tensor_parallel_size

        def check(missing: int, room: str) -> None:
            if missing > 0:
                raise NotEnoughGpus(
                    f"{missing} GPUs are missing to serve {release} beside what is served: "
                    f"{pods} replicas need {gpus} each, and {room}",
                    hint="free some, raise the quota, or lower kserve.scaling.minimum; nothing was changed",
                )

        with contextlib.suppress(AccessDenied):
            for quota in self.cluster.list(QUOTAS)[0]:
                status, spec = quota.get("status", {}), quota.get("spec", {})
                hard = status.get("hard", spec.get("hard", {})).get(f"requests.{gpu}")
                if hard is not None and not spec.get("scopes") and not spec.get("scopeSelector"):  # it limits all pods
                    left = int(hard) - int(status.get("used", {}).get(f"requests.{gpu}", 0))
                    check(pods * gpus - left, f"the quota {quota['metadata']['name']} leaves {max(left, 0)}")
        with contextlib.suppress(AccessDenied):
            nodes = self.cluster.list(NODES)[0]
            if nodes and not any(label in node["metadata"].get("labels", {}) for node in nodes for label in POOLS):
                # Clusters may add a toleration for the taint that is called like the resource.
                tolerations = [toleration.model_dump() for toleration in (Toleration(key=gpu), *settings.tolerations)]
                pod = {"nodeSelector": settings.node_selector, "tolerations": tolerations}
                matching = [node for node in nodes if admits(node, pod)]
                left_on = [left for amounts in free(self.cluster, matching, [gpu]) if (left := int(amounts[gpu])) > 0]
                listed = ", ".join(map(str, left_on)) or "none"
                missing = (pods - sum(left // gpus for left in left_on)) * gpus
                check(missing, f"the {len(left_on)} nodes that match have {listed} free")

    def kill(self, release: str) -> Callable[[], bool]:
        """See ``Target``. There is no grace period: Services drop the pod at once, its node kills it within seconds."""
        if not (ready := self.ready_names(release)):
            raise TransientError(f"{release} has no pod that is ready")
        try:
            with contextlib.suppress(Absent):  # an earlier try of this very call deleted it, and its answer was lost
                self.cluster.delete(PODS, ready[0], self.endpoint.namespace, grace_s=0)
        except AccessDenied as error:
            hint = f"a role with the verb delete on pods in the namespace {self.endpoint.namespace}"
            raise AccessDenied(str(error), hint=hint) from error
        return lambda: len(self.ready_names(release)) >= len(ready)

    def last_start(self, release: str) -> tuple[float | None, str]:
        """See ``Target``; the log of a pod may be read by those who have the right to it."""
        begun = [
            (status.get("state", {}).get("running", {}).get("startedAt", ""), pod["metadata"]["name"], status["name"])
            for pod in self.of(release)
            for status in _statuses(pod)
            if status["name"] in SERVERS
        ]
        (at, pod, container), log = max(begun, default=("", "", "")), list[str]()
        with contextlib.suppress(AccessDenied, Absent):
            log += self.cluster.logs(pod, self.endpoint.namespace, container=container)
        return datetime.fromisoformat(at).timestamp() if at else None, "".join(log)

    def running(self, release: str) -> tuple[int, int]:
        """Count those that were asked for and have not ended, and those of them that are ready."""
        pods = [pod for pod in self.of(release) if pod.get("status", {}).get("phase") not in ENDED]
        return len(pods), sum(condition(pod, "Ready") for pod in pods)

    def ready_names(self, release: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.of(release) if condition(pod, "Ready")]

    def _scrape(self, pods: list[Object], release: str) -> list[Sample]:
        last = self._last.setdefault(release, {})
        ready = [pod for pod in pods if condition(pod, "Ready")]
        if not ready and not last:
            raise TransientError(f"{release} has no pod that is ready")
        for pod in ready:
            name = pod["metadata"]["name"]
            servers = [container for container in pod["spec"]["containers"] if container["name"] in SERVERS]
            port = next((server["ports"][0]["containerPort"] for server in servers if server.get("ports")), PORT)
            last[f"{name} {_restarts(pod)}"] = samples_in(read_metrics(f"http://{pod['status']['podIP']}:{port}", name))
        return [sample for samples in last.values() for sample in samples]

    def _query_prometheus(self, address: str, release: str) -> list[Sample]:
        """Query the last value of each series, including those of pods that are gone."""
        names = "|".join(METRICS)
        query = f'last_over_time({{__name__=~"{names}",{selector(self.endpoint, release)}}}[{KEPT}])'
        try:
            reply = http().get(f"{address.rstrip('/')}/api/v1/query", params={"query": query}, timeout=HEALTH_TIMEOUT_S)
            samples = []
            for series in reply.raise_for_status().json()["data"]["result"]:
                labels = dict(series["metric"])
                samples.append(Sample(labels.pop("__name__"), labels, float(series["value"][1])))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise TransientError(f"Prometheus does not answer: {type(error).__name__}: {error}") from error
        if not samples:
            hint = "are manifests/monitoring and its PodMonitor applied?"
            raise TransientError(f"Prometheus has no series of {release}", hint=hint)
        return samples


def selector(endpoint: KServeEndpoint, release: str) -> str:
    """Select the series of one release; the last two labels come from the PodMonitor in ``manifests/monitoring``."""
    labels = {"namespace": endpoint.namespace, "slipway_endpoint": endpoint.name, "slipway_release": release}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def _revision(pod: Object) -> str | None:
    """Read the revision: a label or, of a LLMInferenceService's pods, an annotation."""
    metadata = pod["metadata"]
    revision: str | None = (metadata.get("labels", {}) | metadata.get("annotations", {})).get(REVISION)
    return revision


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _restarts(pod: Object) -> int:
    return sum(status.get("restartCount", 0) for status in _statuses(pod))


def _failure(pod: Object) -> str:
    """Why the pod will never start; empty if it may still come up."""
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("reason") in HOPELESS:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        end = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated", {})
        why = end.get("message") or end.get("reason") or "crashed"
        refused = end.get("exitCode") == NotTrusted.exit_code and StageFailure.parse(why, NotTrusted.exit_code)
        if refused and status["name"] == VERIFIER:
            return refused.message
        if waiting.get("reason") == "CrashLoopBackOff" and status.get("restartCount", 0) >= CRASHES:
            return f"it crashed {status['restartCount']} times: {' '.join(why.split())}"
    return ""


def _waiting(pod: Object) -> str:
    """Say what a pod waits for that is not ready; empty if nothing shows it."""
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("reason") in UNPULLED:
            return f"the image {status['image']} can't be pulled"
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {' '.join(waiting.get('message', '').split())}".rstrip(": ")
    for entry in pod.get("status", {}).get("conditions", []):
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return f"no node has room for it: {entry.get('message', '')}"
    return ""
