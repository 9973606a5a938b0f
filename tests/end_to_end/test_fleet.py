"""Three models of three owners by one fleet file on this machine, with the real vLLM, at one address with one key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import yaml

from stages.parts.vllm.server import reserved_port
from tests.demo import DEMO
from tests.end_to_end.command_line import CHANGED, MODEL, SETTINGS, Pipeline, processes_naming, wait_until_gone
from tests.hub.server import HubServer
from tests.models.servable import publish

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
OTHER: Final = "slipway/another-llama"
QWEN: Final = "slipway/demo-qwen"
OWNERS: Final = {MODEL: "team-chat", OTHER: "team-code", QWEN: "team-search"}


def settings() -> dict[str, Any]:
    """The demo's settings with the end-to-end tests' changes, but for one variant and requests that fail."""
    document: dict[str, Any] = yaml.safe_load(SETTINGS.read_text())
    for part in ("profile", "workload"):
        document[part] = yaml.safe_load(SETTINGS.with_name(document[part]).read_text())
    document["workload"]["tasks_path"] = str(SETTINGS.with_name(document["workload"]["tasks_path"]).resolve())
    for name, _, value in (each.partition("=") for each in CHANGED if "extra_arguments" not in each):
        *path, last = name.split(".")
        place = document
        for part in path:
            place = place.setdefault(part, {})
        place[last] = yaml.safe_load(value)
    document["optimize"]["variants"] = ["fp16"]
    return document


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("fleet")
    publish("qwen3", folder / "qwen")
    with HubServer() as hub:
        for model in (MODEL, OTHER):
            hub.add_repo(model, DEMO / "model")
        hub.add_repo(QWEN, folder / "qwen")
        made = Pipeline(folder / "store", hub)
        for name in ("HF_TOKEN", "SLIPWAY_API_KEY"):
            del made.environment[name]
        yield made
        for model in OWNERS:
            made.call("serve", model, "--stop")
        wait_until_gone(str(made.root))
        assert processes_naming(str(made.root)) == []


@pytest.fixture(scope="module")
def fleet() -> dict[str, Any]:
    defaults = settings()
    with reserved_port("127.0.0.1", 0) as port:
        defaults["serving"]["shared_port"] = port
    return {"defaults": defaults, "models": [{"model": model, "owner": owner} for model, owner in OWNERS.items()]}


def answer(place: Pipeline, *words: str) -> Any:
    ended = place.call(*words, "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


def applied(place: Pipeline, fleet: dict[str, Any], file: Path) -> list[str]:
    """Apply the file; return the models that were run."""
    file.write_text(yaml.safe_dump(fleet))
    return [each["model"] for each in answer(place, "apply", str(file)) if each["starts"]]


def test_three_models_of_three_owners_by_one_apply_and_a_change_of_one(
    place: Pipeline, fleet: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    assert applied(place, fleet, file) == [*OWNERS]
    assert applied(place, fleet, file) == []
    rows = {row["model"]: row for row in answer(place, "models", str(file))}
    assert {model: (row["owner"], row["up"]) for model, row in rows.items()} == {
        model: (owner, 1) for model, owner in OWNERS.items()
    }
    fleet["models"][1]["profile"] = fleet["defaults"]["profile"] | {"task_loss": 0.4}
    assert applied(place, fleet, file) == [OTHER]


def test_the_official_client_reaches_all_by_one_address_and_one_key(place: Pipeline, fleet: dict[str, Any]) -> None:
    keys = [answer(place, "clients", "add", *words)["key"] for words in (["all"], ["code", "--model", OTHER])]
    url = f"http://127.0.0.1:{fleet['defaults']['serving']['shared_port']}/v1"
    every, one = (openai.OpenAI(base_url=url, api_key=key, max_retries=5) for key in keys)
    assert {model.id for model in every.models.list()} == {*OWNERS}
    for model in OWNERS:
        told = every.completions.create(model=model, prompt="What is a list?", max_tokens=4)
        assert (told.model, bool(told.choices)) == (model, True)
    assert [model.id for model in one.models.list()] == [OTHER]
    assert one.completions.create(model=OTHER, prompt="hi", max_tokens=2).choices
    for model in (MODEL, "slipway/unknown"):
        with pytest.raises(openai.NotFoundError) as refused:
            one.completions.create(model=model, prompt="hi", max_tokens=2)
        assert refused.value.code == "model_not_found"
