"""What a cluster applies for runs that a push starts: parts that fit each other, and no more rights than needed."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from pipeline.cli import app
from pipeline.cluster.manifests import MANIFESTS, TRIGGERS, for_triggers
from pipeline.commands.events import receive
from pipeline.events.push import PROVIDERS, Push, workflow
from pipeline.events.receiver import TOKEN_VARIABLE
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from pipeline.workflow.parameters import arguments, resolve_key
from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import CONFIGS
from tests.platforms import documents

EVENTS = MANIFESTS / "events"
ROOT = CONFIGS.parent
EXAMPLES = ROOT / "docs" / "examples"
COMMIT = "575db8b7a51b6f85eb06eee540738584589f131c"
PUSHES = [Push(provider, model, COMMIT) for provider in PROVIDERS for model in ("some-user/some-repo", "A_1/b.c-D")]
HARDENED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}


@functools.cache
def applied(folder: Path = EVENTS) -> list[dict[str, Any]]:
    """What kustomize would apply: no file here has patches."""
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [each for file in resources for each in yaml.safe_load_all((folder / file).read_text())]


def the(kind: str, name: str = "", folder: Path = EVENTS) -> dict[str, Any]:
    (found,) = (each for each in applied(folder) if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", []):
        if each["key"] not in labels or (each["operator"] == "In" and labels[each["key"]] not in each["values"]):
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def pods() -> dict[str, dict[str, str]]:
    """The labels of each pod that is made here."""
    made = {
        "receiver": the("Deployment")["spec"]["template"]["metadata"]["labels"],
        "eventsource": the("EventSource")["spec"]["template"]["metadata"]["labels"],
        "sensor": the("Sensor")["spec"]["template"]["metadata"]["labels"],
    }
    return made | {
        "eventbus": the("EventBus")["spec"]["jetstream"]["metadata"]["labels"] | {"eventbus-name": "default"}
    }


def test_every_file_is_applied_and_kustomize_agrees():
    for folder in map(MANIFESTS.joinpath, TRIGGERS.values()):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert {path.name for path in folder.glob("*.yaml")} == {*listed, "kustomization.yaml"}
        assert {each["metadata"]["namespace"] for each in applied(folder)} == {"slipway"}
        if kubectl := shutil.which("kubectl"):
            made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
            assert len(list(yaml.safe_load_all(made.stdout))) == len(applied(folder))


def test_no_name_here_is_that_of_an_object_of_the_base():
    def names(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {(each["kind"], each["metadata"]["name"]) for each in found}

    all_three = [each for folder in TRIGGERS.values() for each in applied(MANIFESTS / folder)]
    assert len(names(all_three)) == len(all_three)
    assert not names(all_three) & names(documents("gke"))


def test_sensor_event_source_and_receiver_fit_each_other():
    source = the("EventSource")
    ((name, hook),) = source["spec"]["webhook"].items()
    (dependency,) = the("Sensor")["spec"]["dependencies"]
    assert (dependency["eventSourceName"], dependency["eventName"]) == (source["metadata"]["name"], name)
    (port,) = (each["port"] for each in source["spec"]["service"]["ports"])
    host = f"{source['metadata']['name']}-eventsource-svc"  # as Argo Events calls its Service
    (container,) = the("Deployment")["spec"]["template"]["spec"]["containers"]
    assert f"--forward-to=http://{host}:{port}{hook['endpoint']}" in container["args"]
    assert hook["port"] == str(port)
    service = the("Service")["spec"]
    assert selects({"matchLabels": service["selector"]}, pods()["receiver"])
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]


def fills(push: Push) -> dict[str, Any]:
    """The Workflow that the Sensor creates for *push*: plain keys of the event's body in plain places."""
    (trigger,) = (each["template"]["k8s"] for each in the("Sensor")["spec"]["triggers"])
    made = copy.deepcopy(trigger["source"]["resource"])
    for parameter in trigger["parameters"]:
        assert parameter["src"].keys() == {"dependencyName", "dataKey"}
        value = push.document()[parameter["src"]["dataKey"].removeprefix("body.")]
        *parents, last = parameter["dest"].split(".")
        place = made
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        assert place[last] == ""
        place[last] = value
    return made


