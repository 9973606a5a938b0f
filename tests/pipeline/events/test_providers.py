"""What the webhooks of each registry mean, and the Workflow that follows."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.argo.status import arguments_of
from pipeline.events.push import PROVIDERS, push_of, workflow
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from pipeline.workflow.parameters import arguments
from stages.parts.base.errors import EventRefused, UnknownName
from tests.pipeline.events.receiving import COMMIT, HARBOR_PUSH, IGNORED, PUSH, WEBHOOKS, changed, normalized, push


@pytest.mark.parametrize("provider", WEBHOOKS)
def test_the_webhook_of_a_push_is_normalized(provider: str):
    assert push_of(provider, WEBHOOKS[provider]).document() == normalized(provider)


@pytest.mark.parametrize("provider", WEBHOOKS)
def test_a_push_starts_the_run_that_the_command_line_would_start(provider: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    made = workflow(push_of(provider, WEBHOOKS[provider]))
    config = load(chosen={"platform": "cluster"})
    template = workflow_template(config)
    assert made["spec"]["workflowTemplateRef"] == {"name": template["metadata"]["name"]}
    defaults = {each["name"]: each.get("value") for each in template["spec"]["arguments"]["parameters"]}
    assert defaults | arguments_of(made) == arguments(config, "some-user/some-repo", COMMIT, serve=True)


def test_a_commit_has_one_name_at_every_provider_and_another_commit_or_model_has_another():
    names = {push_of(provider, body).name for provider, body in WEBHOOKS.items()}
    others = [push(commit="0" * 40), push("some-user/another")]
    assert len(names) == 1
    assert len(names | {push_of("huggingface", each).name for each in others}) == 3
    assert max(map(len, names)) <= 63


def test_a_mirror_here_does_not_change_the_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example.com")
    assert push_of("huggingface", PUSH).document() == normalized("huggingface")


def test_the_commit_is_that_of_main_whatever_else_was_pushed_with_it():
    refs = [{"ref": "refs/heads/dev", "newSha": "1" * 40}, {"ref": "refs/heads/main", "newSha": "2" * 40}]
    assert push_of("huggingface", changed(PUSH, {"updatedRefs": refs})).commit == "2" * 40


@pytest.mark.parametrize(("provider", "changes", "reason"), IGNORED)
def test_an_event_that_is_not_a_models_new_commit_starts_nothing(provider: str, changes: dict[str, Any], reason: str):
    with pytest.raises(EventRefused) as refused:
        push_of(provider, changed(WEBHOOKS[provider], changes))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("payload", [{}, [], None, "text", 7])
def test_a_payload_that_is_no_event_starts_nothing(provider: str, payload: object):
    with pytest.raises(EventRefused, match="is missing"):
        push_of(provider, payload)


def test_an_unknown_provider_is_named():
    with pytest.raises(UnknownName, match="unknown provider 'habor'") as unknown:
        push_of("habor", HARBOR_PUSH)
    assert "did you mean 'harbor'?" in unknown.value.hint
