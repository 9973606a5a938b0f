"""Models and settings made to attack: each is refused or read at once, with little memory, and leads nowhere."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.settings.config import load
from scoring.capacity.architecture import NotSizeable
from scoring.capacity.families import read_architecture
from stages.evaluate.trace import read_trace
from stages.parts.base.errors import ConfigError, DamagedModel, InvalidName, SlipwayError, UnusableModel
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import from_yaml, read_yaml
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.sides import first_messages
from stages.parts.model.adapter import Adapter, max_lora_rank, refuse_misfit
from stages.parts.model.candidates import compare
from stages.parts.model.checkpoint import (
    INDEX,
    card_license,
    check_configuration,
    config_in,
    parse_object,
    read_config,
    weight_files,
)
from stages.parts.model.description import Description, chat_template, describe_directory
from stages.parts.model.hub import _SmallFile
from stages.parts.model.safetensors import read_header
from stages.parts.vllm.parsers import chat_model, chosen_parsers
from tests.fuzz.feeding import bounded_memory, watched
from tests.hub.models import CONFIG, tiny_model, write_model

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 5_000
LAUGHS = "\n".join(["a0: &a0 [ha, ha]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
"""As `Billion laughs <https://en.wikipedia.org/wiki/Billion_laughs_attack>`_."""


@pytest.fixture(autouse=True)
def small_and_here(tmp_path: Path):
    import transformers.models.auto.configuration_auto  # noqa: F401 - which takes seconds

    with bounded_memory(), watched(tmp_path, names_files=False):
        yield


def weights(folder: Path, header: str | bytes, length: int | None = None, size: int = 0) -> Path:
    raw = header.encode() if isinstance(header, str) else header
    path = folder / "model.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw)
    if size:
        os.truncate(path, size)  # sparse: it takes no space
    return path


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/../../tokenizer.json", "a\\b.safetensors", "\n.safetensors"],
)
def test_a_file_whose_name_escapes_refuses_the_repository(name: str) -> None:
    with pytest.raises(InvalidName, match="unsafe name"):
        read_config([*tiny_model(), name], lambda _: json.dumps(CONFIG).encode())


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/x.safetensors", "x.bin", "x\n.safetensors"])
def test_an_index_names_only_weights_beside_it(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(SlipwayError):
        weight_files(["config.json", INDEX, shard], tmp_path)


@pytest.mark.parametrize("length", [2**24, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_gigabytes_is_not_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(DamagedModel, match="its header alone needs"):
        read_header(weights(tmp_path, "{}", length, size=min(length + 8, 2**33) if length > 2**24 else 0))


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        json.dumps({"a": {"dtype": "F32", "shape": [9_999_999] * 100_000, "data_offsets": [0, 0]}}),
        json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 2**125]}}),
        json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}',
        b"\xff" * 100,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: str | bytes) -> None:
    began = time.process_time()
    with pytest.raises(DamagedModel):
        read_header(weights(tmp_path, header))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX])
def test_a_small_file_of_terabytes_is_not_read(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, tiny_model() | {name: b"{}"})
    os.truncate(tmp_path / name, 2**40)
    read = partial(weight_files, [INDEX]) if name == INDEX else check_configuration
    with pytest.raises(DamagedModel, match="has 1099511627776 bytes"):
        read(tmp_path)
    (tmp_path / "chat_template.jinja").touch()
    os.truncate(tmp_path / "chat_template.jinja", 2**40)
    assert chat_template(tmp_path) == ""


def test_a_small_file_of_gigabytes_is_not_taken_from_the_hub() -> None:
    content, block = _SmallFile(), bytes(10 << 20)
    for _ in range(25):
        content.write(block)
    with pytest.raises(DamagedModel, match="has gigabytes"):
        content.write(block)


def test_a_sparse_file_is_not_taken_for_a_model(tmp_path: Path) -> None:
    with pytest.raises(DamagedModel, match="bytes that belong to no tensor"):
        read_header(weights(tmp_path, "{}", size=2**40))


def test_a_name_with_what_a_terminal_obeys_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    header = {"\x1b]0;owned\x07\ud800\n": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}
    with pytest.raises(DamagedModel) as refused:
        read_header(weights(tmp_path, json.dumps(header)))
    assert "\\x1b]0;owned\\x07\\ud800" in refused.value.render()
    long = {"x" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}
    with pytest.raises(DamagedModel) as cut:
        read_header(weights(tmp_path, json.dumps(long)))
    assert len(cut.value.render()) < 20_000


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": "a"},
        {"text_config": [1]},
        {"quantization_config": {"quant_method": "gptq", "bits": 0, "group_size": 128}},
        {"quantization_config": {"quant_method": "gptq", "bits": "4", "group_size": 128}},
        {"auto_map": {"AutoModel": "x.Y"}, "model_type": "no-such-type"},
    ],
)
def test_a_configuration_of_other_types_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    write_model(tmp_path, tiny_model(**{"config.json": json.dumps(CONFIG | changes).encode()}))
    with pytest.raises(SlipwayError):
        describe_directory(tmp_path, "./model")


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("count", [10**13, 10**400])
def test_a_count_that_would_take_forever_is_refused(field: str, count: int) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 8, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 8}
    assert read_architecture(CONFIG | sizes)
    with pytest.raises(NotSizeable):
        read_architecture(CONFIG | sizes | {field: count})


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in range(10**9) %}{{ x }}{% endfor %} tools",
        "{{ ''.__class__.__mro__[1].__subclasses__() }} tools",
        "{{ cycler.__init__.__globals__.os.system('touch owned') }} tools",
        "{% include '/etc/passwd' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        DEEP,
    ],
)
def test_a_chat_template_is_read_and_never_rendered(tmp_path: Path, template: str) -> None:
    files = {"chat_template.jinja": template.encode(), "tokenizer_config.json": DEEP.encode()}
    write_model(tmp_path, tiny_model(**files))
    assert chat_template(tmp_path) == template
    chosen_parsers(AskedServing(), chat_model(tmp_path))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "tokenizer",
    ["", "[]", DEEP, '{"model": 1}', '{"model": {"vocab": [1]}}', '{"added_tokens": [{}]}', '{"added_tokens": 1}'],
)
def test_a_tokenizer_that_is_none_refuses_the_candidate(tmp_path: Path, tokenizer: str) -> None:
    ours, theirs = (write_model(tmp_path / name, tiny_model()) for name in ("ours", "theirs"))
    (theirs / "tokenizer.json").write_text(tokenizer)
    described = [Description("org/name", None, {}, None, directory=folder) for folder in (ours, theirs)]
    with pytest.raises(DamagedModel, match=r"tokenizer\.json is not a tokenizer's"):
        compare(*described)


def test_a_tokenizer_that_would_loop_is_not_run(tmp_path: Path) -> None:
    """Its pattern takes exponential time, once something encodes with it."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    looping = {"model": {"vocab": {"a": 0}}, "pre_tokenizer": split, "added_tokens": []}
    ours, theirs = (write_model(tmp_path / name, tiny_model()) for name in ("ours", "theirs"))
    for folder, content in ((ours, {"model": {"vocab": {"a": 0}}}), (theirs, looping)):
        (folder / "tokenizer.json").write_text(json.dumps(content))
    assert compare(*(Description("o/n", None, {}, None, directory=folder) for folder in (ours, theirs))) == ""


