"""Runs on a cluster from submission to end: what is told meanwhile, and how each kind of failure ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.argo.engine import ArgoEngine, resubmit
from pipeline.argo.follow import follow
from pipeline.argo.runs import ClusterRun, find
from pipeline.argo.status import SUSPENDED
from pipeline.argo.template import submit
from pipeline.cluster.doctor import check_serving
from pipeline.runs.state import failure
from pipeline.workflow.definition import workflow_template
from stages.parts.base.errors import (
    AccessDenied,
    ClusterUnavailable,
    ConfigError,
    MissingRun,
    NotInstalled,
    UnknownName,
)
from stages.parts.base.formats import quantized_formats
from stages.parts.cluster.api import Cluster
from tests.kubernetes import KubernetesServer, Outcome, WorkflowController
from tests.pipeline.argo.argo_bench import Seen, connected


def started(cluster: Cluster, given: dict[str, str]) -> str:
    workflow, _ = submit(cluster, given)
    return str(workflow["metadata"]["name"])


def ended(cluster: Cluster, given: dict[str, str], seen: Seen) -> ClusterRun:
    return ClusterRun(cluster, follow(cluster, started(cluster, given), seen, patience_s=60.0))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def once_acquire_runs(seen: Seen, action: Callable[[], object]) -> None:
    """Do *action* in a thread of its own, while the run is followed here."""

    def act() -> None:
        until(lambda: ("Running", "") in seen.of("acquire"))
        action()

    threading.Thread(target=act).start()


def test_a_run_is_followed_task_by_task_to_its_winner(argo: WorkflowController, cluster, given, seen):
    argo.script["resolve"] = [Outcome(cached=True, outputs={"commit": "abc"})]
    selected = {"winner": "awq", "promotion": "promoted", "reason": "awq is best", "release": "1-awq"}
    argo.script["select"] = [Outcome(outputs=selected)]
    argo.script["serve"] = [Outcome(outputs={"url": "http://models.example"})]
    run = ended(cluster, given, seen)
    assert run.state.phase == "Succeeded"
    document = run.report().document
    assert (document["winner"], document["reason"], document["url"]) == ("awq", "awq is best", "http://models.example")
    assert [node.name for node in run.state.nodes][:2] == ["resolve", "acquire"]
    assert {node.phase for node in run.state.nodes} <= {"Succeeded", "Skipped"}
    assert run.state.node("onExit").phase == run.state.node("serve").phase == "Succeeded"
    assert seen.of("resolve")[-1] == ("Cached", "")
    assert seen.of("acquire")[-1] == ("Succeeded", "")
    assert seen.last == run.state
    assert argo.server.mistakes == []


def test_the_submitted_workflow_names_the_installed_template_and_carries_every_argument(argo, cluster, given):
    workflow = argo.server.find("Workflow", started(cluster, given))
    assert workflow["spec"]["workflowTemplateRef"] == {"name": "slipway"}
    parameters = {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}
    assert parameters == given


def test_a_stage_that_fails_gives_its_message_hint_and_exit_code(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome.failed(12, "org/name is gated", "ask for access")]
    run = ended(cluster, given, seen)
    error = failure(run.state)
    assert run.state.phase == "Failed"
    assert str(error) == "acquire: org/name is gated"
    assert error.hint.startswith("ask for access; slipway logs slipway-")
    assert error.exit_code == 12
    assert run.state.node("acquire").attempts == 1
    assert seen.of("select")[-1] == ("Omitted", "not started, because evaluate was not started")
    assert run.state.node("onExit").phase == "Succeeded"


UPLOAD_FAILED = Outcome("Error", 64, "Error (exit code 64): failed to put file: dial tcp: i/o timeout")


@pytest.fixture
def publishing(installed: KubernetesServer, config) -> None:
    cluster = config.platform.cluster.model_copy(update={"artifact_repository": "reports"})
    platform = config.platform.model_copy(update={"cluster": cluster})
    installed.put(workflow_template(config.model_copy(update={"platform": platform})))


@pytest.mark.usefixtures("publishing")
def test_a_report_that_cannot_be_kept_elsewhere_does_not_fail_the_run(argo, cluster, given, seen):
    argo.script["publish-report"] = [UPLOAD_FAILED]
    run = ended(cluster, given, seen)
    assert run.state.phase == run.state.node("onExit").phase == "Succeeded"
    publishing = run.state.node("onExit[1].publish-report")
    assert (publishing.phase, publishing.parent) == ("Error", "onExit")
    assert "i/o timeout" in publishing.message
    assert any("ending(0) works" in line for line in run.logs("onExit", follow=False))


@pytest.mark.usefixtures("publishing")
def test_the_report_of_a_stopped_run_is_kept_too(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    once_acquire_runs(seen, lambda: find(cluster, started(cluster, given)).stop())
    run = ended(cluster, given, seen)
    assert run.state.phase == "Failed"
    assert {run.state.node(f"onExit[{name}").phase for name in ("0].ending", "1].publish-report")} == {"Succeeded"}


def test_an_error_longer_than_a_termination_message_is_cut_and_keeps_its_hint(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome.failed(2, "é" * 5000, "write less")]
    node = ended(cluster, given, seen).state.node("acquire")
    assert node.message.startswith("éééé")
    assert node.message.endswith("é…")
    assert (node.hint, node.exit_code) == ("write less", 2)


def test_a_program_without_a_failure_document_is_explained_by_argos_message_and_its_log(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome.crashed(139, "loading", "Segmentation fault")]
    node = ended(cluster, given, seen).state.node("acquire")
    assert node.message == "Error (exit code 139): loading\nSegmentation fault"
    assert (node.hint, node.exit_code) == ("", 139)


def test_a_failed_variant_does_not_fail_the_run(argo, cluster, given, seen):
    argo.script["optimize-awq"] = [Outcome.failed(20, "this architecture is not known")]
    run = ended(cluster, given, seen)
    assert run.state.phase == "Succeeded"
    assert run.state.culprit is None
    assert run.state.node("optimize-awq").message == "this architecture is not known"


def test_a_variant_that_is_not_made_says_why(argo, cluster, given, seen):
    why = "vLLM's CPU build has no 4-bit kernel for processors without AVX-512"
    made = dict.fromkeys(quantized_formats(), "false") | {"gptq": "true", "fetch": "false"}
    outputs = {**made, "variants": "fp16,gptq", "left-out": f"awq: {why}"}
    argo.script["check"] = [Outcome(outputs=outputs)]
    state = ended(cluster, given, seen).state
    assert state.phase == "Succeeded"
    assert state.message_of(state.node("optimize-awq")) == f"left out: {why}"
    assert state.message_of(state.node("optimize-int8")) == "not among optimize.variants"
    assert state.message_of(state.node("optimize-gptq")) == ""


@pytest.mark.parametrize("outcome", [Outcome.killed(), Outcome.preempted(), Outcome.failed(75, "busy")])
def test_a_pod_that_is_killed_preempted_or_ends_with_75_is_retried(argo, cluster, given, seen, outcome):
    argo.script["optimize-awq"] = [outcome, Outcome()]
    run = ended(cluster, given, seen)
    assert run.state.phase == "Succeeded"
    (failure,) = run.state.node("optimize-awq").retried
    assert failure.exit_code == (-1 if outcome.exit_code is None else outcome.exit_code)
    assert outcome.exit_code != 75 or failure.message == "busy"
    assert run.state.node("optimize-awq").attempts == 2
    waiting = [message for phase, message in seen.of("optimize-awq") if phase == "Running" and message]
    assert any("Backoff" in message for message in waiting)


def test_a_pod_that_is_preempted_too_often_fails_the_run_with_the_reason(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome.preempted()]
    run = ended(cluster, given, seen)
    error = failure(run.state)
    assert run.state.node("acquire").attempts == 3
    assert "Preempted" in str(error)
    assert error.exit_code == 1


def test_out_of_memory_is_not_retried_and_says_what_to_do(argo, cluster, given, seen):
    argo.script["optimize-fp16"] = [Outcome.out_of_memory()]
    run = ended(cluster, given, seen)
    error = failure(run.state)
    assert run.state.node("optimize-fp16").attempts == 1
    assert error.exit_code == 137
    assert str(error) == "optimize-fp16: OOMKilled (exit code 137)"
    assert "more memory" in error.hint


def test_a_queued_run_is_pending_with_the_reason(argo, cluster, given, seen):
    argo.held["model-org--name"] = "another run"
    name = started(cluster, given)
    results: list[ClusterRun] = []
    thread = threading.Thread(target=lambda: results.append(ClusterRun(cluster, follow(cluster, name, seen))))
    thread.start()
    until(lambda: any("Mutex/model-org--name" in message for _, message in seen.runs))
    assert seen.runs[-1] == ("Pending", "Waiting for default/Mutex/model-org--name lock. Lock status: 0/1")
    assert not results
    del argo.held["model-org--name"]
    thread.join(timeout=60)
    assert results[0].state.phase == "Succeeded"


def test_a_lost_connection_is_survived(argo, cluster, given, seen):
    go_on = threading.Event()
    argo.script["acquire"] = [Outcome(until=go_on)]
    name = started(cluster, given)
    results: list[ClusterRun] = []
    thread = threading.Thread(
        target=lambda: results.append(ClusterRun(cluster, follow(cluster, name, seen, patience_s=30.0)))
    )
    thread.start()
    until(lambda: ("Running", "") in seen.of("acquire"))
    argo.server.stop()
    go_on.set()
    until(lambda: any("does not answer" in message for _, message in seen.runs))
    argo.server.start()
    thread.join(timeout=60)
    assert results[0].state.phase == "Succeeded"
    assert seen.of("acquire")[-1] == ("Succeeded", "")


def test_an_api_that_never_comes_back_ends_the_command_but_not_the_run(argo, tmp_path: Path, given, seen):
    cluster = connected(argo.server, tmp_path, patience_s=0.5)
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    name = started(cluster, given)
    once_acquire_runs(seen, argo.server.stop)
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        follow(cluster, name, seen, patience_s=0.5)
    assert argo.server.find("Workflow", name)["status"]["phase"] == "Running"


def test_after_an_expired_watch_the_workflow_is_listed_again(argo, cluster, given, seen):
    go_on = threading.Event()
    argo.script["acquire"] = [Outcome(until=go_on)]
    name = started(cluster, given)
    results: list[ClusterRun] = []
    thread = threading.Thread(target=lambda: results.append(ClusterRun(cluster, follow(cluster, name, seen))))
    thread.start()
    until(lambda: ("Running", "") in seen.of("acquire"))
    lists = len(argo.server.requests_for("list", "*/workflows"))
    argo.server.expire_watches()
    go_on.set()
    thread.join(timeout=60)
    assert results[0].state.phase == "Succeeded"
    assert len(argo.server.requests_for("list", "*/workflows")) > lists


def test_throttling_is_respected(argo, cluster, given, seen):
    argo.server.fail("create", "*/workflows", 429, retry_after=1)
    argo.server.fail("list", "*/workflows", 429, retry_after=1)
    before = time.monotonic()
    run = ended(cluster, given, seen)
    assert run.state.phase == "Succeeded"
    assert time.monotonic() - before >= 2
    assert len(argo.server.requests_for("create", "*/workflows")) == 2


def test_a_busy_api_while_following_is_survived(argo, cluster, given, seen):
    argo.server.fail("watch", "*/workflows", 503, times=2)
    assert ended(cluster, given, seen).state.phase == "Succeeded"
    assert len(argo.server.requests_for("watch", "*/workflows")) >= 3


def test_a_deleted_workflow_is_reported(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    name = started(cluster, given)
    once_acquire_runs(seen, lambda: argo.server.remove("Workflow", name))
    with pytest.raises(MissingRun, match="deleted"):
        follow(cluster, name, seen)


def test_the_same_run_is_not_started_twice(argo, cluster, given):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    first, new = submit(cluster, given)
    assert new
    second, new = submit(cluster, given | {"resolve-key": "of --refresh"})
    assert not new
    assert second["metadata"]["name"] == first["metadata"]["name"]
    assert len(argo.server.all("Workflow")) == 1


def test_force_starts_another_one_and_so_does_another_argument(argo, cluster, given):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    names = {started(cluster, given), submit(cluster, given, force=True)[0]["metadata"]["name"]}
    names.add(started(cluster, given | {"revision": "v2"}))
    assert len(names) == 3


def test_an_ended_run_is_started_again_under_a_new_name(argo, cluster, given, seen):
    first = ended(cluster, given, seen)
    second, new = submit(cluster, given)
    assert new
    assert second["metadata"]["name"] == first.id.removesuffix("-1") + "-2"


def test_a_lost_response_to_the_submission_creates_no_second_workflow(argo, cluster, given):
    argo.server.lose_answer("create", "*/workflows")
    workflow, new = submit(cluster, given)
    assert new
    assert [each["metadata"]["name"] for each in argo.server.all("Workflow")] == [workflow["metadata"]["name"]]
    assert len(argo.server.requests_for("create", "*/workflows")) == 2


def test_a_run_whose_image_can_not_be_pulled_is_stopped(argo, cluster, given, monkeypatch):
    monkeypatch.setattr("pipeline.argo.follow.UNPULLED_S", 0.3)
    argo.script["acquire"] = [Outcome(unpulled="localhost/x:1")]
    name, began = started(cluster, given), time.monotonic()
    with pytest.raises(NotInstalled, match="acquire: the image localhost/x:1 can't be pulled, for 0 minutes") as raised:
        ArgoEngine(cluster, check_serving).result(find(cluster, name))
    assert "the nodes may pull it" in raised.value.hint
    assert time.monotonic() - began > 0.3
    until(lambda: find(cluster, name).state.phase == "Failed")
    assert argo.server.find("Workflow", name)["spec"]["shutdown"] == "Stop"


def test_many_simultaneous_submitters_create_one_run_and_all_follow_it(argo, tmp_path, given):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    results: list[tuple[str, bool]] = []
    together = threading.Barrier(4, timeout=60)

    def one(cluster: Cluster) -> None:
        together.wait()
        workflow, new = submit(cluster, given)
        results.append((workflow["metadata"]["name"], new))

    clusters = [connected(argo.server, tmp_path, patience_s=5.0) for _ in range(4)]
    threads = [threading.Thread(target=one, args=(cluster,)) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 4
    assert len({name for name, _ in results}) == 1
    assert [new for _, new in results].count(True) == 1


def test_a_forbidden_submission_is_reported_and_starts_nothing(argo, cluster, given):
    argo.server.forbidden.add(("create", "workflows"))
    with pytest.raises(AccessDenied, match=r"cannot create resource .workflows.") as refused:
        submit(cluster, given)
    assert "slipway doctor --engine argo" in refused.value.hint
    assert argo.server.all("Workflow") == []


def test_a_login_that_is_not_accepted_is_reported(argo, tmp_path, given):
    with pytest.raises(AccessDenied, match="does not accept this login"):
        submit(connected(argo.server, tmp_path, patience_s=5.0, token="wrong"), given)


def test_without_the_template_or_argo_it_says_what_to_install(server: KubernetesServer, cluster, tmp_path, given):
    with pytest.raises(NotInstalled, match="template slipway is not installed") as missing:
        submit(cluster, given)
    assert "slipway install" in missing.value.hint
    for plural in ("workflows", "workflowtemplates", "cronworkflows", "eventsources", "eventbus", "sensors"):
        server.unregister("argoproj.io/v1alpha1", plural)
    with pytest.raises(NotInstalled, match="has no kind WorkflowTemplate") as missing:
        submit(connected(server, tmp_path, patience_s=5.0), given)
    assert "Argo Workflows 3.6" in missing.value.hint


def test_another_versions_template_is_refused(argo, cluster, given):
    template = argo.server.find("WorkflowTemplate", "slipway")
    parameters = template["spec"]["arguments"]["parameters"]
    template["spec"]["arguments"]["parameters"] = [each for each in parameters if each["name"] != "workload"]
    argo.server.put(template)
    with pytest.raises(NotInstalled, match="no parameter workload"):
        submit(cluster, given)


def test_a_stopped_run_ends_with_its_report(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    name = started(cluster, given)
    once_acquire_runs(seen, lambda: find(cluster, name).stop())
    run = ClusterRun(cluster, follow(cluster, name, seen))
    assert run.state.phase == "Failed"
    assert run.state.message == "Stopped with strategy 'Stop'"
    assert run.state.node("onExit").phase == "Succeeded"
    assert run.stop() is False


def test_a_run_that_waits_for_an_approval_goes_on_once_it_is_given(argo, cluster, given, seen):
    argo.script["canary-90"] = [Outcome(outputs={"said": "2-awq at 90 %; as good as 1-fp16"})]
    name = started(cluster, given | {"approval": "true"})

    def approve() -> None:
        until(lambda: ("Running", f"2-awq at 90 %; as good as 1-fp16; {SUSPENDED}") in seen.of("approve"))
        with pytest.raises(UnknownName):
            find(cluster, name).resume("acquire")
        assert find(cluster, name).resume() == ["approve"]

    threading.Thread(target=approve).start()
    run = ClusterRun(cluster, follow(cluster, name, seen, patience_s=60.0))
    assert run.state.phase == "Succeeded"
    assert run.state.node("approve").phase == "Succeeded"
    with pytest.raises(MissingRun, match="not running"):
        run.resume()


def test_a_release_without_one_to_compare_with_costs_no_pods_in_between(argo, cluster, given, seen):
    argo.script["deploy"] = [Outcome(outputs={"compared": "false"})]
    run = ended(cluster, given | {"approval": "true"}, seen)
    phases = {node.name: node.phase for node in run.state.nodes}
    assert (run.state.phase, phases["deploy"], phases["serve"]) == ("Succeeded", "Succeeded", "Succeeded")
    assert phases["canary-10"] == "Skipped"
    assert {phases[name] for name in ("canary-50", "canary-90", "approve", "canary-100")} == {"Omitted"}


def test_without_serving_nothing_is_rolled_out(argo, cluster, given, seen):
    run = ended(cluster, given | {"serve": "false"}, seen)
    phases = {node.name: node.phase for node in run.state.nodes}
    assert (run.state.phase, phases["select"]) == ("Succeeded", "Succeeded")
    names = ("deploy", "canary-10", "canary-50", "canary-90", "approve", "canary-100", "serve")
    assert [phases[name] for name in names] == ["Skipped", *["Omitted"] * 6]


@pytest.mark.parametrize("promotion", ["kept", "equivalent"])
def test_a_winner_that_is_not_better_than_what_serves_is_not_rolled_out(argo, cluster, given, seen, promotion):
    argo.script["select"] = [Outcome(outputs={"outcome": "decided", "promotion": promotion})]
    run = ended(cluster, given, seen)
    phases = {node.name: node.phase for node in run.state.nodes}
    assert (run.state.phase, phases["select"], phases["deploy"]) == ("Succeeded", "Succeeded", "Skipped")
    assert {phases[name] for name in ("canary-10", "approve", "canary-100", "serve")} == {"Omitted"}
    assert run.outcome == f"decided, {promotion}"
    assert run.report().document["promotion"] == promotion


def test_a_step_that_fails_ends_the_rollout(argo, cluster, given, seen):
    argo.script["canary-50"] = [Outcome.failed(43, "2-awq was rolled back: it is slower")]
    run = ended(cluster, given, seen)
    assert (run.state.phase, run.state.culprit) == ("Failed", "canary-50")
    assert run.state.node("serve").phase == "Omitted"


def test_a_retried_run_has_the_same_arguments(argo, cluster, given, seen):
    argo.script["acquire"] = [Outcome.failed(15, "the volume is full"), Outcome()]
    run = ended(cluster, given, seen)
    workflow, new = resubmit(run)
    assert new
    assert ClusterRun(cluster, workflow).state.arguments == given
    assert ClusterRun(cluster, follow(cluster, workflow["metadata"]["name"], seen)).state.phase == "Succeeded"


@pytest.mark.parametrize("triggered", [False, True])
def test_a_retried_run_may_go_on_without_a_variant(argo, cluster, given, seen, triggered):
    """A trigger gives few arguments: the others are the installed template's."""
    argo.script["acquire"] = [Outcome.failed(15, "the volume is full"), Outcome()]
    asked = {name: value for name, value in given.items() if name != "optimize" or not triggered}
    run = ended(cluster, asked, seen)
    workflow, _ = resubmit(run, allow_incomplete=True)
    retried = ClusterRun(cluster, workflow).state.arguments
    assert json.loads(retried.pop("optimize")) == json.loads(given["optimize"]) | {"allow_incomplete": True}
    assert retried == {name: value for name, value in given.items() if name != "optimize"}


