"""``slipway plan`` as a user meets it, with published configurations on the tests' Hub."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.planning.document import schema
from scoring.capacity.families import read_architecture
from scoring.capacity.weights import count_parameters
from stages.parts.base.formats import quantized_formats
from tests.hub import HubServer
from tests.hub.models import tiny_model

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "plan.schema.json"
PUBLISHED: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "scoring" / "published_models.yaml").read_text())
SHARD = "model-00001-of-00001.safetensors"
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}}
LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        for name, parameters in (("llama-3.1-8b", LLAMA_8B), ("llama-3.1-70b", LLAMA_70B)):
            server.add_repo(f"org/{name}", published(PUBLISHED[name]["config"], parameters))
        server.add_repo("org/unknown", published(PUBLISHED["llama-3.1-8b"]["config"] | {"model_type": "rwkv7"}, 10**9))
        server.add_repo("org/llama-3.1-8b-FP8", published(PUBLISHED["llama-3.1-8b"]["config"] | FP8, LLAMA_8B))
        deepseek = PUBLISHED["deepseek-v3"]["config"]
        server.add_repo("org/deepseek-v3", published(deepseek, count_parameters(read_architecture(deepseek)).total))
        yield server


def published(config: dict[str, Any], parameters: int) -> dict[str, bytes]:
    """A repository with the configuration and the index of a model, and a shard that must not be read."""
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": {"weight": SHARD}}
    return tiny_model(
        **{
            "config.json": json.dumps({"dtype": "bfloat16", "architectures": ["X"], **config}).encode(),
            "model.safetensors": None,
            "model.safetensors.index.json": json.dumps(index).encode(),
            SHARD: b"weights",
        }
    )


def plan(hub: HubServer, *arguments: str, program: tuple[str, ...] = ("-m", "pipeline")) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLIPWAY_"))}
    return subprocess.run(
        [sys.executable, *program, "plan", *arguments],
        env=inherited | {"HF_ENDPOINT": hub.url, "SLIPWAY_STORE": "no-such-store"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def document(hub: HubServer, *arguments: str) -> dict[str, Any]:
    ended = plan(hub, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_the_committed_schema_is_that_of_the_document() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "python -m pipeline.planning.document > docs/plan.schema.json"


def test_the_document_follows_the_schema_and_no_weights_are_read(hub: HubServer) -> None:
    found = document(hub, "org/llama-3.1-8b", "--price", "h100=2.50")
    committed = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(committed)
    jsonschema.Draft202012Validator(committed).validate(found)
    assert found["parameters"]["total"] == LLAMA_8B
    assert found["kv_bytes_per_token"] == 131_072
    assert found["stored_bytes"]["fp16"] == 2 * LLAMA_8B
    assert not hub.requests_for("*.safetensors")
    assert found["commit"] == hub.repositories["org/llama-3.1-8b"].find("main")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(committed).validate(found | {"surprise": 1})


def test_the_cheapest_that_meets_the_targets_is_first_and_the_table_says_so(hub: HubServer) -> None:
    prices = ("--price", "l4=0.8", "--price", "h100=4", "--gpu", "l4,h100")
    asked = ("org/llama-3.1-8b", "--context", "8192", "--peak", "50", "--slo", "ttft=1s,tpot=50ms", *prices)
    first = document(hub, *asked)["options"][0]
    assert first["meets_targets"]
    table = plan(hub, *asked).stdout
    gpus = first["tensor_parallel_size"]
    assert re.search(rf"^★ {first['variant']} +{gpus} × {first['accelerator']} ", table, re.MULTILINE)
    assert f"{first['cost_per_hour']:,.2f}" in table
    assert "50 in flight at the peak, TTFT ≤ 1000 ms and TPOT ≤ 50 ms" in table
    assert "assumed: " in table
    assert re.search(
        rf"^{first['variant']} on {gpus} × {first['accelerator']}: weights .* \+ KV cache ", table, re.MULTILINE
    )


CANDIDATES: dict[str, tuple[str, ...]] = {
    "t4": ("gptq", "int8"),
    "a10": ("gptq", "int8"),
    "l4": ("gptq", "fp8"),
    "l40s": ("gptq", "fp8"),
    "a100-80": ("gptq", "int8"),
    "h100": ("gptq", "fp8"),
    "h200": ("gptq", "fp8"),
    "b200": ("fp8", "nvfp4"),
    "mi300x": ("fp8",),
}
"""What the sources of configs/hardware name first: llm-compressor's guide to schemes, and a cookbook for ROCm."""


