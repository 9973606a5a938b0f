"""Three models of three owners by one fleet file, on the cluster of KUBECONFIG (``make test-cluster``). It needs
KServe, for the push Argo Events, and for the one address Envoy AI Gateway."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import yaml

from pipeline.argo.status import arguments_of
from stages.parts.cluster.kinds import CONFIG_MAPS, DEFINITIONS, PODS, SECRETS, WORKFLOWS, Kind
from tests.cluster import pushes
from tests.cluster.conftest import CONFIG, OTHER_MODEL, Place, Tell, there
from tests.cluster.test_conformance import EVENTS, GATEWAYS, SHARED_HOST, kserve, shared_host, succeeded
from tests.demo import DEMO, MODEL
from tests.models.servable import publish

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
QWEN: Final = "slipway/demo-qwen"
OWNERS: Final = {MODEL: "team-chat", OTHER_MODEL: "team-code", QWEN: "team-search"}
SENSORS: Final = Kind("argoproj.io/v1alpha1", "Sensor", "sensors")


@pytest.fixture(scope="module")
def fleet(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file's content, whose models are on the Hub."""
    folder = tmp_path_factory.mktemp("qwen")
    publish("qwen3", folder)
    place.commits[QWEN] = place.hub.add_repo(QWEN, folder)
    place.answer("install")
    config = yaml.safe_load((place.folder / "config.yaml").read_text())
    defaults = config | {"optimize": {"variants": ["fp16"]}, "platform": "./platform.yaml"}
    models = [{"model": name, "owner": owner} for name, owner in OWNERS.items()]
    return {"defaults": defaults, "models": models}


def applied(place: Place, fleet: dict[str, Any], *words: str) -> dict[str, dict[str, Any]]:
    """Apply the file; say what it does by model."""
    file = place.folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet))
    environment = place.environment | {"HF_ENDPOINT": place.hub.url, "HF_HUB_DISABLE_XET": "1"}
    for name in ("SLIPWAY_PLATFORM", "SLIPWAY_CONFIG"):
        del environment[name]
    return {each["model"]: each for each in place.answer("apply", str(file), *words, environment=environment)}


def running(place: Place) -> list[str]:
    """List the Sensor's pods."""
    pods, _ = place.cluster.list(PODS, labels="app.kubernetes.io/component=sensor")
    ready = [pod for pod in pods if any(each.get("ready") for each in pod["status"].get("containerStatuses", []))]
    return [pod["metadata"]["name"] for pod in ready]


def started(steps: dict[str, dict[str, Any]]) -> list[str]:
    return [model for model, step in steps.items() if step["starts"]]


def test_three_models_of_three_owners_by_one_apply(place: Place, tell: Tell, fleet: dict[str, Any]) -> None:
    steps = applied(place, fleet)
    assert started(steps) == [*OWNERS]
    for step in steps.values():
        succeeded(place.ended(step["run"]))
    assert started(applied(place, fleet)) == []
    rows = {row["model"]: row for row in place.answer("models", str(place.folder / "fleet.yaml"))}
    assert {model: rows[model]["owner"] for model in OWNERS} == OWNERS
    assert {model: rows[model]["up"] for model in OWNERS} == dict.fromkeys(OWNERS, 1)
    assert {model: rows[model]["run"] for model in OWNERS} == {model: step["run"] for model, step in steps.items()}
    tell("three models by slipway apply", "; ".join(f"{model} {rows[model]['release']}" for model in OWNERS))


def test_a_change_of_one_profile_runs_one_model(place: Place, tell: Tell, fleet: dict[str, Any]) -> None:
    fleet["models"][1]["profile"] = CONFIG["profile"] | {"task_loss": 0.25}
    assert started(applied(place, fleet, "--dry-run")) == [OTHER_MODEL]
    steps = applied(place, fleet)
    assert started(steps) == [OTHER_MODEL]
    succeeded(run := place.ended(steps[OTHER_MODEL]["run"]))
    tell("a change of one profile", f"one run, {run.outcome}; the others unchanged")


