"""Plays KServe 0.21's controllers and a gateway: makes pods, Services and routes of InferenceServices, and says so.

Each Deployment has as many pods as its predictor's ``minReplicas``. One with an autoscaler of somebody else's is
made with one replica, and is an object whose ``spec.replicas`` others set (``keda``). A pod that somebody deletes is
taken out of its Service, killed, and replaced by another one; one too many is taken out and told to stop. A pod's
server is a real process (tests/stages/rollout/release_server.py), told how well to serve by the release that its
``storageUri`` names.

What KServe does (pkg/controller/v1beta1/inferenceservice) is done here in the same order: canaries first, the stable
predictor scaled to max(minReplicas − the canaries', 1), orphans removed before the route changes, no route before the
predictor was ready, a canary gets its weight once it is ready, ``canaryTrafficPercent`` is ignored in Standard mode,
``canaryStatuses`` repeats what was asked for, ``observedGeneration`` is a child's. What is there under the name of a
Deployment or HTTPRoute of its own is adopted and overwritten, whoever made it: that is ``contested``.

LLMInferenceServices are the part of ``tests/kubernetes/llm_services.py``.

With a ``gateway``, clients' requests really go where the routes say. An HTTPRoute's status is the word of the gateway's
controller: its proxy follows ``lag_s`` later. Knative says what its proxies do already. A pod that is removed gets no
new requests at once, and ends what it has begun: its preStop hook, then SIGTERM.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.kubernetes.api import KubernetesServer
from tests.kubernetes.gateway import Gateway, Routes
from tests.kubernetes.keda import Keda, read
from tests.kubernetes.knative import KnativeAutoscaler
from tests.kubernetes.llm_services import LLMServices
from tests.kubernetes.objects import Object, Refused, Resource

SERVER: Final = Path(__file__).parents[1] / "stages" / "rollout" / "release_server.py"
DNS_LABEL: Final = 63
"""Characters."""
TICK_S: Final = 0.05
ISVC_LABEL: Final = "serving.kserve.io/inferenceservice"
CLUSTER_LOCAL: Final = ("networking.kserve.io/visibility", "cluster-local")
NOT_ON_A_CANARY: Final = ("maxReplicas", "scaleTarget", "scaleMetric", "autoScaling", "workerSpec")
MODE: Final = "serving.kserve.io/deploymentMode"
AUTOSCALER: Final = "serving.kserve.io/autoscalerClass"
SERVICES: Final = ("InferenceService", "LLMInferenceService")
CRASHES: Final = 5
KNATIVE_DRAIN_S: Final = 2.0
"""Time of the queue-proxy from the end of new requests to the server's SIGTERM; 30 s in Knative."""


@dataclass
class Pod:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    restarts: int = 0
    ready: bool = False
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())


@dataclass
class Deployment:
    """What runs under one name: a Standard Deployment, or a Knative revision."""

    name: str
    owner: str
    release: str
    predictor: Object
    labels: dict[str, str]
    pods: list[Pod] = field(default_factory=list)
    made: int = 0
    """Pods so far."""
    service: str = ""
    """Its Service, where that is not called as it is."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Those of its pods."""
    container: str = "kserve-container"

    @property
    def backend(self) -> str:
        return self.service or self.name


