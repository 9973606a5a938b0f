"""A release that completes prompts and refuses chats: noticed at its start, or by what clients get."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from stages.parts.base.errors import RolledBack, ServerFailed, TransientError
from stages.parts.model.description import chat_template
from stages.parts.releases.release import Split, history
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage
from tests.tool_models import QWEN

CHAT = {"model": "org/name", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def give_template(stage: Stage, release: str, text: str = "{{ messages }}") -> None:
    (stage.store.releases / release / "chat_template.jinja").write_text(text)


def test_a_chat_template_is_a_file_or_a_field_of_the_tokenizer_s_configuration(stage: Stage) -> None:
    folder = stage.store.releases / stage.make(GOOD)
    assert not chat_template(folder)
    configuration = folder / "tokenizer_config.json"
    for text, said in (("{}", False), ('{"chat_template": "{{ messages }}"}', True), ("torn", False), ("[]", False)):
        configuration.write_text(text)
        assert bool(chat_template(folder)) == said
    give_template(stage, GOOD)
    assert chat_template(folder)


def test_a_release_with_a_template_that_refuses_chats_is_not_ready(stage: Stage) -> None:
    stage.make(GOOD, refuses_chats=True)
    give_template(stage, GOOD)
    with pytest.raises(ServerFailed, match="refused a chat completion: 400 no chat template"):
        roll_out(stage.store, stage.target, GOOD, SETTINGS)
    assert stage.target.split() == Split(stable=None)


def test_a_release_that_refuses_tools_though_its_server_has_a_parser_is_not_ready(stage: Stage) -> None:
    stage.make(GOOD, refuses_tools=True)
    give_template(stage, GOOD, "{{ messages }}{{ tools }}")
    assert roll_out(stage.store, stage.target, GOOD, SETTINGS).state == "promoted", "no parser is known for its calls"
    stage.make(NEXT, refuses_tools=True)
    give_template(stage, NEXT, QWEN)
    with pytest.raises(RolledBack, match=r'refused a chat completion: 400 "auto" tool choice requires'):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)


def test_a_release_that_sees_is_shown_a_picture(stage: Stage) -> None:
    stage.make(GOOD, refuses_pictures=True)
    give_template(stage, GOOD)
    configuration = stage.store.releases / GOOD / "config.json"
    configuration.write_text(json.dumps({"vision_config": {"depth": 1}}))
    with pytest.raises(ServerFailed, match=r"refused a chat completion with a picture: 400 At most 0 image\(s\)"):
        roll_out(stage.store, stage.target, GOOD, SETTINGS)
    configuration.write_text("{}")
    assert roll_out(stage.store, stage.target, GOOD, SETTINGS).state == "promoted"


def test_a_release_that_lost_the_template_of_the_stable_one_is_not_ready(stage: Stage) -> None:
    stage.served()
    give_template(stage, GOOD)
    stage.make(NEXT, refuses_chats=True)
    with pytest.raises(RolledBack, match=r"it does not come up: .* refused a chat completion"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert [each for each in stage.target.calls() if each.startswith("shift")] == []
    assert stage.target.split() == Split(stable=GOOD)


def test_a_release_that_answers_chats_is_promoted(stage: Stage) -> None:
    stage.served()
    give_template(stage, GOOD)
    stage.make(NEXT)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


def test_a_release_whose_server_refuses_one_of_its_adapters_is_not_ready(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, refuses_models=["sql"])
    for name in ("sql", "support"):
        (stage.store.releases / NEXT / "adapters" / name).mkdir(parents=True)
    settings = SETTINGS.model_copy(update={"ready_timeout_s": 2.0})
    with pytest.raises(RolledBack, match="it did not answer a completion within 2 s"):
        roll_out(stage.store, stage.target, NEXT, settings)
    assert stage.target.split() == Split(stable=GOOD)
    (stage.store.releases / NEXT / "adapters" / "sql").rmdir()
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


@contextmanager
def chatting(stage: Stage, *names: str) -> Iterator[None]:
    """Clients that chat with each of these releases, as soon as it gets traffic."""
    over = threading.Event()

    def chat() -> None:
        while not over.wait(0.01):
            with suppress(httpx.HTTPError, TransientError):  # it may be withdrawn just now
                if stage.target.split().percent:
                    for each in names:
                        httpx.post(f"{stage.target.url(each)}/v1/chat/completions", json=CHAT)

    clients = threading.Thread(target=chat)
    clients.start()
    try:
        yield
    finally:
        over.set()
        clients.join()


def test_a_canary_that_refuses_what_the_stable_release_accepts_is_rolled_back(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, refuses_chats=True)
    clients_alone = SETTINGS.model_copy(update={"synthetic": False})
    with chatting(stage, GOOD, NEXT), pytest.raises(RolledBack, match="clients' requests were refused"):
        roll_out(stage.store, stage.target, NEXT, clients_alone)
    refused = next(each for each in history(stage.store)[-1].analyses[-1]["checks"] if each["name"] == "refused")
    assert (refused["verdict"], refused["canary"], refused["stable"]) == ("fail", 1.0, 0.0)
    assert json.loads((stage.target.folder / "platform.json").read_text())["stable"] == GOOD
