"""What people are told of a cluster, on the cluster of KUBECONFIG (``make test-cluster``): each panel has data, each
alert is provoked once, and its web hook arrives, as do rollouts' own.

SLIPWAY_TEST_MONITORING names a file with the definitions of prometheus-operator's PodMonitor, PrometheusRule and
Prometheus, which the cluster must not have. It needs prometheus, prometheus-alertmanager and kube-state-metrics on this
machine, which reaches pods, and which pods reach. Alerts fire after 15 s instead of their ``for``; see watched.py.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from stages.parts.cluster.kinds import DEPLOYMENTS, SECRETS, WORKFLOWS
from stages.rollout.kserve.objects import endpoint_name
from tests.cluster.conftest import OTHER_MODEL, Place, Tell
from tests.cluster.test_conformance import Clients, found, kserve, succeeded
from tests.cluster.test_kills import ANEW, another
from tests.cluster.watched import HOME, Watched, kube_state_metrics, prometheus_operator, watching
from tests.demo import MODEL
from tests.webhook import Hook, hook

MONITORING = "SLIPWAY_TEST_MONITORING"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.skipif(MONITORING not in os.environ, reason=f"needs prometheus-operator's definitions: {MONITORING}"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
NARROW: Final = (
    *ANEW,
    *("--set", "serving.max_num_seqs=2", "--set", "workload.slo={ttft_ms: 1000, tpot_ms: 1000}"),
    *("--set", "rollout.step_s=15", "--set", "rollout.min_requests=20"),
)
"""A release that answers two at a time, and others within a second only if few ask."""
MANY: Final = 16
"""Clients at a time, who wait for each other."""
NONE_HERE: Final = {
    ("GPU utilization", "A"): "no GPU",
    ("GPU memory", "A"): "no GPU",
    ("GPU power", "A"): "no GPU",
    ("Rollouts, watches and approvals", "C"): "slipway_watch_alarm is told on one machine",
}
LOOKS: Final = 3
"""Fewer raise no alarm, however bad."""
BUDGET: Final = "SlipwayMonthsBudgetUsedUp"
TOKENS: Final = 200
RATELIMIT: Final = ("envoy-ratelimit", "envoy-gateway-system")


@pytest.fixture(scope="module")
def operator(place: Place) -> Iterator[None]:
    with prometheus_operator(place.cluster, Path(os.environ[MONITORING])):
        yield


@pytest.fixture(scope="module")
def states() -> Iterator[contextlib.ExitStack]:
    """kube-state-metrics as long as the stack is open."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def watched(
    place: Place, operator: None, states: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    place.answer("install")
    over, endpoint = threading.Event(), endpoint_name(MODEL, place.namespace)
    with watching(place.cluster, tmp_path_factory.mktemp("watched")) as made:
        states.enter_context(kube_state_metrics(made.states))
        board = made.dashboard()

        def look() -> None:
            while not over.wait(5):
                with contextlib.suppress(httpx.HTTPError, AssertionError):  # as long as nothing is served
                    for query, text in made.queries(board, endpoint).items():
                        if query not in made.seen and made.data(text):
                            made.seen.add(query)

        thread = threading.Thread(target=look)
        thread.start()
        yield made
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def told(place: Place, watched: Watched, address: str) -> Iterator[Hook]:
    """The web hook of rollouts, after the first install, which makes the namespace."""
    with hook(host=address) as posted:
        data = {"url": base64.b64encode(posted.url.encode()).decode()}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "slipway-notify"}, "data": data}
        place.cluster.apply(SECRETS, body)
        yield posted
        place.cluster.delete(SECRETS, "slipway-notify")


def fired(place: Place, watched: Watched, alert: str, limit_s: float = 300) -> str:
    """Wait until an alert's web hook arrives; return what it says."""
    posted = place.until(partial(watched.arrived, alert), limit_s)
    texts = posted["annotations"]
    assert texts.keys() == {"summary", "runbook"}
    assert not any("<no value>" in text or "error" in text.partition(":")[0] for text in texts.values()), texts
    return str(texts["summary"])


