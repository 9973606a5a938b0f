"""What a team does with a cluster, in this order, on the cluster of KUBECONFIG (``make test-cluster``).

Each test goes on where the one before it ended. Argo's controller, the scheduler and, where it is, KServe's controller
are the real ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from pipeline.argo.runs import ClusterRun
from pipeline.argo.status import arguments_of
from pipeline.cluster.doctor import check_cluster
from pipeline.events.push import Push
from pipeline.runs.tables import Finding
from pipeline.settings.config import load
from stages.parts.base.errors import ModelNotFound
from stages.parts.cluster.kinds import CLAIMS, DEFINITIONS, NAMESPACES, PODS, SERVICES, WORKFLOWS, Kind
from stages.rollout.kserve.applied import HTTP_ROUTES
from stages.rollout.kserve.detect import CRD
from stages.rollout.kserve.objects import ENDPOINT, ISVCS, RELEASE, endpoint_name
from tests.cluster import pushes
from tests.cluster.bucket import Bucket
from tests.cluster.conftest import LIMITS, OTHER_MODEL, VERSIONS, Place, Tell, there
from tests.demo import DEMO, MODEL
from tests.flawed_models import REFUSE, slow_down, when_asked

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
]
GATEWAYS = Kind("gateway.networking.k8s.io/v1", "Gateway", "gateways")
OURS = "app.kubernetes.io/part-of=slipway"
COMPONENT = "app.kubernetes.io/component"


EVENTS = "sensors.argoproj.io"
UPGRADE = "SLIPWAY_TEST_UPGRADE"
UNDERNEATH = ("Kubernetes", "Argo Workflows", "KServe")
SMALLEST = ("--set", "profile.weights={quality: 0.01, latency: 0.01, throughput: 0.01, memory: 0.97}")
"""Weights by which int8 is the winner."""
COPIES = ("--set", "rollout.mirror={percent: 100, duration_s: 60}")
ANSWERED = "vllm:request_success_total"
NO_ANSWER = 0
SHARED_HOST = "models.example.com"
QUESTION = "What is a list?"
OTHER_QUESTION = "a question that one template refuses"


class Clients:
    """They ask the endpoint through the gateway, one request after another."""

    def __init__(self, place: Place) -> None:
        routes, _ = place.cluster.list(HTTP_ROUTES, labels=OURS)
        route = next(each for each in routes if each["metadata"]["name"].endswith("-route"))
        gateway = place.cluster.get(GATEWAYS, "kserve-ingress-gateway", "kserve")["status"]["addresses"][0]["value"]
        self.host, self.base = {"Host": route["spec"]["hostnames"][0]}, f"http://{gateway}"
        self.statuses: list[int] = []
        self.releases: list[str] = []
        """Which release gave each answer, as it says itself."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go)

    def ask(self, question: str = QUESTION) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 8}
        return httpx.post(f"{self.base}/v1/chat/completions", json=body, headers=self.host, timeout=120)

    def _go(self) -> None:
        for question in itertools.cycle((QUESTION, OTHER_QUESTION)):
            if self._over.wait(0.5):
                return
            try:
                answer = self.ask(question)
            except httpx.HTTPError:
                self.statuses.append(NO_ANSWER)
                continue
            self.statuses.append(answer.status_code)
            if answer.is_success:
                self.releases.append(answer.json()["system_fingerprint"])

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def kserve(place: Place) -> None:
    if not there(place.cluster, DEFINITIONS, CRD):
        pytest.skip("needs KServe")


def pods(place: Place, run: str, stage: str, phase: str = "Running") -> list[str]:
    labels = f"workflows.argoproj.io/workflow={run},{COMPONENT}={stage}"
    found, _ = place.cluster.list(PODS, labels=labels)
    return [each["metadata"]["name"] for each in found if each.get("status", {}).get("phase") == phase]


def installed_anew(place: Place) -> None:
    """Install another template, as an upgrade does."""
    platform = place.folder / "platform.yaml"
    told = yaml.safe_load(platform.read_text())
    told["retries"]["limit"] += 1
    platform.write_text(yaml.safe_dump(told))
    changed = {each["name"] for each in place.answer("install") if each["state"] == "changed"}
    assert "slipway" in changed, changed


