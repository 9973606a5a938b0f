"""Plays Argo's workflow controller: advances ``status.nodes`` of each Workflow as Argo 4.1 does, from a script.

Nothing is run. What each attempt of a task comes to is an ``Outcome``; without one it succeeds, with a value for each
output that its template promises. Node types, names, ids and messages are Argo's (workflow/controller/operator.go).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Self

from pipeline.local.manifest import RetryStrategy, substitute
from pipeline.runs import expressions
from pipeline.runs.graph import Graph
from pipeline.runs.state import FailedAttempt, Phase
from stages.parts.base.errors import SlipwayError
from stages.parts.base.program import StageFailure
from tests.kubernetes.api import KubernetesServer
from tests.kubernetes.objects import Object, Refused

STEP_S: Final = 0.01
"""Between two changes of a status; a retry's backoff takes as long, whatever the template says."""
TERMINATION_BYTES, LOG_LINES, LOG_BYTES = 4096, 80, 2048
"""How much the kubelet takes of a termination log, and of a log in its place."""
SHUTDOWN: Final = "Stopped with strategy '{}'"


@dataclass(frozen=True)
class Outcome:
    """What one attempt comes to. ``exit_code`` is None where Argo does not learn it."""

    phase: Phase = "Succeeded"
    exit_code: int | None = 0
    message: str = ""
    """Argo's own; empty where it follows from how the container ended."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    termination_log: str = ""
    """What the program wrote to /dev/termination-log."""
    reason: str = "Error"
    """The kubelet's, of a container that failed."""
    cached: bool = False
    until: threading.Event | None = None
    """It stays Running until this is set."""
    unpulled: str = ""
    """The image that can't be pulled: it stays Pending."""

    @classmethod
    def failed(cls, exit_code: int, message: str, hint: str = "") -> Self:
        """The stage program failed with a SlipwayError."""
        document = StageFailure(message=message, hint=hint, exit_code=exit_code).line()
        log = SlipwayError(message, hint=hint).render().splitlines()
        return cls("Failed", exit_code, log=tuple(log), termination_log=document)

    @classmethod
    def crashed(cls, exit_code: int, *log: str) -> Self:
        """The program ended without a word in its termination log."""
        return cls("Failed", exit_code, log=log)

    @classmethod
    def killed(cls) -> Self:
        """Somebody deleted the pod."""
        return cls("Error", None, "pod deleted")

    @classmethod
    def preempted(cls) -> Self:
        """Its node was taken away."""
        return cls("Failed", None, "Preempted by a pod with higher priority: node shutdown")

    @classmethod
    def out_of_memory(cls) -> Self:
        return cls("Failed", 137, reason="OOMKilled")

    def terminated(self) -> Object:
        """The container's end as the kubelet tells it, with the policy FallbackToLogsOnError."""
        message = self.termination_log.encode()[-TERMINATION_BYTES:].decode(errors="ignore")
        if not message and self.phase != "Succeeded" and self.reason == "Error":
            message = "\n".join(self.log[-LOG_LINES:]).encode()[-LOG_BYTES:].decode(errors="ignore")
        reason = "Completed" if self.phase == "Succeeded" else self.reason
        return {"exitCode": self.exit_code, "reason": reason, "message": message}

    def node_message(self) -> str:
        """Argo's message for the node (operator.go, ``inferFailedReason``)."""
        if self.message or self.phase == "Succeeded" or self.exit_code is None:
            return self.message
        end = self.terminated()
        said = f"{end['reason']} (exit code {end['exitCode']})"
        return f"{said}: {end['message']}" if end["message"] else said


class WorkflowController:
    """Acts on every Workflow that is created on *server* from now on."""

    def __init__(self, server: KubernetesServer, script: Mapping[str, Sequence[Outcome]] | None = None) -> None:
        self.server = server
        self.script = {task: list(outcomes) for task, outcomes in (script or {}).items()}
        """One outcome for each attempt of a task; the last one counts for all further ones."""
        self.held: dict[str, str] = {}
        """Mutexes by name, and who holds them. A test may hold one too."""
        self.lock = threading.Lock()
        self.paused = threading.Event()
        """While set, nothing moves."""
        server.on_change("Workflow", self._changed)

    def _changed(self, change: str, workflow: Object) -> None:
        if change == "ADDED":
            name = workflow["metadata"]["name"]
            threading.Thread(target=_Run(self, workflow).go, name=f"workflow {name}", daemon=True).start()

    def next_outcome(self, task: str) -> Outcome:
        outcomes = self.script.get(task, [Outcome()])
        return outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]