def posted(told: Hook, event: str, model: str) -> dict[str, Any] | None:
    return next((each for each in list(told.posted) if (each["event"], each["model"]) == (event, model)), None)


@contextlib.contextmanager
def crowd(clients: Clients) -> Iterator[None]:
    """Many ask at a time for long answers."""
    over = threading.Event()
    messages = [{"role": "user", "content": "Tell all."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 300, "ignore_eos": True}

    def ask(_: int) -> None:
        while not over.is_set():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{clients.base}/v1/chat/completions", json=body, headers=clients.host, timeout=120)

    with ThreadPoolExecutor(MANY) as pool:
        asked = pool.map(ask, range(MANY))
        yield
        over.set()
        list(asked)


def test_install_brings_what_the_prometheus_selects(place: Place, watched: Watched, tell: Tell) -> None:
    said = found(place)["monitoring"]
    assert said.startswith(f"{HOME}/test takes endpoints"), said
    up = '{job=~".*/slipway-argo"}'
    place.until(lambda: watched.data(f"up{up} == 1"), 120)
    tell("doctor of monitoring", f"{said}; Argo's controller is scraped")


def test_slow_answers_an_approval_and_a_release_that_can_not_start(
    place: Place, watched: Watched, told: Hook, states: contextlib.ExitStack, tell: Tell, tmp_path: Path
) -> None:
    """All while a canary waits for a person, which takes five minutes in any case."""
    number = f"{time.time():.0f}"
    first = another(place, tmp_path / "first", f"first-{number}")
    succeeded(place.ended(place.submit(MODEL, "--revision", first, *NARROW)))
    clients, second = Clients(place), another(place, tmp_path / "second", f"second-{number}")
    with clients:
        name = place.submit(MODEL, "--revision", second, *NARROW, "--set", "rollout.approval=true")
        place.until(partial(place.waits, name, "approve"))
        assert "to approve" in place.until(partial(posted, told, "awaiting approval", MODEL), 60)["text"]
        image = "localhost/slipway-evaluate-cpu:no-such-tag"
        other = (*ANEW, "--set", "rollout.ready_timeout_s=60", "--set", f"kserve.image={image}")
        failing = place.submit(OTHER_MODEL, *other)
        with crowd(clients):
            for alert in ("SlipwayBudgetBurnsFast", "SlipwayBudgetBurns"):
                tell(f"{alert}: {MANY} clients of a release that answers two", fired(place, watched, alert, 900))
        states.close()
        tell("SlipwayReplicasUnknown: kube-state-metrics ends", fired(place, watched, "SlipwayReplicasUnknown"))
        states.enter_context(kube_state_metrics(watched.states))
        tell("SlipwayApprovalWaits: a canary waits", fired(place, watched, "SlipwayApprovalWaits", 600))
        assert place.ended(failing).state.phase == "Failed"
        tell("SlipwayRolloutFailed: an image that is not there", fired(place, watched, "SlipwayRolloutFailed"))
        back = place.until(partial(posted, told, "rolled back", OTHER_MODEL), 60)
        tell("the web hook of a rollout", back["text"])
        assert place.answer("resume", name)["resumed"] == ["approve"]
        succeeded(place.ended(name))


def test_no_replica_and_a_watch_that_gets_no_answer(place: Place, watched: Watched, tell: Tell) -> None:
    name = endpoint_name(MODEL, place.namespace)
    serving = [
        each["metadata"]["name"]
        for each in place.cluster.list(DEPLOYMENTS)[0]
        if each["metadata"]["name"].startswith(f"{name}-") and each["spec"]["replicas"]
    ]
    assert serving
    (controller,) = [
        (each["metadata"]["name"], each["metadata"]["namespace"])
        for each in place.cluster.list(DEPLOYMENTS, everywhere=True)[0]
        if each["metadata"]["name"] == "kserve-controller-manager"
    ]

    def scale(replicas: int, name: str, namespace: str | None = None) -> None:
        place.cluster.merge(DEPLOYMENTS, name, {"spec": {"replicas": replicas}}, namespace)

    place.until(lambda: watched.data("slipway_endpoint:replicas_available:sum > 0"), 300)
    scale(0, *controller)  # it would start replicas again and again
    try:
        for each in serving:
            scale(0, each)
        place.until(partial(watched.arrived, "SlipwayNoReplicaAnswers"), 600)
        tell("SlipwayNoReplicaAnswers: scaled to 0", fired(place, watched, "SlipwayNoReplicaAnswers"))
        parameters = [{"name": "model", "value": MODEL}, {"name": "rollback", "value": "false"}]
        spec = {"workflowTemplateRef": {"name": "slipway-watch"}, "arguments": {"parameters": parameters}}
        metadata = {"generateName": "slipway-watch-test-"}
        body = {"apiVersion": WORKFLOWS.api_version, "kind": WORKFLOWS.name, "metadata": metadata, "spec": spec}

        def looked() -> bool:
            """Look once; whether it raises an alarm."""
            look = place.cluster.create(WORKFLOWS, body)["metadata"]["name"]

            def ended() -> str | None:
                phase = place.cluster.get(WORKFLOWS, look).get("status", {}).get("phase")
                return phase if phase in ("Succeeded", "Failed", "Error") else None

            return bool(place.until(ended, 600) != "Succeeded")

        assert [looked() for _ in range(LOOKS)] == [False] * (LOOKS - 1) + [True]
        tell(f"SlipwayWatchAlarm: {LOOKS} looks get no answer", fired(place, watched, "SlipwayWatchAlarm"))
        for each in serving:
            scale(1, each)
    finally:
        scale(1, *controller)
    clients = Clients(place)

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return clients.ask().is_success
        return False

    place.until(answers, 600)


def test_every_panel_has_data_and_every_alert_has_arrived(place: Place, watched: Watched, tell: Tell) -> None:
    queries = watched.queries(watched.dashboard(), endpoint_name(MODEL, place.namespace))
    with Clients(place):
        place.until(lambda: watched.seen | NONE_HERE.keys() >= queries.keys(), 300)
    assert not watched.seen & NONE_HERE.keys()
    why = "; ".join(dict.fromkeys(NONE_HERE.values()))
    tell("the dashboard, query by query", f"{len(watched.seen)} of {len(queries)} have data; the others: {why}")
    assert {each for each in watched.alerts() - {BUDGET} if not watched.arrived(each)} == set()


def test_a_months_budget_that_is_used_up(place: Place, watched: Watched, tell: Tell) -> None:
    if not place.cluster.find(DEPLOYMENTS, *RATELIMIT):
        pytest.skip("needs Envoy Gateway's rate-limit service")
    path = place.folder / "platform.yaml"
    before = path.read_text()
    limits = {"clients": [{"name": "reports", "secret": "slipway-test-keys", "tokens_per_month": TOKENS}]}
    (place.folder / "budgets.yaml").write_text(yaml.safe_dump(limits))
    platform = yaml.safe_load(before)
    platform["cluster"]["clients"] = {"file": "budgets.yaml"}
    path.write_text(yaml.safe_dump(platform))
    try:
        place.answer("install")
        made = place.call("clients", "add", "reports", "--json")  # a namespace that was kept has one
        key = (
            yaml.safe_load(made.stdout)["key"]
            if not made.returncode
            else place.answer("clients", "rotate", "reports")["key"]
        )
        watched.reload()
        assert watched.alerts() >= {BUDGET}
        place.until(lambda: watched.data('up{job=~".*/slipway-ratelimit"} == 1'), 120)
        clients = Clients(place)
        clients.host["Authorization"] = f"Bearer {key}"
        refused = place.until(lambda: (answer := clients.ask()).status_code == 429 and answer, 300)
        assert "per month is used up" in refused.json()["error"]["message"]
        tell(f"{BUDGET}: {TOKENS} tokens", fired(place, watched, BUDGET))
    finally:
        path.write_text(before)
        place.answer("install")
