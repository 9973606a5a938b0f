"""How long the answers of real servers are: of a model, and of one that is damaged so that it answers twice as long."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoring.constraints import Constraints
from scoring.criteria import Criteria
from stages.evaluate.quality import items_of
from stages.parts.base.serving_settings import Serving
from stages.parts.samples.evidence import Measured, answer_growths, gates_of
from stages.parts.samples.lines import Samples
from stages.parts.vllm.server import ServerSpec, running
from tests.stages.evaluate.scripted import ask
from tests.tool_models import answering

pytestmark = pytest.mark.slow
SETTINGS = Serving(kv_cache_mib=64, enforce_eager=True)


def asked(folder: Path, tokens: int) -> Samples:
    model = answering(folder, tokens)
    with running(ServerSpec(model, "m", SETTINGS, folder.with_suffix(".log"))) as server:
        return Samples(items=tuple(items_of(ask(server, model, "structured_output", part=[0, 12]))))


def test_a_model_that_answers_twice_as_long_fails(tmp_path: Path) -> None:
    answers = {"fp16": asked(tmp_path / "fp16", 20), "rambling": asked(tmp_path / "rambling", 40)}
    assert answer_growths(answers, "fp16")["rambling"].value == 1.0
    gates = gates_of({name: Measured(each, 1.0) for name, each in answers.items()}, Criteria(), Constraints())
    assert gates["fp16"].verdict == "pass"
    assert gates["rambling"].reasons == ("its answers are 100% longer than those of fp16 (100% to 100%), beyond 20%",)