def shared_host(place: Place) -> tuple[str, ...]:
    """The settings of the address of all models, which asks the Gateway at its Service."""
    owner = "gateway.envoyproxy.io/owning-gateway-name=kserve-ingress-gateway"
    (proxies,), _ = place.cluster.list(SERVICES, labels=owner, everywhere=True)
    metadata = proxies["metadata"]
    through = f"{metadata['name']}.{metadata['namespace']}.svc.cluster.local:{proxies['spec']['ports'][0]['port']}"
    return "--set", f"kserve.shared_host={SHARED_HOST}", "--set", f"kserve.shared_through={through}"


@contextlib.contextmanager
def repository(place: Place, address: str) -> Iterator[Bucket]:
    """A bucket that is the default artifact repository of the namespace."""
    with Bucket(address) as bucket:
        objects = bucket.objects(place.namespace)
        kinds = [place.cluster.kind(each["apiVersion"], each["kind"]) for each in objects]
        for kind, each in zip(kinds, objects, strict=True):
            place.cluster.apply(kind, each)
        place.answer("install")
        yield bucket
        for kind, each in zip(kinds, objects, strict=True):
            place.cluster.delete(kind, each["metadata"]["name"])
        place.answer("install")


def seconds(run: ClusterRun) -> str:
    return f"{run.state.seconds or 0:.0f} s"


def answered(place: Place, release: str) -> int:
    """Count what a release's pod has answered, by vLLM's own counter."""
    (pod,), _ = place.cluster.list(PODS, labels=f"{RELEASE}={release}")
    told = httpx.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=30).text
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in told.splitlines() if line.startswith(ANSWERED)))


def copied(place: Place, clients: Clients, run: str) -> str:
    """Wait for a run's canary that gets copies; say what it and the clients got of each other's answers."""

    def copies() -> str | None:
        rollout = place.answer("rollout", "status", MODEL)["rollout"]
        begun = rollout["run"] == run and (rollout["state"], rollout["step"]) == ("observing", 0)
        return str(rollout["release"]) if begun and rollout["steps"][0] == 0 else None

    canary = place.until(copies)
    before, first = answered(place, canary), len(clients.releases)
    time.sleep(20)
    asked, got = clients.releases[first:], answered(place, canary) - before
    assert got >= len(asked) > 5
    assert canary not in asked
    return f"in 20 s {got} answered by the canary (its own questions, too), none of the {len(asked)} of clients"


def succeeded(run: ClusterRun) -> None:
    assert run.state.phase == "Succeeded", f"{run.state.culprit}: {run.state.message}"


def test_install_brings_everything_and_changes_nothing_when_repeated(place: Place, tell: Tell) -> None:
    first = place.answer("install")
    states = {each["state"] for each in first if each["namespace"] == place.namespace}
    assert states == {"created"} or not place.new
    again = place.answer("install")
    assert [each for each in again if each["state"] != "unchanged"] == []
    tell("install, twice", f"{len(first)} objects; then all unchanged")


def checks(place: Place) -> dict[str, Finding]:
    config = load(place.folder / "config.yaml", chosen={"platform": str(place.folder / "platform.yaml")})
    return check_cluster(place.cluster, config)


def found(place: Place) -> dict[str, str]:
    return {what: each.found for what, each in checks(place).items()}


def test_doctor_finds_what_a_run_needs(place: Place, tell: Tell, request: pytest.FixtureRequest) -> None:
    results = checks(place)
    assert [each for what, each in results.items() if each.state == "missing" and what != "KServe"] == []
    named = found(place)
    request.config.stash[VERSIONS] = "; ".join(f"{what} {named[what]}" for what in UNDERNEATH)
    tell("doctor", f"{sum(each.state == 'ok' for each in results.values())} of {len(results)} ok")


def test_a_run_survives_the_loss_of_a_pod(place: Place, tell: Tell) -> None:
    name = place.submit(MODEL, "--no-serve")
    place.until(lambda: "serving " in place.call("logs", name, "evaluate").stdout)  # one that is new, Argo makes again
    place.cluster.delete(PODS, pods(place, name, "evaluate")[0], grace_s=0)
    run = place.ended(name)
    succeeded(run)
    assert max(node.attempts for node in run.state.nodes) > 1
    tell("a run whose pod is deleted while it measures", f"retried; {run.winner} ({run.outcome}) after {seconds(run)}")


