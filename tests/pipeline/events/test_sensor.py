"""The committed Sensor, evaluated on what registries post; and the evaluation itself, where it refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from receiving import COMMIT, HARBOR_PUSH, NOT_OURS, PUSH, changed, push

from pipeline.argo.status import arguments_of
from pipeline.config import load
from pipeline.definition import arguments, workflow_template
from pipeline.events.gotemplate import render
from pipeline.events.paths import MISSING, find
from pipeline.events.secret import secret
from pipeline.events.sensor import SENSOR, Sensor
from stages.parts.base.errors import ConfigError, EventRefused, UnknownName, UnsupportedField

EVENTS = {"huggingface": PUSH, "harbor": HARBOR_PUSH}
NOT_HARBORS = {
    "what Harbor's documentation shows": (
        {
            "event_data.repository": {"name": "alpine", "namespace": "harbor", "repo_full_name": "harbor/alpine"},
            "event_data.resources": [
                {"tag": "sha256:954b378c375d852eb3c63ab88978f640b4348b01c1b3456a024a81536dafbbf4"}
            ],
        },
        "event_data.repository.namespace is 'harbor'",
    ),
    "a pull": ({"type": "PULL_ARTIFACT"}, "type is 'PULL_ARTIFACT'"),
    "a deletion": ({"type": "DELETE_ARTIFACT"}, "type is 'DELETE_ARTIFACT'"),
    "another project": ({"event_data.repository.namespace": "library"}, "event_data.repository.namespace is 'library'"),
    "a repository that names no model": ({"event_data.repository.name": "alpine"}, "event_data.repository.name is"),
    "a deeper repository": ({"event_data.repository.name": "a/b/c"}, "event_data.repository.name is 'a/b/c'"),
    "a tag that is no commit": (
        {"event_data.resources": [{"tag": "latest"}]},
        "event_data.resources.0.tag is 'latest'",
    ),
    "no artifact": ({"event_data.resources": []}, "event_data.resources.0.tag is not there"),
}


@pytest.fixture(scope="module")
def sensor() -> Sensor:
    return Sensor.read()


@pytest.mark.parametrize("provider", EVENTS)
def test_a_push_is_the_run_that_the_command_line_would_start(
    sensor: Sensor, provider: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    workflow = sensor.workflow(provider, EVENTS[provider])
    config = load(chosen={"platform": "cluster"})
    template = workflow_template(config)
    assert workflow["spec"]["workflowTemplateRef"] == {"name": template["metadata"]["name"]}
    defaults = {each["name"]: each.get("value") for each in template["spec"]["arguments"]["parameters"]}
    assert defaults | arguments_of(workflow) == arguments(config, "some-user/some-repo", COMMIT, serve=True)


def test_the_same_commit_has_the_same_name_wherever_it_was_pushed_and_another_one_has_another(sensor: Sensor):
    names = [sensor.workflow(provider, event)["metadata"]["name"] for provider, event in EVENTS.items()]
    assert names[0] == names[1]
    others = [push(commit="0" * 40), push("some-user/another")]
    assert len({names[0], *(sensor.workflow("huggingface", each)["metadata"]["name"] for each in others)}) == 3
    assert len(names[0]) <= 63


def test_the_commit_is_that_of_main_whatever_else_was_pushed_with_it(sensor: Sensor):
    refs = [{"ref": "refs/heads/dev", "newSha": "1" * 40}, {"ref": "refs/heads/main", "newSha": "2" * 40}]
    workflow = sensor.workflow("huggingface", changed(PUSH, {"updatedRefs": refs}))
    assert arguments_of(workflow)["revision"] == "2" * 40


@pytest.mark.parametrize("case", NOT_OURS)
def test_what_is_no_new_commit_on_main_of_a_model_starts_nothing(sensor: Sensor, case: str):
    changes, reason = NOT_OURS[case]
    with pytest.raises(EventRefused) as refused:
        sensor.workflow("huggingface", changed(PUSH, changes))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("case", NOT_HARBORS)
def test_what_is_no_model_pushed_to_harbor_starts_nothing(sensor: Sensor, case: str):
    changes, reason = NOT_HARBORS[case]
    with pytest.raises(EventRefused) as refused:
        sensor.workflow("harbor", changed(HARBOR_PUSH, changes))
    assert reason in str(refused.value)


@pytest.mark.parametrize("payload", [{}, [], None, "text", 7])
def test_what_is_no_event_at_all_starts_nothing(sensor: Sensor, payload: object):
    with pytest.raises(EventRefused, match="not there"):
        sensor.workflow("huggingface", payload)


def test_an_unknown_provider_is_named(sensor: Sensor):
    with pytest.raises(UnknownName, match="unknown provider 'habor'") as unknown:
        sensor.workflow("habor", HARBOR_PUSH)
    assert "did you mean 'harbor'?" in unknown.value.hint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("type: string, value", "type: string, comparator: '!=', value", "comparator"),
        ("type: string", "type: number", "type"),
        (r"'^model$'", "model", "value"),
        ("dataKey: body.repo.name", "contextKey: id", "contextKey"),
        ("operation: create", "operation: patch", "operation"),
        ("conditions: huggingface", "conditions: huggingface\n        conditionsReset: []", "conditionsReset"),
    ],
)
def test_a_field_of_argo_events_that_is_not_evaluated_is_refused(tmp_path: Path, old: str, new: str, said: str):
    text = SENSOR.read_text()
    assert old in text
    edited = tmp_path / "sensor.yaml"
    edited.write_text(text.replace(old, new, 1))
    with pytest.raises(UnsupportedField, match=said):
        Sensor.read(edited)


def test_paths_are_gjsons():
    document = yaml.safe_load("{a: [{name: x, is: 1}, {name: y, is: null}], b: {c: [7]}}")
    assert find(document, "b.c.0") == 7
    assert find(document, 'a.#(name=="y").is') is None
    for absent in ("b.d", "b.c.1", 'a.#(name=="z").is', "a.name", "b.0"):
        assert find(document, absent) is MISSING
    for beyond in ("a.#.name", "a.*", "a|b", "a.#(is>1)", "a..b", "", "a."):
        with pytest.raises(UnsupportedField):
            find(document, beyond)


def test_templates_are_gos():
    data = {"Input": {"name": "org/x", "refs": [{"ref": "a", "sha": "1"}, {"ref": "b", "sha": "2"}]}}
    assert render("{{ .Input.name }}", data) == "org/x"
    assert render('{{ replace "/" "--" .Input.name | trunc 5 }}!', data) == "org--!"
    assert render('{{range .Input.refs}}{{if eq .ref "b"}}{{.sha}}{{$.Input.name}}{{end}}{{end}}', data) == "2org/x"
    assert render('{{ index .Input.refs 1 "sha" }}', data) == "2"
    expected = hashlib.sha256(b'["org/x"]').hexdigest()
    assert render('{{ printf `["%s"]` (.Input.name) | sha256sum }}', data) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ .Input.other }}",
        "{{ .Input.refs }}",
        "{{ .Input.name | upper }}",
        "{{- .Input.name }}",
        "{{ range .Input.name }}{{ end }}",
        "{{ if .Input.name }}",
        "{{ end }}",
        "{{ }}",
        "{{ .Input.name .Input.name }}",
        "{{ (.Input.name }}",
        '{{ printf "%d" .Input.name }}',
        "{{ trunc .Input.name }}",
        "{{ index .Input.refs 9 }}",
        "{{ .Input.name | .Input.name }}",
        "{{ $x := .Input.name }}",
    ],
)
def test_what_a_template_has_beyond_that_is_refused(template: str):
    with pytest.raises(UnsupportedField):
        render(template, {"Input": {"name": "org/x", "refs": [{"ref": "a"}]}})


@pytest.mark.parametrize("value", ["short", "with a space in the middle", "gehéim" * 4, "a-line\n-break-in-between"])
def test_a_weak_or_odd_secret_is_refused_and_not_shown(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", value)
    with pytest.raises(ConfigError, match="at least 16 visible ASCII") as refused:
        secret("SLIPWAY_TEST_SECRET")
    assert value not in refused.value.render()


def test_a_secret_given_twice_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", "x" * 20)
    monkeypatch.setenv("SLIPWAY_TEST_SECRET_FILE", "/somewhere")
    with pytest.raises(ConfigError, match="both set"):
        secret("SLIPWAY_TEST_SECRET")