class _Gone(Exception):
    """The workflow was deleted, or the server ended."""


class _Run:
    def __init__(self, controller: WorkflowController, workflow: Object) -> None:
        self.controller, self.server = controller, controller.server
        self.name, self.namespace = workflow["metadata"]["name"], workflow["metadata"]["namespace"]
        self.workflow = workflow
        self.nodes: dict[str, Object] = {}
        self.status: Object = {"startedAt": _now(), "finishedAt": None, "phase": "", "nodes": self.nodes}
        self.exiting = False
        self.changing = threading.RLock()
        """Held by who changes the status: each task has a thread, and what one saves holds the others' nodes too."""

    def go(self) -> None:
        try:
            self._spec()
            self._wait_for_locks()
            try:
                self._complete()
            finally:
                with self.controller.lock:
                    for name in [name for name, holder in self.controller.held.items() if holder == self.name]:
                        del self.controller.held[name]
        except _Gone:
            return
        except Exception as error:  # a mistake here must not leave a test waiting
            self._finish("Error", f"{type(error).__name__}: {error}")
            raise

    def _spec(self) -> None:
        spec = self.workflow["spec"]
        reference = spec.get("workflowTemplateRef")
        if reference:
            try:
                template = self.server.find("WorkflowTemplate", reference["name"], self.namespace)
            except Refused as refusal:
                self._finish("Error", str(refusal))
                raise _Gone from refusal
            arguments = {each["name"]: each for each in template["spec"].get("arguments", {}).get("parameters", [])}
            given = {each["name"]: each for each in spec.get("arguments", {}).get("parameters", [])}
            spec = template["spec"] | {"arguments": {"parameters": list((arguments | given).values())}}
        self.spec = spec
        self.status["storedWorkflowTemplateSpec"] = spec
        self.templates = {each["name"]: each for each in spec["templates"]}
        self.values = {"workflow.name": self.name}
        for each in spec["arguments"]["parameters"]:
            if "value" not in each:
                self._finish("Failed", f"invalid spec: spec.arguments.{each['name']}.value or .valueFrom is required")
                raise _Gone
            self.values[f"workflow.parameters.{each['name']}"] = each["value"]

    def _wait_for_locks(self) -> None:
        wanted = [
            substitute(each["name"], self.values.__getitem__)
            for each in self.spec.get("synchronization", {}).get("mutexes", [])
        ]
        while not self._stopping():
            with self.controller.lock:
                busy = next((name for name in wanted if name in self.controller.held), None)
                if busy is None:
                    self.controller.held |= dict.fromkeys(wanted, self.name)
                    return
            message = f"Waiting for {self.namespace}/Mutex/{busy} lock. Lock status: 0/1"
            if self.status.get("message") != message:
                self._change(self.status, phase="Pending", message=message)
            time.sleep(STEP_S)

    def _complete(self) -> None:
        entry = self.templates[self.spec["entrypoint"]]
        self.status |= {"phase": "Running", "message": ""}
        self._node(self.name, self.name, "DAG", entry["name"], "Running")
        phase = self._dag(self.name, self.name, entry)
        self.values["workflow.status"] = phase
        on_exit, handler = self.spec.get("onExit"), f"{self.name}.onExit"
        if on_exit and self._stopping() != "Terminate":
            self.exiting = True
            template = self.templates[on_exit]
            if "dag" in template and self.server.find("Workflow", self.name, self.namespace)["spec"].get("shutdown"):
                self._node(handler, handler, "DAG", on_exit, "Failed")  # as Argo fails every DAG of a stopped run
            elif "dag" in template:
                self._node(handler, handler, "DAG", on_exit, "Running")
                self._dag(handler, handler, template)
            elif "steps" in template:
                self._steps(handler, template)
            else:
                self._attempts(handler, "onExit", template)
        stopped = str(self.server.find("Workflow", self.name, self.namespace)["spec"].get("shutdown", ""))
        self._finish(phase, SHUTDOWN.format(stopped) if stopped else "")

    def _steps(self, path: str, template: Object) -> Phase:
        """A Steps template to its end; unlike a DAG, it goes on in a run that is stopped, if the exit handler is it."""
        self._node(path, path, "Steps", template["name"], "Running")
        phase: Phase = "Succeeded"
        for number, group in enumerate(template["steps"]):
            phases = {}
            self._node(f"{path}[{number}]", f"[{number}]", "StepGroup", "", "Running")
            for step in group:
                found = self._attempts(
                    f"{path}[{number}].{step['name']}", step["name"], self.templates[step["template"]]
                )
                forgiven = step.get("continueOn", {}).get({"Failed": "failed", "Error": "error"}.get(found, ""), False)
                phases[step["name"]] = "Succeeded" if forgiven else found
            phase = next((each for each in phases.values() if each != "Succeeded"), "Succeeded")
            self._node(f"{path}[{number}]", f"[{number}]", "StepGroup", "", phase)
            if phase != "Succeeded":
                break
        self._node(path, path, "Steps", template["name"], phase)
        return phase

    def _dag(self, path: str, shown: str, template: Object) -> Phase:
        """A DAG template to its end, its tasks' nodes below *path*."""
        tasks = {each["name"]: each for each in template["dag"]["tasks"]}
        graph = Graph.of({name: each.get("depends", "") for name, each in tasks.items()})
        phases: dict[str, Phase] = {}
        threads: dict[str, threading.Thread] = {}
        while len(phases) < len(tasks):
            for name, task in tasks.items():
                if name in phases or name in threads:
                    continue
                may_run = graph.may_run(name, phases)
                if may_run is False or (may_run and self._stopping()):
                    phases[name] = self._never(path, task, "Omitted", "omitted: depends condition not met")
                elif may_run:
                    threads[name] = threading.Thread(target=self._task_safely, args=(path, task, phases), daemon=True)
                    threads[name].start()
            time.sleep(STEP_S)
            self._stopping()
        phase: Phase = "Failed" if graph.culprit(phases) or self._stopping() else "Succeeded"
        self._node(path, shown, "DAG", template["name"], phase)
        return phase

    def _task_safely(self, path: str, task: Object, phases: dict[str, Phase]) -> None:
        try:
            phases[task["name"]] = self._task(path, task)
        except Exception as error:
            phases[task["name"]] = "Error"
            if not isinstance(error, _Gone):
                raise

    def _task(self, path: str, task: Object) -> Phase:
        name, template = task["name"], self.templates[task["template"]]
        if task.get("when"):
            condition = substitute(task["when"], self.values.__getitem__)
            if not expressions.holds(expressions.parse(condition, "when"), str):
                return self._never(path, task, "Skipped", f"when '{condition}' evaluated false")
        if "suspend" in template:
            return self._suspend(f"{path}.{name}", task, template)
        if "dag" in template:
            return self._nested(f"{path}.{name}", name, template)
        return self._attempts(f"{path}.{name}", name, template)

    def _nested(self, path: str, name: str, template: Object) -> Phase:
        """A DAG within the DAG; it, and not a task in it, may come from the memo."""
        scripted = self.controller.script.get(name)
        node = self._node(path, name, "DAG", template["name"], "Running")
        if scripted and scripted[0].cached:
            hit = {"hit": True, "key": "key", "cacheName": "slipway-resolve"}
            found, phase = dict(scripted[0].outputs), "Succeeded"
            self._change(node, memoizationStatus=hit, phase=phase, finishedAt=_now())
        elif (phase := self._dag(path, name, template)) == "Succeeded":
            said = template["outputs"]["parameters"]
            found = {each["name"]: substitute(each["valueFrom"]["parameter"], self.values.__getitem__) for each in said}
        else:
            return "Failed"
        self._change(node, outputs={"parameters": [{"name": key, "value": value} for key, value in found.items()]})
        self.values |= {f"tasks.{name}.outputs.parameters.{key}": value for key, value in found.items()}
        return "Succeeded"

    def _suspend(self, path: str, task: Object, template: Object) -> Phase:
        """A Suspend node, until its phase in the workflow's status is set, which is how Argo is told to go on."""
        given = task.get("arguments", {}).get("parameters", [])
        told = [each | {"value": substitute(each["value"], self.values.__getitem__)} for each in given]
        node = self._node(path, task["name"], "Suspend", template["name"], "Running")
        self._change(node, inputs={"parameters": told})
        while not self._stopping():
            kept = self.server.find("Workflow", self.name, self.namespace)["status"]["nodes"][node["id"]]
            if kept["phase"] != "Running":
                self._change(node, **kept)
                return "Succeeded"
            time.sleep(STEP_S)
        self._change(node, phase="Failed", finishedAt=_now())
        return "Failed"

    def _never(self, path: str, task: Object, phase: Phase, message: str) -> Phase:
        node = self._node(f"{path}.{task['name']}", task["name"], "Skipped", task["template"], phase)
        self._change(node, message=message)
        return phase

    def _attempts(self, path: str, task: str, template: Object) -> Phase:
        """A Retry node with one Pod node for each attempt, or the Pod node alone."""
        retry = template.get("retryStrategy")
        shown = path if task == "onExit" else task
        parent = self._node(path, shown, "Retry", template["name"], "Running") if retry else None
        strategy = RetryStrategy.model_validate(retry) if retry else None
        number = 0
        while True:
            outcome = self.controller.next_outcome(task)
            child = self._node(
                f"{path}({number})" if parent else path,
                f"{shown}({number})" if parent else shown,
                "Pod",
                template["name"],
                "Pending",
            )
            if parent:
                with self.changing:
                    child["nodeFlag"] = {"retried": True}
                    parent.setdefault("children", []).append(child["id"])
                    parent["message"] = ""
            self._attempt(child, outcome, template)
            if parent is None:
                return child["phase"]
            number += 1
            code = -1 if outcome.exit_code is None else outcome.exit_code
            failure = FailedAttempt(phase=outcome.phase, message=child["message"], exit_code=code)
            failed = child["phase"] not in ("Succeeded",)
            if not failed or self._stopping() or not strategy or strategy.backoff_s(failure, number) is None:
                spent = strategy is not None and number > strategy.limit
                why = "No more retries left" if spent else "retryStrategy.expression evaluated to false"
                outputs = {"outputs": child["outputs"]} if "outputs" in child else {}
                message = why if failed else ""
                self._change(parent, phase=child["phase"], finishedAt=_now(), message=message, **outputs)
                return child["phase"]
            self._change(parent, message="Backoff for 5 seconds")
            time.sleep(STEP_S)

    def _attempt(self, node: Object, outcome: Outcome, template: Object) -> None:
        outputs = {
            each["name"]: f"{each['name']} of {node['displayName']}"
            for each in template.get("outputs", {}).get("parameters", [])
        }
        outputs |= outcome.outputs
        if outcome.cached:
            hit = {"hit": True, "key": "key", "cacheName": "slipway-resolve"}
            self._change(node, memoizationStatus=hit)
        else:
            self._pod(node, template, "Pending")
            self._save()
            while outcome.unpulled and not self._stopping():
                for message in ("ErrImagePull: failed to pull image", "ImagePullBackOff: Back-off pulling image"):
                    self._change(node, message=f'{message} "{outcome.unpulled}"')
            self._pod(node, template, "Running", outcome.log or (f"{node['displayName']} works",))
            self._change(node, phase="Running")
            while outcome.until and not outcome.until.is_set() and not self._stopping():
                time.sleep(STEP_S)
        held = outcome.unpulled or (outcome.until and not outcome.until.is_set())
        if (stopped := self._stopping()) and held:
            end: Object = {"phase": "Failed", "message": f"workflow shutdown with strategy:  {stopped}"}
        else:
            end = {"phase": outcome.phase, "message": outcome.node_message()}
            code = {} if outcome.exit_code is None else {"exitCode": str(outcome.exit_code)}
            made = [{"name": name, "value": value} for name, value in outputs.items()]
            end["outputs"] = code | ({"parameters": made} if outcome.phase == "Succeeded" or outcome.outputs else {})
            task = node["displayName"].partition("(")[0]
            self.values |= {f"tasks.{task}.outputs.parameters.{name}": value for name, value in outputs.items()}
        if not outcome.cached and end["message"] != "pod deleted":
            self._pod(node, template, "Succeeded" if end["phase"] == "Succeeded" else "Failed", ended=outcome)
        elif not outcome.cached:
            self.server.remove("Pod", self._pod_name(node, template), self.namespace)
        self._change(node, finishedAt=_now(), **end)

    def _pod(
        self, node: Object, template: Object, phase: str, log: Sequence[str] = (), *, ended: Outcome | None = None
    ) -> None:
        name = self._pod_name(node, template)
        containers = [{"name": "main", "state": {"terminated": ended.terminated()}}] if ended else []
        self.server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": {"workflows.argoproj.io/workflow": self.name},
                    "annotations": {
                        "workflows.argoproj.io/node-id": node["id"],
                        "workflows.argoproj.io/node-name": node["name"],
                    },
                },
                "spec": {"containers": [{"name": "main", "image": "slipway"}, {"name": "wait", "image": "argoexec"}]},
                "status": {"phase": phase, "containerStatuses": containers},
            },
            manager="workflow-controller",
        )
        if log:
            self.server.logs[self.namespace, name] = [
                f'time="{_now()}" level=info msg="capturing logs" argo=true',
                *log,
                f'time="{_now()}" level=info msg="sub-process exited" argo=true error="<nil>"',
            ]

    def _pod_name(self, node: Object, template: Object) -> str:
        return f"{self.name}-{template['name']}-{node['id'].rpartition('-')[2]}"

    def _node(self, path: str, shown: str, type_: str, template: str, phase: str) -> Object:
        with self.changing:
            id_ = self._id(path)
            node = self.nodes.setdefault(
                id_,
                {
                    "id": id_,
                    "name": path,
                    "displayName": shown,
                    "type": type_,
                    "templateName": template,
                    "boundaryID": self._id(re.sub(r"\[\d+\]$", "", path.rpartition(".")[0])),
                    "startedAt": _now(),
                    "finishedAt": None,
                    "message": "",
                },
            )
            node["phase"] = phase
            if type_ in ("DAG", "Steps", "StepGroup", "Skipped") and phase != "Running":
                node["finishedAt"] = _now()
        self._save()
        return node

    def _id(self, path: str) -> str:
        return self.name if path == self.name else f"{self.name}-{_fnv(path)}" if path else ""

    def _stopping(self) -> str:
        while self.controller.paused.is_set() and not self.server.stopped.is_set():
            time.sleep(STEP_S)
        if self.server.stopped.is_set():
            raise _Gone
        if self.exiting:  # the exit handler runs in spite of it
            return ""
        try:
            return str(self.server.find("Workflow", self.name, self.namespace)["spec"].get("shutdown", ""))
        except Refused as refusal:
            raise _Gone from refusal

    def _finish(self, phase: str, message: str) -> None:
        self._change(self.status, phase=phase, message=message, finishedAt=_now())

    def _change(self, part: Object, **changed: object) -> None:
        """Change a part of the status or of one of its nodes."""
        with self.changing:
            part |= changed
        self._save()

    def _save(self) -> None:
        if self.server.stopped.is_set():
            raise _Gone
        try:
            with self.changing:
                self.server.set_status(
                    "Workflow", self.namespace, self.name, self.status, manager="workflow-controller"
                )
        except Refused as refusal:  # it was deleted
            raise _Gone from refusal
        time.sleep(STEP_S)


def _fnv(text: str) -> int:
    """FNV-1a, 32 bit: how Argo names nodes."""
    digest = 0x811C9DC5
    for byte in text.encode():
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    return digest


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