def test_argo_shows_the_model_the_winner_and_why(place: Place, tell: Tell) -> None:
    run = place.run("latest")
    shown = run.workflow["metadata"]["annotations"]
    document = run.report().document
    assert document["winner"] in ("fp16", "int8")
    assert document["winner"] in document["reason"]
    title = shown["workflows.argoproj.io/title"]
    assert title == f"{MODEL} → {document['winner']}"
    assert document["reason"] in shown["workflows.argoproj.io/description"]
    assert f"{run.directory}/report.html" in shown["workflows.argoproj.io/description"]
    tell("title, outputs and reason in the Workflow", f"{title}: {document['reason']}")


def test_logs_are_those_of_the_stages(place: Place, tell: Tell) -> None:
    ended = place.call("logs", "latest", "select")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    tell("logs of a stage", f"{len(ended.stdout.splitlines())} lines of select")


def test_a_second_and_a_third_run_end_from_the_memo_and_keep_their_report_where_they_can(
    place: Place, address: str, tell: Tell
) -> None:
    first, took, published = place.run("latest"), [], {}
    with repository(place, address) as bucket:
        for bucket.refuses in (False, True):
            run = place.ended(place.submit(MODEL, "--no-serve", "--force"))
            succeeded(run)
            assert run.winner == first.winner
            assert any(node.cached for node in run.state.nodes)
            assert (run.state.seconds or 0) < (first.state.seconds or 0)
            took.append(seconds(run))
            published[run.id] = run.state.node("onExit[1].publish-report")
    (kept, refused), pages = published.items(), bucket.kept
    assert (kept[1].phase, refused[1].phase in ("Failed", "Error")) == ("Succeeded", True), refused
    assert "no more today" in refused[1].message
    assert [kept[0] in path and b"</html>" in page for path, page in pages.items()] == [True]
    tell("the same run twice more", f"resolve from the memo, the rest from the store; {', '.join(took)}")
    tell("the report in an artifact repository", "there; one that refuses it fails no run")


def test_a_decision_is_verified_where_the_store_is(place: Place, tell: Tell) -> None:
    run = place.run("latest")
    verified = place.answer("verify-decision", run.id)
    assert (verified["verified"], verified["winner"]) == (True, run.winner)
    assert place.call("verify-decision", "no-such-run").returncode == 51
    tell("verify-decision from elsewhere", f"{len(verified['compared'])} files and documents agree")


def test_two_configurations_run_side_by_side_and_one_is_stopped_and_retried(place: Place, tell: Tell) -> None:
    other = place.submit(OTHER_MODEL, "--no-serve", "--set", "optimize.variants=[fp16]")
    weights = "profile.weights={quality: 0.2, latency: 0.3, throughput: 0.3, memory: 0.2}"
    same = place.submit(MODEL, "--no-serve", "--set", weights)
    place.until(lambda: {place.run(each).state.phase for each in (other, same)} == {"Running"}, 300)
    place.until(lambda: pods(place, other, "evaluate"))
    installed_anew(place)
    assert place.call("stop", other).returncode == 0
    stopped = place.ended(other)
    assert stopped.state.phase == "Failed"
    assert stopped.state.node("onExit").phase == "Succeeded"
    succeeded(place.ended(same))
    tell("two configurations side by side with one template", f"both ran; {seconds(place.run(same))} for the second")
    again = str(place.answer("retry", other, "--no-follow")["run"])
    run = place.ended(again)
    succeeded(run)
    tell("install of another template while both run", "changed; they ended as they had begun")
    tell("stop while measuring, then retry", f"report written; Succeeded {seconds(run)} after the retry")


def test_a_model_that_does_not_exist_fails_in_its_first_stage(place: Place, tell: Tell) -> None:
    began = time.monotonic()
    ended = place.call("run", "slipway-test/does-not-exist")
    assert ended.returncode == ModelNotFound.exit_code
    assert "slipway-test/does-not-exist" in ended.stderr
    tell("a model that does not exist", f"exit code {ended.returncode} after {time.monotonic() - began:.0f} s")