def test_auto_names_the_candidates_of_each_card_and_why_not_the_others(hub: HubServer) -> None:
    found = document(hub, "org/llama-3.1-8b")
    runs = {run["accelerator"]: run for run in found["automatic"]}
    tried = {card: [name for name in run["candidates"] if "+" not in name] for card, run in runs.items()}
    assert {card: tried[card] for card in CANDIDATES} == {card: ["fp16", *names] for card, names in CANDIDATES.items()}
    for card, run in runs.items():
        assert sorted([*tried[card], *run["untried"]]) == sorted(["fp16", *quantized_formats()])
        assert not run["left_out"]
        assert {option["variant"] for option in found["options"] if option["accelerator"] == card} <= {*tried[card]}
    said = plan(hub, "org/llama-3.1-8b", "--gpu", "h100,b200").stdout.splitlines()
    assert "auto tries fp16, gptq, fp8 on h100" in said
    assert "int8 is not tried on b200: vLLM has no int8 kernel for Blackwell, and fp8 takes its place" in said
    adds = "others come first, and optimize.variants=[auto, gptq] adds it"
    assert f"gptq is not tried on b200: 4-bit weights, without arithmetic in 4 bit; {adds}" in said
    changed = document(hub, "org/llama-3.1-8b", "--gpu", "b200", "--set", "optimize.variants=[auto, gptq, -nvfp4]")
    (run, *_) = changed["automatic"]
    assert run["candidates"] == ["fp16", "gptq", "fp8"]
    assert run["untried"].keys() == {"awq", "fp8-block", "int8", "mxfp4", "nvfp4a16", "w4a16", "w8a8"}
    listed = plan(hub, "org/llama-3.1-8b", "--gpu", "b200", "--set", "optimize.variants=[fp16, awq]").stdout
    assert " tried on " not in listed
    assert "auto tries" not in listed


def test_it_says_what_a_run_would_take(hub: HubServer) -> None:
    asked = ("org/llama-3.1-8b", "--gpu", "l4,h100")
    found = {each["accelerator"]: each for each in document(hub, *asked)["automatic"]}
    assert (found["l4"]["tensor_parallel_size"], found["l4"]["max_model_len"]) == (1, 21_248)
    assert (found["h100"]["tensor_parallel_size"], found["h100"]["max_model_len"]) == (1, 131_072)
    said = plan(hub, *asked, "--set", "serving.max_model_len=30000", "--set", "serving.tensor_parallel_size=1").stdout
    without = (
        r"^a run takes 1 × l4, 30,000 tokens of context; without fp16 \(room for [\d,]+ of 30,000 tokens of context\)"
    )
    assert re.search(without, said, re.MULTILINE)
    assert "it is served on 2 × l4 for the quality questions only" in said
    assert "a run takes 1 × h100, 30,000 tokens of context" in said


def test_recipes_are_planned_by_their_cache_and_gpus(hub: HubServer) -> None:
    recipes = "serving.recipes={kv-fp8: {kv_cache_dtype: fp8, variants: [fp16]}, tp8: {tensor_parallel_size: 8}}"
    settings = (recipes, "serving.max_model_len=8192", "optimize.variants=[fp16, awq, gptq, int8]")
    more = ("--gpu", "h100", "--context", "8192", *(word for each in settings for word in ("--set", each)))
    found = document(hub, "org/llama-3.1-70b", *more)
    rows = {(each["variant"], each["tensor_parallel_size"]): each for each in found["options"]}
    plain, halved = rows["fp16", 4], rows["fp16+kv-fp8", 4]
    assert halved["kv_cache_tokens"] == pytest.approx(2 * plain["kv_cache_tokens"], rel=0.01)
    assert halved["cached_sequences"] > 1.9 * plain["cached_sequences"]
    assert halved["memory"] == plain["memory"]
    assert halved["predicted"]["output_tokens_per_s"] > plain["predicted"]["output_tokens_per_s"]
    assert [size for name, size in rows if name == "awq+tp8"] == [8]
    (run,) = (each for each in found["automatic"] if each["accelerator"] == "h100")
    tried = {name for name in run["candidates"] if "+" in name}
    assert {"fp16+kv-fp8", "awq+tp8", "awq+tp1", "int8+tp2"} <= tried
    assert "fp16+tp1" not in run["candidates"]
    table = plan(hub, "org/llama-3.1-70b", *more).stdout
    assert "a run takes 4 × h100" in table
    assert "awq+tp1" in table
    on_four = document(hub, "org/llama-3.1-70b", "--gpu", "l4", "--set", "serving.kv_cache_dtype=fp8")
    assert on_four["kv_bytes_per_token"] == found["kv_bytes_per_token"] / 2


def test_what_a_run_would_refuse_is_not_offered(hub: HubServer) -> None:
    settings = ("--set", "serving.max_model_len=120000", "--set", "serving.tensor_parallel_size=4")
    asked = ("org/llama-3.1-70b", "--gpu", "a100-80,l4", "--context", "8192", *settings)
    found = document(hub, *asked)
    refused = {run["accelerator"] for run in found["automatic"] if run["tensor_parallel_size"] is None}
    assert refused == {"l4", "this machine"}  # the last without a GPU
    assert {option["accelerator"] for option in found["options"] if option["fits"]} == {"a100-80"}
    assert ("a run on l4 is refused",) in {tuple(option["reasons"]) for option in found["options"]}
    page = plan(hub, *asked).stdout
    assert "a run on l4 is refused: fp16 on 4 × l4: " in page
    assert not re.search(r"^[★ ×] \w+ +\d × l4", page, re.MULTILINE)
    assert "on 8 × l4 does not fit" not in page