@dataclass
class KServeController:
    """Acts on *server* from ``start`` to ``stop``. What goes wrong is set by a test at any time."""

    server: KubernetesServer
    releases: Path
    folder: Path
    mode: str = "Standard"
    version: str = "v0.21.0"
    gateway_api: bool = True
    gateway: Gateway | None = None
    lag_s: float = 0.1
    namespace: str = "default"
    log: str = ""
    """Of each container that serves."""
    refuses: str = ""
    """It makes nothing of any InferenceService, and names this as the reason."""
    gateway_stuck: bool = False
    """Routes are not programmed any more: their status stays as it is."""
    flickering: bool = False
    """The stable predictor counts as not ready, as on a slow load beyond 600 s."""
    crashing: set[str] = field(default_factory=set)
    """Releases whose container crashes at its start."""
    unpulled: set[str] = field(default_factory=set)
    """Releases whose image can't be pulled."""
    started: list[str] = field(default_factory=list)
    """Releases, once for each pod that was started."""
    contested: list[str] = field(default_factory=list)
    """Deployments, HTTPRoutes and HorizontalPodAutoscalers that two owners write: KServe takes what is there under its
    names for its own, and removes an autoscaler where its class is another one."""
    sent_into_the_void: list[str] = field(default_factory=list)
    """Services that clients' requests went to when their pods were removed."""
    deployments: dict[str, Deployment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keda = Keda(self.server, self.namespace)
        self.knative = KnativeAutoscaler()
        self._over = threading.Event()
        self._templates: dict[str, tuple[int, str]] = {}
        self._made: dict[tuple[str, str], Object] = {}
        self._followed: dict[str, Routes] = {}
        self._programmed: dict[str, tuple[float, Routes]] = {}
        self._ending: list[tuple[float, subprocess.Popen[bytes]]] = []
        server = self.server
        server.register(
            Resource(
                "serving.kserve.io/v1beta1", "InferenceService", "inferenceservices", status=True, check=self._webhook
            )
        )
        server.register(Resource("serving.knative.dev/v1", "Revision", "revisions", status=True))
        server.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kserve"}})
        self.configure()
        server.put(
            {
                "apiVersion": "serving.kserve.io/v1alpha1",
                "kind": "ServingRuntime",
                "metadata": {"name": "slipway-vllm", "namespace": self.namespace},
                "spec": {"containers": [{"name": "kserve-container"}]},
            }
        )
        self.llm = LLMServices(self)
        self._thread = threading.Thread(target=self._run, name="KServe", daemon=True)

    def configure(self) -> None:
        """KServe's ConfigMap and the Deployment of its controller, as this object's fields say."""
        ingress = {
            "enableGatewayApi": self.gateway_api,
            "kserveIngressGateway": "kserve/kserve-ingress-gateway",
            "ingressDomain": "example.com",
            "domainTemplate": "{{ .Name }}-{{ .Namespace }}.{{ .IngressDomain }}",
        }
        data = {"deploy": json.dumps({"defaultDeploymentMode": self.mode}), "ingress": json.dumps(ingress)}
        data["localModel"] = json.dumps({"enabled": True})
        place = {"namespace": "kserve"}
        self.server.put(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": place | {"name": "inferenceservice-config"},
                "data": data,
            }
        )
        image = f"docker.io/kserve/kserve-controller:{self.version}"
        pod = {"spec": {"containers": [{"name": "manager", "image": image}]}}
        self.server.put(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": place | {"name": "kserve-controller-manager"},
                "spec": {"template": pod},
            }
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """For good; may be called again."""
        self._over.set()
        self._thread.join()
        pods = [pod for each in self.deployments.values() for pod in each.pods]
        for process in [*(each.process for each in pods), *(each for _, each in self._ending)]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.deployments.clear()
        if self.gateway:
            self.gateway.stop()

    def crash(self, release: str) -> None:
        """Kill the release's servers once; their containers are started again in the same pods."""
        for each in self.deployments.values():
            for pod in each.pods if each.release == release else ():
                pod.process.kill()

    # KServe.

    def _run(self) -> None:
        while not self._over.is_set():
            for service in self.server.all("InferenceService"):
                with contextlib.suppress(Refused):  # it has changed meanwhile, and comes again
                    self._reconcile(service)
            self.llm.reconcile()
            owners = {each["metadata"]["name"] for kind in SERVICES for each in self.server.all(kind)}
            for each in list(self.deployments.values()):
                if each.owner not in owners:
                    self._remove(each)
            for route in self.server.all("HTTPRoute"):
                references = route["metadata"].get("ownerReferences", [])
                if {each["name"] for each in references if each["kind"] in SERVICES} - owners:
                    self._made.pop(("HTTPRoute", route["metadata"]["name"]), None)
                    self.server.remove("HTTPRoute", route["metadata"]["name"], self.namespace)
                elif not self.gateway_stuck:
                    self._program(route)
            self._follow()
            self._end_pods()
            self.keda.act()
            self.contested += self.keda.autoscalers & self.deployments.keys()
            self._over.wait(TICK_S)

    def _reconcile(self, service: Object) -> None:
        mode = service["metadata"].get("annotations", {}).get(MODE, self.mode)
        if mode in ("Knative", "Serverless"):
            self._reconcile_knative(service)
        else:
            self._reconcile_standard(service)

    def _reconcile_standard(self, service: Object) -> None:
        name, spec = service["metadata"]["name"], service["spec"]
        knows_canary = self.version not in ("v0.19.0", "v0.20.0")
        canaries = spec.get("canary") or [] if knows_canary else []
        made = [_deployment(name, each) for each in (spec["predictor"], *(each["predictor"] for each in canaries))]
        host = f"{max(made, key=len)}-{self.namespace}"
        if len(host) > DNS_LABEL or self.refuses:
            self.say("InferenceService", service, {"conditions": [_refused(self.refuses or host)]})
            return
        expected, statuses = [_deployment(name, spec["predictor"])], []
        for each in canaries:
            deployment = _deployment(name, each["predictor"])
            expected.append(deployment)
            ready = self.deployed(service, deployment, _overlaid(spec["predictor"], each["predictor"]))
            statuses.append(
                {"name": each["predictor"]["name"], "ready": ready, "trafficPercent": each["trafficPercent"]}
            )
        lowered = sum(each["predictor"].get("minReplicas", 1) for each in canaries)
        left = max(spec["predictor"].get("minReplicas", 1) - lowered, 1)
        ready = self.deployed(service, expected[0], spec["predictor"] | {"minReplicas": left}) and not self.flickering
        for each in [each for each in self.deployments.values() if each.owner == name and each.name not in expected]:
            self._remove(each)
        conditions = [_condition("PredictorReady", ready), _condition("Ready", ready)]
        if canaries:
            conditions.append(_condition("CanaryPredictorReady", all(each["ready"] for each in statuses)))
        status: Object = {"conditions": conditions, "observedGeneration": 1, "canaryStatuses": statuses}
        status["url"] = f"http://{name}-{self.namespace}.example.com"
        self.say("InferenceService", service, status)
        visible = service["metadata"].get("labels", {}).get(CLUSTER_LOCAL[0]) != CLUSTER_LOCAL[1]
        if ready and self.gateway_api and visible:
            self._route(service, statuses)

    def _route(self, service: Object, statuses: list[Object]) -> None:
        name, spec = service["metadata"]["name"], service["spec"]
        ready = {each["name"] for each in statuses if each["ready"]}
        parts = [
            (_deployment(name, each["predictor"]), each["trafficPercent"])
            for each in spec.get("canary") or []
            if each["predictor"]["name"] in ready
        ]
        parts.insert(0, (_deployment(name, spec["predictor"]), 100 - sum(percent for _, percent in parts)))
        backends = [{"kind": "Service", "name": each, "port": 80, "weight": percent} for each, percent in parts]
        for there in self.server.all("HTTPRoute", self.namespace):
            if there["metadata"]["name"] == name and not there["metadata"].get("ownerReferences"):
                self.contested.append(name)
        if len(backends) == 1:
            del backends[0]["weight"]
        self.put(
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "HTTPRoute",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": service["metadata"].get("labels", {}),
                    "annotations": service["metadata"].get("annotations", {}),
                    "ownerReferences": [{"kind": "InferenceService", "name": name}],
                },
                "spec": {
                    "parentRefs": [{"name": "kserve-ingress-gateway", "namespace": "kserve"}],
                    "hostnames": [f"{name}-{self.namespace}.example.com"],
                    "rules": [{"backendRefs": backends}],
                },
            }
        )

    def _program(self, route: Object) -> None:
        """The part of the gateway's controller."""
        generation = route["metadata"]["generation"]
        conditions = [
            _condition(name, True) | {"observedGeneration": generation} for name in ("Accepted", "ResolvedRefs")
        ]
        parents = [{"parentRef": route["spec"]["parentRefs"][0], "conditions": conditions}]
        weights = {each["name"]: each.get("weight", 1) for each in route["spec"]["rules"][0]["backendRefs"]}
        routes = dict.fromkeys(route["spec"]["hostnames"], weights)
        name = route["metadata"]["name"]
        if self._programmed.get(name, (0, {}))[1] != routes:
            self._programmed[name] = (time.monotonic() + self.lag_s, routes)
        with contextlib.suppress(Refused):
            self.say("HTTPRoute", route, {"parents": parents})

    def _follow(self) -> None:
        """The gateway's proxy does what its controller said a while ago, and what it knows of pods at once."""
        names = {each["metadata"]["name"] for kind in ("HTTPRoute", *SERVICES) for each in self.server.all(kind)}
        for name in self._programmed.keys() - names:
            del self._programmed[name]
            self._followed.pop(name, None)
        self._catch_up()

    def _in_force(self) -> Routes:
        """What the proxy does: of two routes for one host, the newer one counts. Gateways differ; no test may care."""
        found: Routes = {}
        for name in self._programmed:
            found |= self._followed.get(name, {})
        return found

    def _catch_up(self) -> None:
        """What is due is in force, however late this thread is."""
        for name, (when, routes) in self._programmed.items():
            if when <= time.monotonic():
                self._followed[name] = routes
        if self.gateway:
            ready = {each.backend: [pod.port for pod in each.pods if pod.ready] for each in self.deployments.values()}
            self.gateway.apply(self._in_force(), {name: ports for name, ports in ready.items() if ports})

    def _reconcile_knative(self, service: Object) -> None:
        name, wanted = service["metadata"]["name"], service["spec"]["predictor"]
        template = json.dumps({key: value for key, value in wanted.items() if key != "canaryTrafficPercent"})
        number, known = self._templates.get(name, (0, ""))
        if template != known:
            number += 1
            self._templates[name] = (number, template)
        created = f"{name}-predictor-{number:05d}"
        status = dict(service.get("status", {}).get("components", {}).get("predictor", {}))
        ready = created if self.deployed(service, created, wanted) else status.get("latestReadyRevision")
        rolled_out, percent = status.get("latestRolledoutRevision"), wanted.get("canaryTrafficPercent")
        traffic = []
        if percent is not None and rolled_out:
            traffic.append(self._target(ready, percent, "latest", latest=True))
            if percent < 100:
                traffic.append(self._target(rolled_out, 100 - percent, "prev", latest=False))
        elif ready:
            traffic.append(self._target(ready, 100, "latest", latest=True))
        if ready == created and traffic and traffic[0]["percent"] == 100 and not self.gateway_stuck:
            rolled_out = ready
        told = status.get("traffic", []) if self.gateway_stuck and percent else traffic
        status = {"latestCreatedRevision": created, "traffic": told}
        status |= {"latestReadyRevision": ready} if ready else {}
        status |= {"latestRolledoutRevision": rolled_out} if rolled_out else {}
        conditions = [_condition("Ready", ready == created), _condition("RoutesReady", bool(ready))]
        whole = {"conditions": conditions, "components": {"predictor": status}, "observedGeneration": 1}
        host = f"{name}.{self.namespace}.example.com"
        whole["url"] = f"http://{host}"
        weights = {each["revisionName"]: each["percent"] for each in told}
        self._programmed[name] = (0.0, {host: weights} if weights else {})
        self._follow()
        self.say("InferenceService", service, whole)
        kept = {created, *weights}
        for each in [each for each in self.deployments.values() if each.owner == name and each.name not in kept]:
            self._remove(each)

    def _target(self, revision: str | None, percent: int, tag: str, *, latest: bool) -> Object:
        deployment = self.deployments.get(revision or "")
        url = f"http://127.0.0.1:{deployment.pods[0].port}" if deployment else ""
        return {"revisionName": revision, "percent": percent, "tag": tag, "latestRevision": latest, "url": url}

    def say(self, kind: str, now: Object, status: Object) -> None:
        if now.get("status") != status:
            self.server.set_status(kind, self.namespace, now["metadata"]["name"], status)

    def put(self, body: Object) -> None:
        """Put *body*, unless the object is so already."""
        key = (body["kind"], body["metadata"]["name"])
        if self._made.get(key) != body:
            self.server.put(body, manager="kserve")
            self._made[key] = copy.deepcopy(body)

    # What runs.

    def deployed(self, service: Object, name: str, predictor: Object, behind: str = "") -> bool:
        """Whether all of its pods are ready; started anew if its template is another one.

        Args:
            behind: its Service, of a LLMInferenceService.
        """
        release = predictor["model"]["storageUri"].rpartition("/")[2]
        owner = service["metadata"]["name"]
        labels = {**service["metadata"].get("labels", {}), **predictor.get("labels", {}), ISVC_LABEL: owner}
        if behind:
            labels = {**predictor["labels"], "app.kubernetes.io/name": owner}
        marks = predictor.get("annotations", {}) if behind else {}
        now = self.deployments.get(name)
        if now and now.owner != owner:
            self.contested.append(name)
        if now and (now.labels, now.annotations) != (labels, marks):
            self._remove(now)
            now = None
        if now is None:
            now = self.deployments[name] = Deployment(name, owner, release, predictor, labels)
            now.service, now.annotations = behind, marks
            now.container = "main" if behind else now.container
        self._end_deleted(now)
        wanted = self._wanted(service, name, predictor)
        for each in now.pods[wanted:]:
            self._retire(now, each)
        while len(now.pods) < wanted:
            pod = f"{name}-{now.made}"
            now.pods.append(Pod(pod, *self._start(pod, release, predictor)))
            now.made += 1
            self.started.append(release)
        for each in now.pods:
            if each.process.poll() is not None and release not in self.crashing:
                each.process, each.port = self._start(each.name, release, predictor)
                each.restarts += 1
            each.ready = release not in self.crashing | self.unpulled and _healthy(each.port)
        self._show(now)
        return all(each.ready for each in now.pods)

    def _wanted(self, service: Object, name: str, predictor: Object) -> int:
        """The replicas of a Deployment."""
        if "scaleTarget" in predictor:
            pods = [
                each for each in self.server.all("Pod", self.namespace) if each["metadata"]["name"].startswith(name)
            ]
            load = sum(sum(read(each, "vllm:num_requests_running")) for each in pods)
            return self.knative.replicas(name, predictor, load)
        free = "template" in service["spec"] and "replicas" not in service["spec"]
        if not free and service["metadata"].get("annotations", {}).get(AUTOSCALER) != "external":
            return int(predictor.get("minReplicas", 1))
        try:
            found = self.server.find("Deployment", name, self.namespace)
        except Refused:
            metadata = {"name": name, "namespace": self.namespace}
            body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1}}
            found = self.server.put(body, manager="kserve")
        return int(found["spec"]["replicas"])

    def _end_deleted(self, deployment: Deployment) -> None:
        there = {each["metadata"]["name"] for each in self.server.all("Pod", self.namespace)}
        for pod in [each for each in deployment.pods if each.name not in there]:
            deployment.pods.remove(pod)
            self._made.pop(("Pod", pod.name), None)
            self._follow()
            pod.process.kill()
            pod.process.wait()

    def _retire(self, deployment: Deployment, pod: Pod) -> None:
        """Take a pod out of its Service, and let it end what it has begun."""
        deployment.pods.remove(pod)
        self._made.pop(("Pod", pod.name), None)
        self.server.remove("Pod", pod.name, self.namespace)
        self._follow()
        self._ending.append((time.monotonic() + _pre_stop_s(deployment.predictor), pod.process))

    def _start(self, name: str, release: str, predictor: Object) -> tuple[subprocess.Popen[bytes], int]:
        state = self.folder / f"{name}.json"
        state.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", str(SERVER), str(self.releases / release), str(state)]
        process = subprocess.Popen(
            [*command, _fingerprint(predictor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not state.exists():
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        return process, int(json.loads(state.read_text())["port"])

    def _show(self, deployment: Deployment) -> None:
        """Its pods, Service and, for a revision, the Revision."""
        place = {"namespace": self.namespace, "labels": deployment.labels}
        for each in deployment.pods:
            container: Object = {"name": deployment.container, "ports": [{"containerPort": each.port}]}
            running = {"running": {"startedAt": each.started_at}}
            said: Object = {"name": deployment.container, "restartCount": each.restarts, "state": running}
            self.server.logs[self.namespace, each.name] = self.log.splitlines()
            if deployment.release in self.crashing:
                said["restartCount"] = CRASHES
                said["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
                said["lastState"] = {"terminated": {"reason": "Error", "message": "CUDA out of memory"}}
            if deployment.release in self.unpulled:
                said["image"] = "localhost/x:1"
                said["state"] = {
                    "waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling "localhost/x:1"'}
                }
            ready = [_condition("Ready", each.ready)]
            metadata = place | {"name": each.name, "annotations": deployment.annotations}
            pod = {"metadata": metadata, "spec": {"containers": [container]}}
            status = {"podIP": "127.0.0.1", "phase": "Running", "conditions": ready, "containerStatuses": [said]}
            self.put({"apiVersion": "v1", "kind": "Pod", **pod, "status": status})
        if not deployment.pods:  # scaled to zero
            return
        ports = [{"name": "http", "port": deployment.pods[0].port, "targetPort": 8080}]
        service = {"metadata": place | {"name": deployment.backend}, "spec": {"clusterIP": "10.0.0.1", "ports": ports}}
        self.put({"apiVersion": "v1", "kind": "Service", **service})
        if deployment.name[-5:].isdigit():
            revision = {"metadata": place | {"name": deployment.name}, "spec": {}}
            self.put({"apiVersion": "serving.knative.dev/v1", "kind": "Revision", **revision})

    def _remove(self, deployment: Deployment) -> None:
        """A Deployment with its pods and Service. A Revision stays known."""
        self._catch_up()
        if any(weights.get(deployment.backend) for weights in self._in_force().values()):
            self.sent_into_the_void.append(deployment.name)
        own = (("Service", deployment.backend), ("Deployment", deployment.name))
        for kind, name in (*(("Pod", each.name) for each in deployment.pods), *own):
            self._made.pop((kind, name), None)
            with contextlib.suppress(Refused):
                self.server.remove(kind, name, self.namespace)
        del self.deployments[deployment.name]
        ends_s = time.monotonic() + _pre_stop_s(deployment.predictor)
        self._ending += [(ends_s, each.process) for each in deployment.pods]

    def _end_pods(self) -> None:
        """Those whose preStop hook has ended are told to stop, once."""
        for number, (when, process) in enumerate(self._ending):
            if when <= time.monotonic():
                process.terminate()
                self._ending[number] = (math.inf, process)

    # The validating webhook.

    def _webhook(self, each: Object) -> str:
        spec = each.get("spec", {})
        canaries = spec.get("canary") or []
        stable = spec.get("predictor", {})
        if canaries and each["metadata"].get("annotations", {}).get(MODE) != "Standard":
            return "canary is only supported in Standard deployment mode"
        for canary in canaries:
            predictor = canary.get("predictor", {})
            name = predictor.get("name", "")
            if canary.keys() - {"trafficPercent", "predictor"}:
                return f"spec.canary: unknown field {sorted(canary)}"
            if not 0 <= canary.get("trafficPercent", -1) <= 100:
                return f"canary {name} trafficPercent must be between 0 and 100"
            if not name or name == stable.get("name"):
                return f"canary predictor.name {name!r} conflicts with stable predictor name, or is missing"
            if predictor.get("model", {}).get("name") is None:
                return "spec.canary[0].predictor.model.name: Required value"
            if taken := [key for key in NOT_ON_A_CANARY if key in predictor]:
                return f"canary {name} must not set {taken[0]}"
            if predictor.get("minReplicas", 1) > stable.get("minReplicas", 1):
                return f"canary {name} minReplicas must not exceed stable predictor minReplicas"
        if sum(each["trafficPercent"] for each in canaries) > 100:
            return "sum of canary trafficPercent values must be <= 100"
        return _wrong(stable.get("model", {}))


def _wrong(model: Object) -> str:
    if any(variable["name"] == "PYTHONPATH" for variable in model.get("env", [])):
        return 'setting PYTHONPATH in container "" is not allowed for security reasons'
    return "" if model.get("storageUri") else "spec.predictor.model.storageUri: Required value"


def _deployment(name: str, predictor: Object) -> str:
    return f"{name}-{predictor['name']}-predictor" if predictor.get("name") else f"{name}-predictor"


def _fingerprint(predictor: Object) -> str:
    """What vLLM's answers carry as ``system_fingerprint``."""
    given = dict(itertools.pairwise(predictor["model"].get("args", [])))
    return str(given["--fingerprint-value"]) if given.get("--fingerprint-mode") == "custom" else "vllm-0.32.0"


def _pre_stop_s(predictor: Object) -> float:
    """How long a pod that is removed still serves before it is told to stop."""
    hook = predictor["model"].get("lifecycle", {}).get("preStop")
    return float(hook["exec"]["command"][1]) if hook else KNATIVE_DRAIN_S if "scaleMetric" in predictor else 0.0


def _overlaid(stable: Any, canary: Any) -> Any:
    """Merge as mergo.Merge does with override: mappings are merged, lists replaced, empty values change nothing."""
    if not isinstance(stable, dict) or not isinstance(canary, dict):
        return canary if canary not in ("", 0, None, [], {}, False) else stable
    return {key: _overlaid(stable.get(key), canary.get(key)) for key in {**stable, **canary}}


def _refused(what: str) -> Object:
    return {
        "type": "PredictorReady",
        "status": "False",
        "reason": "ReconcileFailed",
        "message": f'invalid domain name "{what}": must be no more than {DNS_LABEL} characters',
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def _condition(name: str, said: bool) -> Object:
    return {"type": name, "status": "True" if said else "False"}


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)  # cheaper than httpx, many times a second
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