@pytest.mark.usefixtures("kserve")
def test_the_first_release_is_served(place: Place, tell: Tell) -> None:
    run = place.ended(place.submit(MODEL, "--set", "optimize.variants=[fp16]"))
    succeeded(run)
    answered = Clients(place).ask()
    assert answered.json()["choices"][0]["message"]["content"], answered.text
    steps = {node.phase for node in run.state.nodes if node.name.startswith("canary-")}
    assert steps <= {"Skipped", "Omitted"}, "there is nothing to compare it with"
    tell("the first release on KServe", f"{run.report().document['release']} answers after {seconds(run)}")


@pytest.mark.usefixtures("kserve")
def test_the_door_is_closed_and_the_pod_answers_prometheus(place: Place, tell: Tell) -> None:
    door = checks(place)["door"]
    assert door.state == "ok", door
    (pod, *_), _ = place.cluster.list(PODS, labels="slipway/endpoint")
    base, answers = f"http://{pod['status']['podIP']}:8080", {}
    for path, headers in (("/metrics", {}), ("/metrics", {"x-forwarded-for": "192.0.2.1"}), ("/invocations", {})):
        answers[path, *headers] = httpx.get(base + path, headers=headers, timeout=30).status_code
    assert list(answers.values()) == [200, 404, 404]
    tell("the door, asked by doctor through the gateway", door.found)


@pytest.mark.usefixtures("kserve")
def test_a_canary_that_can_not_start_is_rolled_back(place: Place, tell: Tell) -> None:
    name = place.submit(
        MODEL,
        *(*SMALLEST, "--set", "rollout.ready_timeout_s=60"),
        *("--set", "kserve.image=localhost/slipway-evaluate-cpu:no-such-tag"),
    )
    state = place.ended(name).state
    said = state.node(state.culprit or "onExit").message
    assert (state.phase, "no-such-tag can't be pulled" in said) == ("Failed", True), said
    tell("a canary whose image is not there", said)


@pytest.mark.usefixtures("kserve")
def test_a_good_canary_waits_for_an_approval_is_promoted_and_rolled_back(place: Place, tell: Tell) -> None:
    stable = place.answer("rollout", "status", MODEL)["split"]["stable"]
    with Clients(place) as clients:
        name = place.submit(MODEL, *SMALLEST, *COPIES, "--set", "rollout.approval=true")
        tell("copies of all requests, before any client", copied(place, clients, name))
        place.until(partial(place.waits, name, "approve"))
        first = place.answer("rollout", "status", MODEL)["rollout"]["analyses"][0]
        assert (first["percent"], first["verdict"]) == (0, "promote")
        tell("what the approver is told", place.run(name).state.node("approve").message)
        (controller, *_), _ = place.cluster.list(PODS, "argo", labels="app=workflow-controller")
        told = httpx.get(f"https://{controller['status']['podIP']}:9090/metrics", verify=False).text  # noqa: S501
        assert f'slipway_approval_seconds{{model="{MODEL}"}}' in told
        installed_anew(place)
        assert place.answer("resume", name)["resumed"] == ["approve"]
        run = place.ended(name)
        succeeded(run)
        promoted = run.report().document["release"]
        tell("a good canary, approved by slipway resume", f"{promoted} promoted after {seconds(run)}")
        began = time.monotonic()
        back = place.answer("rollback", MODEL)
        took_s = time.monotonic() - began
    assert promoted != stable
    assert (back["release"], back["served"]) == (stable, True)
    states = {each["name"]: each["state"] for each in place.answer("releases", MODEL)}
    assert [name for name, state in states.items() if state == "production"] == [stable]
    assert set(clients.statuses) == {200}, clients.statuses
    tell("slipway rollback from elsewhere", f"{stable} serves again after {took_s:.0f} s")
    tell("clients meanwhile", f"all {len(clients.statuses)} requests answered with 200")


@pytest.mark.usefixtures("kserve")
@pytest.mark.parametrize("drill", ["load", "cold", "rollback"])
def test_a_drill_of_the_endpoint_from_outside(place: Place, tell: Tell, drill: str) -> None:
    """``rollback`` needs the releases, which are on the volume: it is done in a pod, from the newest of them."""
    if drill == "rollback":
        newest = max(each["name"] for each in place.answer("releases", MODEL))
        place.answer("rollback", MODEL, "--to", newest)
    through = ("--set", f"kserve.gateway_url={Clients(place).base}")
    where = () if drill == "rollback" else ("--engine", "local", "--store", str(place.folder / "none"))
    (drilled,) = place.answer("drill", drill, MODEL, "--short", "--peak", "1", *through, *where)["drills"]
    assert drilled["failures"] == []
    numbers = {name: value for name, value in drilled["figures"].items() if isinstance(value, int | float)}
    figures = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    tell(f"drill {drill} from outside", f"held, after {drilled['seconds']:.0f} s: {figures}")