def test_a_change_by_another_client_in_between_is_a_conflict(argo, cluster, given):
    from stages.parts.base.errors import Conflict
    from stages.parts.cluster.kinds import WORKFLOWS

    name = started(cluster, given)
    change = {"metadata": {"resourceVersion": "1"}, "spec": {"shutdown": "Stop"}}
    with pytest.raises(Conflict, match="has been modified"):
        cluster.merge(WORKFLOWS, name, change)


def test_logs_are_read_from_every_attempt(argo, cluster, given, seen):
    argo.script["optimize-awq"] = [Outcome.failed(75, "busy"), Outcome(log=("quantized",))]
    run = ended(cluster, given, seen)
    text = "".join(run.logs("optimize-awq", follow=False))
    assert text == "error: busy\n\n--- attempt 2 ---\nquantized\n"
    assert "optimize-awq: quantized\n" in list(run.logs(None, follow=False))
    with pytest.raises(UnknownName, match="reslove"):
        next(run.logs("reslove", follow=False))
    with pytest.raises(ConfigError, match="one task at a time"):
        next(run.logs(None, follow=True))


def test_followed_logs_continue_after_a_lost_connection_without_repetition(argo, cluster, given):
    go_on = threading.Event()
    argo.script["acquire"] = [Outcome(until=go_on, log=("one",))]
    run = find(cluster, started(cluster, given))
    lines: list[str] = []
    until(lambda: find(cluster, run.id).state.nodes)
    thread = threading.Thread(target=lambda: lines.extend(find(cluster, run.id).logs("acquire", follow=True)))
    thread.start()
    until(lambda: lines == ["one\n"])
    (pod,) = [name for _, name in argo.server.logs if "-acquire-" in name]
    argo.server.cut_watches()
    until(lambda: len(argo.server.requests_for("get", "*/log")) >= 2)
    argo.server.logs["default", pod].append("two")
    go_on.set()
    thread.join(timeout=60)
    assert lines == ["one\n", "two\n"]


