"""A recipe on real vLLM: what speculation from the prompt guesses right, and that it changes no answer; that it wins
only where answers repeat themselves; and a release by a recipe, served with it, rolled back and restored."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from stages.parts.base.serving_settings import Serving, Speculation
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.records.evaluation import Evaluation
from stages.parts.releases.release import current_release
from stages.parts.vllm.server import Server, ServerSpec, running
from tests.demo import DEMO, MODEL, REPEATING
from tests.end_to_end.command_line import API_KEY, CONFIG, Pipeline, command_lines, processes_naming
from tests.hub.server import HubServer
from tests.serving import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORDS: Final = (REPOSITORY / "configs" / "held-out" / "python-docs.txt").read_text().split()
NGRAM: Final = Speculation(method="ngram", num_speculative_tokens=8, prompt_lookup_min=2, prompt_lookup_max=4)
RECIPES: Final = json.dumps({"ngram": {"speculation": NGRAM.model_dump(exclude_none=True)}})
PROFILE: Final = "name: speed\nweights: {quality: 0, latency: 0.5, throughput: 0.5, memory: 0}\ntask_loss: 0.5\n"
CHANGED: Final = {
    "optimize.variants": "[fp16]",
    "serving.extra_arguments": "[]",
    "workload.slo": "null",
    "workload.concurrency": "2",
    "workload.budget_minutes": "8",
    "workload.quality_limit": "20",
    "workload.divergence_documents": "2",
    **{f"workload.{name}": "null" for name in ("prompt_tokens", "output_tokens")},
    **{f"workload.{name}": "0" for name in ("prompt_spread", "output_spread")},
    "rollout.steps": "[100]",
    "rollout.step_s": "5",
    "rollout.min_requests": "5",
    "rollout.ttft_slack_ms": "5000",
    "rollout.tpot_slack_ms": "500",
}
SETTINGS: Final = (*CONFIG, *(text for name, value in CHANGED.items() for text in ("--set", f"{name}={value}")))


def passage(number: int, words: int) -> str:
    start = random.Random(number).randrange(len(WORDS) - words)
    return " ".join(WORDS[start : start + words])


def edited(number: int) -> str:
    """A prompt whose answer goes on with what it repeats, as one of an edit does."""
    return f"{passage(number, 14)}. " * 6


def ordinary(number: int) -> str:
    return passage(number, 40)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, demo_hub: HubServer) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("store"), demo_hub)
    yield made
    made.call("serve", MODEL, "--stop")
    assert processes_naming(str(made.root)) == []


def greedy(url: str, model: str, prompts: list[str], key: str = "none") -> list[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=300) as client:
        ask = partial(client.completions.create, model=model, max_tokens=48, temperature=0)
        return [ask(prompt=each).choices[0].text for each in prompts]


def accepted(server: Server) -> float:
    """The guessed tokens that were right so far."""
    found = re.search(r"spec_decode_num_accepted_tokens_total\{.*\} (\S+)", httpx.get(f"{server.url}/metrics").text)
    return float(found[1]) if found else 0.0


def test_speculation_guesses_what_answers_repeat_and_changes_none(tmp_path: Path) -> None:
    edits, texts = [edited(number) for number in range(12)], [ordinary(number) for number in range(12)]
    answers: list[list[str]] = []
    guessed: list[float] = []
    for speculation in (NGRAM, None):
        settings = Serving(kv_cache_mib=64, enforce_eager=True, speculation=speculation)
        spec = ServerSpec(DEMO / "model", MODEL, settings, tmp_path / "vllm.log")
        with running(spec) as server:
            answers.append(greedy(server.url, MODEL, edits) + greedy(server.url, MODEL, texts))
            if speculation:
                before = accepted(server)
                for prompts in (edits, texts):
                    greedy(server.url, MODEL, prompts)
                    guessed.append(accepted(server) - before - sum(guessed))
    assert answers[0] == answers[1]
    print(guessed)
    assert guessed[0] > 1.2 * guessed[1]


def decided(pipeline: Pipeline, trace: Path, profile: Path, *more: str) -> dict[str, Any]:
    given = ("--profile", str(profile), "--set", f"workload.trace={trace}", *more)
    ended = pipeline.call("run", MODEL, *SETTINGS, *given, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def written(trace: Path, prompts: list[str], output_tokens: int) -> Path:
    lines = ({"prompt": prompt, "output_tokens": output_tokens} for prompt in prompts)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace


def answered(pipeline: Pipeline, prompts: list[str]) -> list[str]:
    running_now = endpoint(pipeline.store)
    assert running_now
    return greedy(running_now.url, MODEL, prompts, API_KEY)


def speculating(pipeline: Pipeline) -> set[bool]:
    """Whether the server of the release in production was started with speculation, and the process that guards it."""
    release = str(pipeline.store.releases / str(current_release(pipeline.store)))
    servers = [line for line in command_lines() if "vllm" in line and " serve " in line and release in line]
    return {'--speculative-config {"method":"ngram"' in line for line in servers}


def test_a_recipe_wins_where_it_is_faster_and_the_release_is_served_by_it_after_a_rollback_too(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    profile, with_recipe = tmp_path / "speed.yaml", ("--set", f"serving.recipes={RECIPES}")
    profile.write_text(PROFILE)
    texts = written(tmp_path / "texts.jsonl", [ordinary(number) for number in range(100, 300)], 16)
    assert decided(pipeline, texts, profile, *with_recipe)["decision"]["winner"] == "fp16"
    questions = [edited(1000), ordinary(1001)]
    plain, answers = current_release(pipeline.store), answered(pipeline, questions)
    assert speculating(pipeline) == {False}

    found = decided(pipeline, REPEATING, profile, *with_recipe)
    assert found["decision"]["winner"] == "fp16+ngram"
    assert found["decision"]["outcome"] == "decided"
    assert found["decision"]["recipe"]["speculation"]["method"] == "ngram"
    fp16, ngram = (Evaluation.read(pipeline.store.evaluation(name)) for name in ("fp16", "fp16+ngram"))
    assert fp16
    assert ngram
    assert ngram.quality == fp16.quality
    release = current_release(pipeline.store)
    assert release != plain
    assert speculating(pipeline) == {True}
    assert answered(pipeline, questions) == answers
    verified = pipeline.call("verify-decision", found["run"])
    assert verified.returncode == 0, verified.stderr

    for back, speculates in ((plain, False), (release, True)):
        to = ("--to", str(int(back.partition("-")[0])))
        ended = pipeline.call("rollback", MODEL, *to, *SETTINGS, "--set", f"workload.trace={REPEATING}")
        assert ended.returncode == 0, ended.stderr
        assert current_release(pipeline.store) == back
        assert speculating(pipeline) == {speculates}
        assert answered(pipeline, questions) == answers
