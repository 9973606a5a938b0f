"""Candidates: other checkpoints of the demo's model, on a Hub, compared with it and fetched beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stages.parts.base.errors import UnusableModel
from stages.parts.base.files import canonical_json
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.model.candidates import CandidateCheckpoint, Candidates, compare, names_of, with_candidates
from stages.parts.model.description import describe_model
from stages.parts.records.variant import VARIANT, Variant
from tests.demo import DEMO, MODEL
from tests.hub import HubServer
from tests.hub.models import Stages
from tests.published import copied, quantized, truncated, with_template, with_token

BASE = DEMO / "model"


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized("int8", tmp_path_factory.mktemp("publisher"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.add_repo(MODEL, BASE)
        yield server


@pytest.fixture
def stages(hub: HubServer, tmp_path: Path) -> Stages:
    made = Stages(hub.url, tmp_path, {"SLIPWAY_RUN": "r1"})
    assert made.acquire(made.resolve(MODEL), MODEL).returncode == 0
    return made


def candidate(hub: HubServer, name: str, folder: Path, *, note: str = "") -> CandidateCheckpoint:
    """Publish a folder as ``org/name``, and describe it as ``check`` does."""
    hub.add_repo(f"org/{name}", folder)
    return CandidateCheckpoint.of(name, replace(describe_model(f"org/{name}", "main"), note=note))


def outcome(stages: Stages, name: str) -> dict[str, str]:
    path = stages.base(MODEL).parent / "runs" / "r1" / "outcomes" / f"optimize-{name}.json"
    recorded: dict[str, str] = json.loads(path.read_text())
    return recorded


def fetch(stages: Stages, *candidates: CandidateCheckpoint, code: int = 0) -> str:
    ended = stages.run("acquire", "--model", MODEL, "--candidates", canonical_json(Candidates(candidates)))
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_candidate_is_named_as_its_repository_without_the_models_name() -> None:
    texts = ["RedHatAI/Qwen3-4B-FP8-dynamic", "Qwen/Qwen3-4B-AWQ@v1", "other/Finetune.of_it", "a/X-FP8-dynamic"]
    named = names_of(texts, "Qwen/Qwen3-4B", "fp16")
    assert list(named) == ["fp8-dynamic", "qwen-awq", "finetune-of-it", "x-fp8-dynamic"]
    assert list(named.values()) == texts
    twice = names_of(["org/Qwen3-4B-fp8", "org/Qwen3-4B-fp8@v2", "org/Qwen3-4B-fp8@v3"], "Qwen/Qwen3-4B", "fp8")
    assert list(twice) == ["org-fp8", "org-fp8-2", "org-fp8-3"]
    assert list(names_of(["Qwen/Qwen3-4B@tuned"], "Qwen/Qwen3-4B", "fp16")) == ["qwen3-4b"]


@pytest.mark.parametrize("candidates", [["./model"], ["org/a/b"], ["org/a@x", "org/a@x"], ["--help"]])
def test_a_candidate_that_is_no_name_on_the_hub_is_refused_in_the_settings(candidates: list[str]) -> None:
    with pytest.raises(ValueError, match=r"as on the Hub|twice"):
        Optimize.model_validate({"candidates": candidates})


def test_the_same_model_with_other_weights_is_the_same(hub: HubServer, int8: Path) -> None:
    hub.add_repo("org/demo-llama-W8A8", int8)
    described = with_candidates(describe_model(MODEL, "main"), ["org/demo-llama-W8A8"], MODEL)
    assert described.form.name == "fp16"
    (found,) = described.candidates.items()
    assert (found[0], found[1].form.name) == ("org-w8a8", "int8")
    hub.requests.clear()
    assert compare(described, found[1]) == found[1].note == ""
    assert not hub.requests_for("*/tokenizer.json"), "equal files need not be read"


def test_what_makes_it_another_model_is_named(hub: HubServer, int8: Path, tmp_path: Path) -> None:
    described = describe_model(MODEL, "main")

    def refusal(name: str, folder: Path) -> str:
        hub.add_repo(f"org/{name}", folder)
        with pytest.raises(UnusableModel) as refused:
            compare(described, describe_model(f"org/{name}", "main"))
        assert "optimize.candidates" in refused.value.hint
        return str(refused.value).partition(" is another model: ")[2]

    wider = copied(int8, tmp_path / "wider", hidden_size=512)
    assert refusal("wider", wider) == "hidden_size is 512, and the model's is 256"
    larger = copied(int8, tmp_path / "larger", vocab_size=4160)
    assert refusal("larger", larger) == "vocab_size is 4160, and the model's is 4096"
    family = copied(int8, tmp_path / "family", architectures=["MistralForCausalLM"])
    assert "architectures is ['MistralForCausalLM'], and the model's is ['LlamaForCausalLM']" in refusal(
        "family", family
    )
    token = refusal("token", with_token(copied(int8, tmp_path / "token")))
    assert token.startswith("token ")
    assert " has the id " in token
    other = copied(int8, tmp_path / "other")
    (other / "tokenizer.json").rename(other / "tokenizer.model")
    assert "no tokenizer of the same kind" in refusal("other", other)


def test_another_chat_template_is_only_said(hub: HubServer, int8: Path, tmp_path: Path) -> None:
    hub.add_repo("org/chatty", with_template(copied(int8, tmp_path / "chatty")))
    note = compare(describe_model(MODEL, "main"), describe_model("org/chatty", "main"))
    assert note == "its own chat template differs from the model's, which is used in its place"


def test_a_candidate_becomes_a_variant_with_the_models_own_tokenizer(
    hub: HubServer, stages: Stages, int8: Path, tmp_path: Path
) -> None:
    folder = with_template(copied(int8, tmp_path / "chatty", comment="the publisher's"))
    chatty = candidate(hub, "chatty", folder, note="its own chat template differs")
    fetch(stages, chatty)
    store = ModelStore(stages.store, MODEL)
    directory = store.optimized("chatty")
    variant = Variant.read(directory / VARIANT)
    assert variant is not None
    assert (variant.method, variant.published, variant.bits) == ("published", True, 8)
    assert variant.parameters["source"] == "org/chatty"
    assert (variant.parameters["commit"], variant.parameters["format"]) == (chatty.commit, "int8")
    assert {file.path for file in variant.files} == {path.name for path in directory.iterdir()} - {VARIANT}
    assert json.loads((directory / "config.json").read_text())["comment"] == "the publisher's"
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (directory / name).read_bytes() == (BASE / name).read_bytes()
    for path in int8.glob("*.safetensors"):
        assert (directory / path.name).read_bytes() == path.read_bytes()
    assert "its own chat template differs" in outcome(stages, "chatty")["reason"]
    hub.requests.clear()
    fetch(stages, chatty)
    assert outcome(stages, "chatty")["result"] == "reused"
    assert not hub.requests, "what is there needs no request"


def test_a_16_bit_candidate_of_the_same_model_is_taken_too(hub: HubServer, stages: Stages, tmp_path: Path) -> None:
    fetch(stages, candidate(hub, "tuned", copied(BASE, tmp_path / "tuned")))
    variant = Variant.read(ModelStore(stages.store, MODEL).optimized("tuned") / VARIANT)
    assert variant is not None
    assert (variant.bits, variant.dtype, variant.parameters["quant_method"]) == (16, "bfloat16", "")


def test_a_damaged_candidate_is_left_out_and_the_others_are_fetched(
    hub: HubServer, stages: Stages, int8: Path, tmp_path: Path
) -> None:
    damaged = candidate(hub, "damaged", truncated(copied(int8, tmp_path / "damaged")))
    said = fetch(stages, damaged, candidate(hub, "sound", int8), code=14)
    assert "damaged is left out: " in said
    failed, made = outcome(stages, "damaged"), outcome(stages, "sound")
    assert failed["result"] == "failed"
    assert "is truncated" in failed["reason"]
    assert made["result"] == "done"
    store = ModelStore(stages.store, MODEL)
    assert (store.optimized("sound") / VARIANT).is_file()
    assert not store.optimized("damaged").exists()


def test_weights_of_another_shape_are_another_models(
    hub: HubServer, stages: Stages, int8: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(int8, tmp_path / "wide")
    path = next(path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].repeat(2)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    said = fetch(stages, candidate(hub, "wide", folder), code=13)
    assert "org/wide is another model: model.norm has 512 weights, and the model's has 256" in said


def test_a_fetch_that_was_cut_goes_on_where_it_stopped(hub: HubServer, stages: Stages, int8: Path) -> None:
    sound = candidate(hub, "sound", int8)
    hub.fail("*/org/sound/resolve/*.safetensors", 503, times=None)
    fetch(stages, sound, code=75)
    assert outcome(stages, "sound")["result"] == "failed"
    hub.heal()
    fetch(stages, sound)
    assert outcome(stages, "sound")["result"] == "done"