@pytest.mark.usefixtures("kserve")
@pytest.mark.parametrize(
    ("flaw", "make", "reasons", "statuses"),
    [
        (
            "that refuses some questions",
            lambda model: when_asked(model, OTHER_QUESTION, REFUSE),
            ["refused"],
            {200, 400},
        ),
        ("that is slow", slow_down, ["far too late", "time to first token", "time per output token"], {200}),
    ],
)
def test_a_canary_with_a_flaw_is_rolled_back_by_what_its_requests_show(
    place: Place,
    tell: Tell,
    tmp_path: Path,
    flaw: str,
    make: Callable[[Path], None],
    reasons: list[str],
    statuses: set[int],
) -> None:
    stable = place.answer("rollout", "status", MODEL)["split"]["stable"]
    model = shutil.copytree(DEMO / "model", tmp_path / "model")
    make(model)
    commit = place.hub.add_repo(MODEL, model, revision="flawed")
    with Clients(place) as clients:
        name = place.submit(MODEL, "--revision", commit, "--set", "optimize.variants=[fp16]")
        state = place.ended(name).state
    message = state.node(state.culprit or "onExit").message
    assert (state.phase, any(reason in message for reason in reasons)) == ("Failed", True), message
    status = place.answer("rollout", "status", MODEL)
    assert (status["rollout"]["state"], status["split"]["stable"]) == ("rolled back", stable)
    assert status["split"]["canary"] is None
    assert set(clients.statuses) == statuses, clients.statuses
    limits = ", ".join(f"{limit} {value}" for limit, value in LIMITS.items())
    tell(f"a canary {flaw}; limits: {limits}, all others as in the defaults", message)


@pytest.mark.usefixtures("kserve")
def test_replicas_follow_the_load_and_a_floor_without_naming_prometheus(place: Place, tell: Tell) -> None:
    """Needs KEDA, and one Prometheus that scrapes the endpoints' pods."""
    place.answer("install")
    scales = found(place)["autoscaling"]
    if not scales.startswith("KEDA"):
        pytest.skip(f"needs KEDA and one Prometheus: {scales}")
    tell("doctor of autoscaling", scales)
    bounds = ("--set", "kserve.scaling.maximum=2", "--set", "kserve.scaling.target=2")
    delays = ("--set", "kserve.scaling.scale_down_delay_s=120")
    place.answer("rollout", "start", MODEL, *bounds, *delays)
    through = ("--set", f"kserve.gateway_url={Clients(place).base}")
    (drilled,) = place.answer("drill", "scale", MODEL, *bounds, *delays, *through)["drills"]
    assert drilled["failures"] == []
    figures = drilled["figures"]
    tell(
        "drill scale without kserve.prometheus",
        f"asked for after {figures['wanted_s']:.0f} s, ready after {figures['ready_s']:.0f} s, gone "
        f"{figures['back_s']:.0f} s after the load",
    )
    now = datetime.now(UTC)
    floor = {"start": f"{now.minute} {now.hour} * * *", "replicas": 2}
    floor["end"] = f"{now.minute} {(now.hour + 1) % 24} * * *"
    place.answer("rollout", "start", MODEL, *bounds, *delays, "--set", f"kserve.scaling.schedule=[{json.dumps(floor)}]")
    began = time.monotonic()
    ours = f"{ENDPOINT}={endpoint_name(MODEL, place.namespace)},{RELEASE}"
    place.until(lambda: len(place.cluster.list(PODS, labels=ours)[0]) == 2, limit_s=300)
    tell("a floor by the time of the day", f"two replicas after {time.monotonic() - began:.0f} s, without load")
    place.answer("rollout", "start", MODEL)