@pytest.mark.parametrize("push", PUSHES, ids=str)
def test_the_sensor_creates_the_workflow_of_the_push(push: Push):
    assert fills(push) == workflow(push)


def filters() -> dict[str, str]:
    """The regular expression of each field of the event's body."""
    (dependency,) = the("Sensor")["spec"]["dependencies"]
    assert dependency["filters"].keys() == {"data"}  # its filters are all applied, unless an operator says otherwise
    data = dependency["filters"]["data"]
    assert {(each["type"], len(each["value"])) for each in data} == {("string", 1)}
    return {each["path"].removeprefix("body."): each["value"][0] for each in data}


def passes(event: dict[str, str]) -> bool:
    """Whether the filters match as in Go, where $ matches at the end alone."""
    return all(re.fullmatch(pattern, event[name], re.ASCII) for name, pattern in filters().items())


@pytest.mark.parametrize("push", PUSHES, ids=str)
def test_the_sensor_lets_every_push_pass_that_the_receiver_forwards(push: Push):
    assert filters().keys() == push.document().keys()
    assert passes(push.document())


@pytest.mark.parametrize("field", PUSHES[0].document())
@pytest.mark.parametrize(
    "value", ["", "{{workflow.name}}", "../../etc", "a/../b", "main", 'x"}, {', "{x}\n", "-{x}", "{x}/y"]
)
def test_the_sensor_refuses_anything_else_in_a_name_or_parameter(field: str, value: str):
    push = PUSHES[0].document()
    assert not passes(push | {field: value.replace("{x}", push[field])})


def test_every_filter_is_anchored():
    assert not [each for each in filters().values() if not re.fullmatch(r"\^(\([a-z|]+\)|[^|()]*)\$", each)]