@pytest.mark.parametrize(
    "front",
    [
        "license: mit\ndate: 2024-13-45",
        f"{LAUGHS}\nlicense: *a11",
        f"license: {NESTED}",
        "license: !!timestamp x",
        "a: *b",
    ],
)
def test_a_model_card_with_a_trap_has_no_license(tmp_path: Path, front: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    assert card_license(tmp_path / "README.md") is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    os.truncate(tmp_path / "README.md", 2**33)
    assert card_license(tmp_path / "README.md") == "mit"


@pytest.mark.parametrize(
    "text", [LAUGHS, NESTED, "a: 2024-13-45", "a: &a [*a]", "a: !!int x", "a: !!python/name:os.system"]
)
def test_settings_with_a_trap_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(tmp_path / "mine.yaml")


def test_aliases_as_people_use_them_are_read() -> None:
    assert from_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}\ne: [*a, *a]") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
        "e": [{"b": 1}, {"b": 1}],
    }


def test_a_value_and_a_name_that_nobody_would_choose_are_refused() -> None:
    with pytest.raises(ConfigError, match="workload"):
        load(chosen={"workload": "x" * 5_000})
    assert load(assignments=["workload.name=2024-13-45"]).workload.name == "2024-13-45"


def test_an_adapter_of_other_types_is_refused() -> None:
    assert max_lora_rank({"r": 8, "rank_pattern": "q_proj"}) == 0
    shapes: dict[str, tuple[int, ...]] = {"base_model.model.lm_head.base_layer.weight": ()}
    with pytest.raises(UnusableModel, match="its vocabulary was changed"):
        refuse_misfit(Adapter("org/adapter", {}, shapes), {"lm_head.weight": (8, 8)}, "org/base")


def test_json_nested_without_end_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(DamagedModel, match=r"config\.json is not JSON"):
        parse_object(DEEP.encode(), "config.json")
    (tmp_path / "config.json").write_text(DEEP)
    assert config_in(tmp_path) == {}


def test_a_trace_and_requests_nested_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(f'{DEEP}\n{{"prompt": "\\ud800", "output_tokens": 1}}')
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        read_trace(tmp_path / "trace.jsonl")
    door = Door(tmp_path, "org/name", "")
    assert door.decide_model("ours", DEEP.encode()).status == 403
    door.shared = ("org/name",)
    assert door.answer_shared("POST", "", DEEP.encode()).status_code == 400
    assert first_messages('{"messages": ' + DEEP).startswith("[")