def test_a_push_runs_the_model_with_the_settings_of_the_file(
    place: Place, tell: Tell, fleet: dict[str, Any], tmp_path: Path
) -> None:
    if not there(place.cluster, DEFINITIONS, EVENTS):
        pytest.skip("needs Argo Events")
    files = {path.name: path.read_bytes() for path in (DEMO / "model").iterdir()} | {"README.md": b"newer"}
    commit = place.hub.add_repo(OTHER_MODEL, files)
    fleet["models"][1]["profile"] = CONFIG["profile"] | {"task_loss": 0.25}
    (place.folder / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    data = {name: (place.folder / name).read_text() for name in ("fleet.yaml", "platform.yaml")}
    file = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "slipway-fleet"}, "data": data}
    place.cluster.apply(CONFIG_MAPS, file)
    rendered = place.call("render", "fleet")
    assert rendered.returncode == 0, rendered.stderr
    for each in yaml.safe_load_all(rendered.stdout):
        if each["kind"] != "CronWorkflow":
            place.cluster.apply(place.cluster.kind(each["apiVersion"], each["kind"]), each, force=True)
    before = {each["metadata"]["name"] for each in place.cluster.list(WORKFLOWS)[0]}

    def begun() -> str | None:
        """The run that the pod of the fleet has submitted."""
        made = [each for each in place.cluster.list(WORKFLOWS)[0] if each["metadata"]["name"] not in before]
        runs = [each for each in made if each["spec"]["workflowTemplateRef"]["name"] == "slipway"]
        return str(runs[0]["metadata"]["name"]) if runs else None

    with pushes.deployed(place):
        spec = place.cluster.get(SENSORS, "slipway-pushes")["spec"]
        template = spec["triggers"][0]["template"]["k8s"]["source"]["resource"]["spec"]
        template["workflowTemplateRef"]["name"] = "slipway-fleet"
        old = set(running(place))
        place.cluster.merge(SENSORS, "slipway-pushes", {"spec": spec})
        place.until(lambda: (new := running(place)) and not old & set(new), 120)
        pushes.post(place, "huggingface", OTHER_MODEL, commit)
        run = place.until(begun, 300)
    given = arguments_of(place.cluster.get(WORKFLOWS, run))
    assert (given["model"], given["revision"]) == (OTHER_MODEL, commit)
    assert json.loads(given["profile"])["task_loss"] == 0.25
    assert place.call("stop", run).returncode == 0
    place.ended(run)
    tell("a push of a model of the fleet", f"a run of {OTHER_MODEL} with its own profile")


@pytest.fixture
def keys(place: Place) -> Iterator[dict[str, str]]:
    """The keys of a client that may use all models, and of one that may use one."""
    clients = [
        {"name": "all", "secret": "fleet-keys"},
        {"name": "code", "secret": "fleet-keys", "models": [OTHER_MODEL]},
    ]
    (place.folder / "clients.yaml").write_text(yaml.safe_dump({"clients": clients}))
    file = place.folder / "platform.yaml"
    before = file.read_text()
    platform = yaml.safe_load(before)
    platform["cluster"]["clients"] = {"file": "clients.yaml"}
    file.write_text(yaml.safe_dump(platform))
    place.answer("install", *shared_host(place))
    yield {name: place.answer("clients", "add", name)["key"] for name in ("all", "code")}
    file.write_text(before)
    for plural in ("SecurityPolicy", "BackendTrafficPolicy", "EnvoyExtensionPolicy"):
        kind = place.cluster.kind("gateway.envoyproxy.io/v1alpha1", plural)
        for each in place.cluster.list(kind, labels="app.kubernetes.io/part-of=slipway")[0]:
            place.cluster.delete(kind, each["metadata"]["name"])
    place.cluster.delete(SECRETS, "fleet-keys")
    place.answer("install")


def test_the_official_client_reaches_all_by_one_address_and_one_key(
    place: Place, tell: Tell, keys: dict[str, str]
) -> None:
    if not there(place.cluster, DEFINITIONS, "aigatewayroutes.aigateway.envoyproxy.io"):
        pytest.skip("needs Envoy AI Gateway")
    for model in OWNERS:
        place.answer("rollout", "start", model, *shared_host(place))
    gateway = place.cluster.get(GATEWAYS, "kserve-ingress-gateway", "kserve")["status"]["addresses"][0]["value"]
    every, one = (
        openai.OpenAI(
            base_url=f"http://{gateway}/v1", api_key=keys[name], default_headers={"Host": SHARED_HOST}, max_retries=0
        )
        for name in ("all", "code")
    )

    def lists_all() -> bool:
        with contextlib.suppress(openai.APIError):
            return {model.id for model in every.models.list()} == {*OWNERS}
        return False

    place.until(lists_all, 300)
    for model in OWNERS:
        answer = every.completions.create(model=model, prompt="What is a list?", max_tokens=4)
        assert answer.model == model
        assert answer.usage.completion_tokens
    assert [model.id for model in one.models.list()] == [OTHER_MODEL]
    assert one.completions.create(model=OTHER_MODEL, prompt="hi", max_tokens=2).choices
    for model in (MODEL, "slipway/unknown"):
        with pytest.raises(openai.NotFoundError) as refused:
            one.completions.create(model=model, prompt="hi", max_tokens=2)
        assert refused.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        every.with_options(api_key="sk-wrong").models.list()
    tell(
        "three models by one address and one key", "OpenAI's client reaches all; another sees and reaches its one alone"
    )