def test_what_needs_several_nodes_is_refused(hub: HubServer) -> None:
    found = document(hub, "org/deepseek-v3", "--gpu", "h100", "--context", "8192")
    assert not any(option["fits"] for option in found["options"])
    page = plan(hub, "org/deepseek-v3", "--gpu", "h100", "--context", "8192").stdout
    assert "★" not in page
    assert re.search(r"^a run on h100 is refused: fp16 on 8 × h100: weights .* leave no room", page, re.M)


def test_what_does_not_fit_is_listed_with_the_reason(hub: HubServer) -> None:
    asked = ("org/llama-3.1-70b", "--gpu", "l4", "--set", "optimize.variants=[fp16]")
    said = plan(hub, *asked, "--context", "8192", "--slo", "tpot=10ms").stdout
    assert re.search(r"^× fp16 +8 × l4", said, re.MULTILINE)
    assert "× misses a target even with one request at a time" in said
    every = plan(hub, *asked, "--all").stdout
    assert re.search(r"fp16 on 2 × l4 does not fit: weights \d+\.\d, .* leave no room for the KV cache", every)
    assert re.search(r"fp16 on 8 × l4 does not fit: room for [\d,]+ of 131,072 tokens of context", every)


@pytest.mark.parametrize(
    ("arguments", "code", "said", "hint"),
    [
        (("org/none",), 10, "has no model org/none", "check the spelling"),
        (("org/unknown",), 13, "model type 'rwkv7': its layers are not known", "slipway run"),
        (("org/llama-3.1-8b", "--gpu", "h10"), 2, "unknown accelerator 'h10'", "did you mean 'h100'?"),
        (("org/llama-3.1-8b", "--slo", "ttft=1"), 2, "'ttft=1' is not a target", "ttft=1s,tpot=50ms"),
        (("org/llama-3.1-8b", "--price", "h100"), 2, "not of the form GPU=PRICE", "h100=2.50"),
        (("org/llama-3.1-8b", "--price", "x=1"), 2, "unknown accelerator 'x'", "known: "),
        (("org/llama-3.1-8b", "--context", "200000"), 2, "made for 131,072 tokens", "to 131072"),
        (("org/llama-3.1-8b", "--context", "128"), 2, "requests have up to 960 tokens", "a --context from 960"),
        (("org/llama-3.1-8b", "--accelerators", "none.yaml"), 2, "cannot read none.yaml", ""),
    ],
)
def test_a_mistake_is_one_line_with_a_hint(
    hub: HubServer, arguments: tuple[str, ...], code: int, said: str, hint: str
) -> None:
    ended = plan(hub, *arguments)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert hint in ended.stderr.partition("hint: ")[2] or not hint
    assert "Traceback" not in ended.stderr


def test_a_plan_takes_less_than_two_seconds_and_imports_nothing_heavy(hub: HubServer) -> None:
    names = ("torch", "vllm", "transformers", "pandas", "kubernetes", "hera")
    code = (
        "import sys, atexit; from pipeline.cli import main;"
        f"atexit.register(lambda: print([each for each in {names} if each in sys.modules], file=sys.stderr)); main()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = plan(hub, "org/llama-3.1-70b", program=("-c", code))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == "[]"
    # The time of the processor: other tests share it.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 2


def test_a_published_checkpoint_is_planned_by_its_own_format_and_size(hub: HubServer) -> None:
    found = document(hub, "org/llama-3.1-8b-FP8", "--gpu", "l4,a100-80")
    assert found["stored_bytes"] == {"fp8": len(b"weights")}
    assert found["parameters"]["total"] == LLAMA_8B
    assert {option["variant"] for option in found["options"]} == {"fp8"}
    why = "it is made from 16-bit weights, and the model is published in fp8"
    assert all(run["candidates"] == ["fp8"] and not run["left_out"] for run in found["automatic"])
    others = [name for name in quantized_formats() if name != "fp8"]
    assert all(run["untried"] == dict.fromkeys(others, why) for run in found["automatic"])


def test_candidates_are_planned_beside_the_variants(hub: HubServer) -> None:
    found = document(hub, "org/llama-3.1-8b", "--candidate", "org/llama-3.1-8b-FP8", "--gpu", "h100")
    assert list(found["stored_bytes"]) == ["fp16", "gptq", "fp8", "org-fp8"]
    assert any(option["variant"] == "org-fp8" and option["fits"] for option in found["options"])
    refused = plan(hub, "org/llama-3.1-8b", "--candidate", "org/llama-3.1-70b")
    assert refused.returncode == 13
    assert (
        "candidate org/llama-3.1-70b is another model: hidden_size is 8192, and the model's is 4096" in refused.stderr
    )