def test_logs_of_pods_that_are_gone_say_so(argo, cluster, given, seen):
    run = ended(cluster, given, seen)
    for pod in argo.server.all("Pod"):
        argo.server.remove("Pod", pod["metadata"]["name"])
    with pytest.raises(MissingRun, match="its pods are gone") as gone:
        list(run.logs("acquire", follow=False))
    assert gone.value.hint.endswith(f"org--name/runs/{run.id}/logs")


@pytest.mark.parametrize(
    "line",
    [
        'time="2026-11-22T10:00:00.123Z" level=info msg="capturing logs" argo=true',
        "time=2026-11-22T10:00:00.123Z level=INFO msg=saving argo=true",
        '{"argo":true,"level":"info","msg":"capturing logs","time":"2026-11-22T10:00:00.123Z"}',
    ],
)
def test_lines_of_argos_executor_are_left_out_of_logs(argo, cluster, given, seen, line):
    argo.script["acquire"] = [Outcome(log=("time=2026-11-22 is printed", line, "level=info argo=false"))]
    run = ended(cluster, given, seen)
    own = ["time=2026-11-22 is printed\n", "level=info argo=false\n"]
    assert list(run.logs("acquire", follow=False)) == own
    assert list(run.logs("acquire", follow=True)) == own


def test_a_run_is_found_by_the_beginning_of_its_name(argo, cluster, given, seen):
    run = ended(cluster, given, seen)
    assert find(cluster, "latest").id == find(cluster, run.id[:15]).id == run.id
    with pytest.raises(MissingRun, match="'nothing' is not a run in namespace default") as missing:
        find(cluster, "nothing")
    assert run.id in missing.value.hint