@pytest.mark.usefixtures("kserve")
def test_one_address_leads_to_the_model_that_a_request_names(place: Place, tell: Tell) -> None:
    if not there(place.cluster, DEFINITIONS, "aigatewayroutes.aigateway.envoyproxy.io"):
        pytest.skip("needs Envoy AI Gateway")
    place.answer("rollout", "start", MODEL, *shared_host(place))
    base, headers = Clients(place).base, {"Host": SHARED_HOST}

    def ask(model: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        return httpx.post(f"{base}/v1/chat/completions", json=body, headers=headers, timeout=120)

    place.until(lambda: ask(MODEL).status_code == 200, limit_s=120)
    assert ask(MODEL).json()["model"] == MODEL
    unknown = ask("slipway/unknown")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    listed = httpx.get(f"{base}/v1/models", headers=headers, timeout=30).json()
    assert MODEL in [model["id"] for model in listed["data"]]
    tell("one address for all models", "answers by the model's name; 404 model_not_found for another; lists it")


@pytest.mark.usefixtures("kserve")
@pytest.mark.skipif(UPGRADE not in os.environ, reason=f"needs a program that upgrades Argo or KServe: {UPGRADE}")
def test_an_upgrade_underneath_drops_nothing_and_the_model_moves_to_another_mode(place: Place, tell: Tell) -> None:
    stable = place.answer("rollout", "status", MODEL)["split"]["stable"]
    with Clients(place) as clients:
        name = place.submit(MODEL, *SMALLEST)
        place.until(lambda: pods(place, name, "evaluate"))
        subprocess.run([os.environ[UPGRADE]], check=True)
        run = place.ended(name)
        succeeded(run)
        promoted = run.report().document["release"]
        assert promoted != stable
        tell("an upgrade underneath while it measures", f"{promoted} promoted after {seconds(run)}")
        tell("what runs then", "; ".join(said for what, said in found(place).items() if what in UNDERNEATH))
        there_and_back = []
        for mode in ("standard", "route"):
            moved = place.answer(
                "rollout", "move", MODEL, "--mode", mode, "--set", f"kserve.gateway_url={clients.base}"
            )
            assert (moved["release"], moved["mode"], moved["answers"]["failed"]) == (promoted, mode, 0)
            door = checks(place)["door"]
            assert door.state == "ok", (mode, door)
            tell(f"the door in mode {mode}", door.found)
            there_and_back.append(f"{mode} after {moved['seconds']:.0f} s, {moved['answers']['requests']} requests")
    assert set(clients.statuses) == {200}, clients.statuses
    tell("rollout move, there and back", "; ".join(there_and_back))
    tell("clients of the upgrade and the moves", f"all {len(clients.statuses)} requests answered with 200")


def test_a_push_to_each_registry_makes_a_run(place: Place, tell: Tell) -> None:
    if not there(place.cluster, DEFINITIONS, EVENTS):
        pytest.skip("needs Argo Events")
    made = {"huggingface": MODEL, "harbor": OTHER_MODEL}
    with pushes.deployed(place):
        for provider, model in made.items():
            push = Push(provider, model, place.commits[model])
            pushes.post(place, provider, model, push.commit)
            place.until(partial(there, place.cluster, WORKFLOWS, push.name), 120)
            workflow = place.cluster.get(WORKFLOWS, push.name)
            assert workflow["metadata"]["labels"]["slipway/trigger"] == provider
            assert arguments_of(workflow)["model"] == model
            assert place.call("stop", push.name).returncode == 0
            place.ended(push.name)
    tell("a push to the Hub and one to Harbor", f"{len(made)} runs, each of its commit")


def test_uninstall_leaves_nothing(place: Place, tell: Tell) -> None:
    if there(place.cluster, DEFINITIONS, CRD) and place.cluster.list(ISVCS, labels=OURS)[0]:
        tell("uninstall while it serves", "refused")
        assert "endpoints serve" in place.call("uninstall", "--yes").stderr
        for kind in (ISVCS, HTTP_ROUTES):
            for each in place.cluster.list(kind, labels=OURS)[0]:
                place.cluster.delete(kind, each["metadata"]["name"])
    kept = place.answer("uninstall", "--yes")
    assert place.cluster.get(CLAIMS, "slipway-models")
    removed = place.answer("uninstall", "--yes", "--models")
    place.until(lambda: not there(place.cluster, NAMESPACES, place.namespace), 120)
    assert place.cluster.list(WORKFLOWS)[0] == []
    tell(
        "uninstall, then with --models", f"{len(kept)} objects, the models kept; then {len(removed)} and the namespace"
    )