def test_every_way_in_asks_for_a_secret_of_its_own():
    (hook,) = the("EventSource")["spec"]["webhook"].values()
    (container,) = the("Deployment")["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["valueFrom"].get("secretKeyRef") for each in container["env"]}
    secrets = [given[provider.variable] for provider in PROVIDERS.values()]
    assert hook["authSecret"] == given[TOKEN_VARIABLE] == {"name": "slipway-events", "key": "token"}
    assert {each["name"] for each in secrets} == {"slipway-events"}
    assert len({each["key"] for each in [*secrets, hook["authSecret"]]}) == len(PROVIDERS) + 1
    assert all(each["optional"] for each in secrets)  # a provider that is not used needs none
    assert not [each for each in applied() if each["kind"] == "Secret"]


def test_the_sensor_may_create_workflows_and_no_other_account_has_rights():
    account = the("Sensor")["spec"]["template"]["serviceAccountName"]
    assert the("Role")["rules"] == [{"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["create"]}]
    binding = the("RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == the("Role")["metadata"]["name"]
    others = {
        the("Deployment")["spec"]["template"]["spec"]["serviceAccountName"],
        the("EventSource")["spec"]["template"]["serviceAccountName"],
    }
    assert others == {"slipway-receiver"}
    assert the("ServiceAccount", "slipway-receiver")["automountServiceAccountToken"] is False


def test_every_pod_is_hardened():
    pod = the("Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    templates = [the(kind)["spec"]["template"] for kind in ("EventSource", "Sensor")]
    for security in (pod["securityContext"], *(each["securityContext"] for each in templates)):
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 8737)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (container, *(each["container"] for each in templates)):
        assert each["securityContext"] == HARDENED
        assert each["resources"]["limits"]["memory"]


def test_the_receiver_is_probed_and_writes_to_volumes_alone():
    (container,) = the("Deployment")["spec"]["template"]["spec"]["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/memory", "/tmp", "/cache"} <= mounts
    assert "--memory=/memory/pushes" in container["args"]
    # Two receivers would not know what the other one forwarded.
    assert (the("Deployment")["spec"]["replicas"], the("Deployment")["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_the_receivers_arguments_are_those_of_the_program():
    (container,) = the("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["slipway", "receive"]
    known = {f"--{name.replace('_', '-')}" for name in receive.__annotations__ if name != "return"}
    assert {each.partition("=")[0] for each in container["args"]} <= known
    variables = {each["name"] for each in container["env"]}
    assert variables == {"SLIPWAY_ALLOW", TOKEN_VARIABLE, *(each.variable for each in PROVIDERS.values())}
    allowed = the("ConfigMap")["data"]["allow"]
    assert allowed.split() == ["org/*"]


def test_each_pod_reaches_and_is_reached_by_the_pods_that_it_needs():
    policies = {each["metadata"]["name"]: each["spec"] for each in applied() if each["kind"] == "NetworkPolicy"}
    for pod in ("receiver", "eventsource", "eventbus"):
        selecting = {name for name, spec in policies.items() if selects(spec["podSelector"], pods()[pod])}
        assert selecting == {pod}
    for one, other, port in (
        ("receiver", "eventsource", 12000),
        ("eventsource", "eventbus", 4222),
        ("sensor", "eventbus", 4222),
    ):
        if one in policies:
            (out,) = (each for each in policies[one]["egress"] if port in ports(each))
            assert any(selects(peer["podSelector"], pods()[other]) for peer in out["to"])
        into = [each for each in policies[other]["ingress"] if port in ports(each)]
        assert any(admits(peer, pods()[one]) for each in into for peer in each["from"]), (one, other)
    assert not [peer for peer in policies["eventsource"]["ingress"][0]["from"] if not admits(peer, pods()["receiver"])]
    # The stages' own policies must not cut these pods off.
    for each in documents("gke"):
        if each["kind"] == "NetworkPolicy" and "Egress" in each["spec"]["policyTypes"]:
            assert not [name for name, labels in pods().items() if selects(each["spec"]["podSelector"], labels)]


def ports(rule: dict[str, Any]) -> set[int]:
    return {each["port"] for each in rule.get("ports", [])}


def admits(peer: dict[str, Any], labels: dict[str, str]) -> bool:
    return peer.get("namespaceSelector") == {} or selects(peer.get("podSelector", {"matchLabels": {"": ""}}), labels)


def test_every_workflow_that_is_made_names_a_template():
    """So that templateReferencing: Strict can be demanded of Argo's controller."""
    found = [*documents("gke"), *(each for folder in TRIGGERS.values() for each in applied(MANIFESTS / folder))]
    specs = [each["spec"]["workflowSpec"] for each in found if each["kind"] == "CronWorkflow"]
    templates = [each for found_one in found for each in found_one.get("spec", {}).get("templates", [])]
    specs += [yaml.safe_load(each["resource"]["manifest"])["spec"] for each in templates if "resource" in each]
    specs += [each["template"]["k8s"]["source"]["resource"]["spec"] for each in the("Sensor")["spec"]["triggers"]]
    assert len(specs) == 8
    assert all(spec.keys() == {"workflowTemplateRef", "arguments"} for spec in specs)


def test_what_starts_runs_gets_the_platforms_image_namespace_and_variables(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: gke\nnamespace: ml\nimage: mirror.example:5000/ml/slipway-{family}:1\n"
        "cluster: {environment: {HF_ENDPOINT: 'https://hub.example'}, certificates: company-ca}\n"
    )
    config = load(chosen={"platform": str(mine)})
    for which, folder in TRIGGERS.items():
        found = for_triggers(which, config)
        assert len(found) == len(applied(MANIFESTS / folder))
        assert {each["metadata"]["namespace"] for each in found} == {"ml"}
        images = re.findall(r"'image': '([^']+)'", str(found))
        assert images == ["mirror.example:5000/ml/slipway-slim:1"]
    for which in ("poll", "fleet"):
        (spec,) = (each["spec"] for each in for_triggers(which, config) if each["kind"] == "WorkflowTemplate")
        (container,) = (each["container"] for each in spec["templates"] if "container" in each)
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["HF_ENDPOINT"] == "https://hub.example"
        assert variables["SSL_CERT_FILE"] == "/etc/slipway/ca.crt"
        assert {each["name"] for each in container["volumeMounts"]} <= {each["name"] for each in spec["volumes"]}
    with pytest.raises(ConfigError, match="one machine"):
        for_triggers("poll", load(chosen={"platform": "local"}))


def test_images_are_of_the_projects_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    texts = [path.read_text() for path in EVENTS.rglob("*.yaml")]
    images = re.findall(r"image: (\S+)", "\n".join(texts))
    assert images == [f"registry.example.com/slipway-slim:{version}"] * 3


def test_a_poll_starts_the_run_that_a_push_or_the_command_line_would_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    spec = the("CronWorkflow", folder=EVENTS / "poll")["spec"]
    assert (spec["suspend"], spec["concurrencyPolicy"]) == (True, "Forbid")
    template = the("WorkflowTemplate", folder=EVENTS / "poll")
    assert spec["workflowSpec"]["workflowTemplateRef"] == {"name": template["metadata"]["name"]}
    (start,) = (each for each in template["spec"]["templates"] if "resource" in each)
    assert start["resource"]["action"] == "apply"
    assert yaml.safe_load(start["resource"]["manifest"])  # Argo wants YAML also before it fills it in
    made = yaml.safe_load(filled(start["resource"]["manifest"], {"model": "some-user/some-repo", "commit": COMMIT}))
    pushed = workflow(PUSHES[0])
    assert made["metadata"]["name"] == pushed["metadata"]["name"]
    assert made["spec"] == pushed["spec"]
    given = {each["name"]: each["value"] for each in made["spec"]["arguments"]["parameters"]}
    config = load(chosen={"platform": "cluster"})
    assert given.items() <= arguments(config, "some-user/some-repo", COMMIT, serve=True).items()
    assert given["resolve-key"] == resolve_key("some-user/some-repo", COMMIT)


def filled(text: str, inputs: dict[str, str]) -> str:
    """Fill in references and expressions as Argo does. These expressions mean the same in Python and in expr-lang."""
    sprig = SimpleNamespace(
        sha256sum=lambda value: hashlib.sha256(value.encode()).hexdigest(),
        trunc=lambda length, value: value[:length],
        replace=lambda old, new, value: value.replace(old, new),
        toJson=lambda value: json.dumps(value, separators=(",", ":")),
    )
    scope = {"sprig": sprig, "inputs": SimpleNamespace(parameters=SimpleNamespace(**inputs))}
    text = re.sub(r"\{\{=(.*?)\}\}", lambda found: str(eval(found[1], {"__builtins__": {}}, scope)), text)  # noqa: S307
    return re.sub(r"\{\{inputs\.parameters\.(\w+)\}\}", lambda found: inputs[found[1]], text)


def test_a_poll_asks_the_hub_with_the_stage_program_and_its_pods_fit_the_base():
    spec = the("WorkflowTemplate", folder=EVENTS / "poll")["spec"]
    templates = {each["name"]: each for each in spec["templates"]}
    resolve = templates["resolve"]
    assert resolve["container"]["command"] == ["python", "-m", "stages.resolve"]
    assert resolve["container"]["securityContext"] == HARDENED
    theirs = {each["name"]: each for each in workflow_template(load(chosen={"platform": "gke"}))["spec"]["templates"]}
    assert set(resolve["container"]["args"][::2]) == set(theirs["resolve"]["container"]["args"][::2])
    accounts = {each["metadata"]["name"] for each in documents("gke") if each["kind"] == "ServiceAccount"}
    used = {spec["serviceAccountName"], resolve["serviceAccountName"], resolve["executor"]["serviceAccountName"]}
    assert used <= accounts
    policies = [each["spec"] for each in documents("gke") if each["kind"] == "NetworkPolicy"]
    reached = [each for each in policies if "Egress" in each["policyTypes"]]
    for name, count in (("resolve", 3), ("start", 2)):  # names, the API server and, for one, the Hub
        labels = templates[name]["metadata"]["labels"]
        assert len([each for each in reached if selects(each["podSelector"], labels)]) == count


def test_argo_cd_applies_folders_that_are_there():
    (application,) = yaml.safe_load_all((EXAMPLES / "argocd-application.yaml").read_text())
    assert (application["apiVersion"], application["kind"]) == ("argoproj.io/v1alpha1", "Application")
    paths = [each["path"] for each in application["spec"]["sources"]]
    assert len(paths) == 2
    for path in paths:
        assert (ROOT / path / "kustomization.yaml").is_file()
    assert application["spec"]["destination"]["namespace"] == "slipway"
    # The volume with every model must not go because a file was renamed.
    assert application["spec"]["syncPolicy"]["automated"]["prune"] is False
    known = {(each["kind"], each["metadata"]["name"]) for each in [*documents("gke"), *applied()]}
    for each in application["spec"]["ignoreDifferences"]:
        assert "name" not in each or (each["kind"], each["name"]) in known


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yml")), ids=lambda path: path.name)
def test_the_ci_examples_call_commands_that_are_there(path: Path):
    assert yaml.safe_load(path.read_text())
    commands = re.findall(r"^\s*(slipway (?:trigger|run) .*)$", path.read_text(), re.MULTILINE)
    assert commands
    group: Any = typer.main.get_command(app)
    for command in commands:
        name = command.split()[1]
        known = {option for each in group.commands[name].params for option in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", command)) <= known, command


def test_both_ci_systems_have_an_example():
    assert {path.name for path in EXAMPLES.glob("*.yml")} >= {"github-actions.yml", "gitlab-ci.yml"}


def test_a_fleet_is_applied_by_a_pod_that_may_submit_runs_and_fits_the_base(monkeypatch: pytest.MonkeyPatch):
    folder = EVENTS / "fleet"
    spec = the("WorkflowTemplate", folder=folder)["spec"]
    (template,) = spec["templates"]
    container = template["container"]
    assert container["securityContext"] == HARDENED
    given = {each["name"]: each["value"] for each in spec["arguments"]["parameters"]}
    arguments = [
        re.sub(r"\{\{workflow\.parameters\.(\w+)\}\}", lambda found: given[found[1]], each)
        for each in container["args"]
    ]
    assert arguments[:2] == ["apply", "/fleet/fleet.yaml"]
    command: Any = typer.main.get_command(app)
    parsed = command.commands["apply"].make_context("apply", arguments[1:])
    assert (parsed.params["model"], parsed.params["commit"], parsed.params["engine"]) == ("", "", "argo")
    (variable,) = (each["name"] for each in container["env"] if each.get("value") == "{{workflow.parameters.nightly}}")
    for value, nightly in ((given["nightly"], False), ("true", True)):
        monkeypatch.setenv(variable, value)
        assert command.commands["apply"].make_context("apply", arguments[1:]).params["nightly"] is nightly
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "fleet")
    (volume,) = (each for each in spec["volumes"] if each["name"] == "fleet")
    assert (mount["mountPath"], volume["configMap"]["name"]) == ("/fleet", "slipway-fleet")
    base = documents("gke")
    accounts = {each["metadata"]["name"] for each in base if each["kind"] == "ServiceAccount"}
    assert {spec["serviceAccountName"], spec["executor"]["serviceAccountName"]} <= accounts
    (role,) = (
        each for each in base if each["kind"] == "Role" and each["metadata"]["name"] == spec["serviceAccountName"]
    )
    assert {"workflows", "workflowtemplates"} <= {kind for rule in role["rules"] for kind in rule["resources"]}
    policies = [each["spec"] for each in base if each["kind"] == "NetworkPolicy"]
    labels = template["metadata"]["labels"]
    reached = [each for each in policies if "Egress" in each["policyTypes"] and selects(each["podSelector"], labels)]
    assert len(reached) == 3  # names, the API server and the Hub


def test_the_night_and_a_push_set_parameters_that_the_fleets_template_has():
    folder = EVENTS / "fleet"
    parameters = {each["name"] for each in the("WorkflowTemplate", folder=folder)["spec"]["arguments"]["parameters"]}
    crons = [each["spec"] for each in applied(folder) if each["kind"] == "CronWorkflow"]
    given = [each["workflowSpec"]["arguments"]["parameters"][0] for each in crons]
    assert given == [{"name": "nightly", "value": "false"}, {"name": "nightly", "value": "true"}]
    (trigger,) = (each["template"]["k8s"] for each in the("Sensor")["spec"]["triggers"])
    pushed = {each["name"] for each in trigger["source"]["resource"]["spec"]["arguments"]["parameters"]}
    assert parameters - {"nightly"} <= pushed
    (patch,) = re.findall(
        r"patch sensor slipway-pushes --type json -p \\\n +'(.+)'", (ROOT / "docs" / "fleet.md").read_text()
    )
    (change,) = json.loads(patch)
    place: Any = the("Sensor")
    for part in change["path"].strip("/").split("/"):
        place = place[int(part) if isinstance(place, list) else part]
    assert (place, change["value"]) == ("slipway", the("WorkflowTemplate", folder=folder)["metadata"]["name"])
