from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from stages.parts.base.errors import DamagedModel, InvalidName, UnusableModel
from stages.parts.model.checkpoint import (
    INDEX,
    card_license,
    check,
    check_configuration,
    chosen,
    likely_weights,
    small_files,
    weight_files,
)
from stages.parts.model.safetensors import find_not_finite, read_header
from tests.hub.models import CONFIG, sharded_model, tiny_model, weights, write_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def index(weight_map: object) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


# The files of a model


def test_a_model_in_one_file_needs_no_index(tmp_path: Path) -> None:
    files = write_model(tmp_path, tiny_model(**{INDEX: index({"embed": "gone.safetensors"})}))
    names = {path.name for path in files.iterdir()}
    assert weight_files(names, tmp_path) == likely_weights(names - {INDEX}) == ["model.safetensors"]
    assert chosen(small_files(names), ["model.safetensors"]) == sorted(tiny_model())


def test_the_index_names_the_shards(tmp_path: Path) -> None:
    write_model(tmp_path, sharded_model())
    names = [*sharded_model(), "model-00003-of-00002.safetensors"]
    assert weight_files(names, tmp_path) == list(SHARDS)
    assert chosen(small_files(names), SHARDS) == sorted(sharded_model())


LAYOUT = "in the Transformers layout"
REFUSED: dict[str, tuple[set[str], str, str]] = {
    "pickles": ({"config.json", "tokenizer.json", "pytorch_model.bin"}, "only pickles", "a pickle can run any code"),
    "consolidated": (
        {"config.json", "tokenizer.json", "consolidated.safetensors"},
        "only safetensors in another layout",
        LAYOUT,
    ),
    "gguf": ({"config.json", "tiny.gguf"}, "only GGUF, for llama.cpp", "serve the file with llama.cpp"),
    "nothing": ({"config.json"}, "no weights: no model.safetensors or", LAYOUT),
    "adapter": ({"adapter_config.json", "adapter_model.safetensors"}, "adapter", "merge it into its base model"),
    "no tokenizer": (set(tiny_model()) - {"tokenizer.json"}, "no tokenizer", "add the tokenizer's files"),
    "half a tokenizer": (
        set(tiny_model()) - {"tokenizer.json"} | {"vocab.json"},
        "no tokenizer",
        "add the tokenizer's files",
    ),
    "no config": (set(tiny_model()) - {"config.json"}, "no config.json", LAYOUT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_repository_without_what_serving_needs_is_refused(case: str) -> None:
    names, message, hint = REFUSED[case]
    with pytest.raises(UnusableModel, match=message) as refused:
        small_files(names)
    assert hint in refused.value.hint


@pytest.mark.parametrize("tokenizer", [{"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"}])
def test_each_kind_of_tokenizer_is_enough(tokenizer: set[str]) -> None:
    assert tokenizer <= set(small_files(set(tiny_model()) - {"tokenizer.json"} | tokenizer))


@pytest.mark.parametrize("prefix", ["../", "/", "a/../../", "..\\", "x\n/"])
@pytest.mark.parametrize("name", ["config.json", "x.safetensors"])
def test_a_needed_file_outside_the_repository_is_refused_or_ignored(prefix: str, name: str) -> None:
    names = {*tiny_model(), prefix + name}
    if prefix == "..\\" and name == "config.json":  # here a file name with a backslash, which is not a needed file
        assert small_files(names) == small_files(tiny_model())
    else:
        with pytest.raises(InvalidName, match="unsafe name"):
            small_files(names)


def test_an_unsafe_name_of_an_unneeded_file_is_ignored() -> None:
    assert small_files({*tiny_model(), "Screenshot 1.00 PM.png", "assets/../x"}) == small_files(tiny_model())


def test_an_index_counts_only_if_its_shards_exist(tmp_path: Path) -> None:
    def shards(weight_map: object, names: set[str]) -> list[str]:
        write_model(tmp_path, {INDEX: index(weight_map)})
        return weight_files({INDEX, *names}, tmp_path)

    with pytest.raises(DamagedModel, match=r"names b\.safetensors, which the repository does not have"):
        shards({"x": "a.safetensors", "y": "b.safetensors"}, {"a.safetensors"})
    with pytest.raises(InvalidName, match="unsafe name"):
        shards({"x": "../a.safetensors"}, {"../a.safetensors"})
    with pytest.raises(UnusableModel, match="is not a safetensors file"):
        shards({"x": "a.bin"}, {"a.bin"})
    nothing: object
    for nothing in ({}, [], {"x": 1}, None):
        with pytest.raises(DamagedModel, match="has no weight_map"):
            shards(nothing, set())


# The configuration

UNKNOWN = CONFIG | {"model_type": "a-strangers-own"}
CONFIGURATIONS: dict[str, tuple[dict[str, bytes], type[Exception], str]] = {
    "own code": ({"config.json": json.dumps(UNKNOWN | {"auto_map": {}}).encode()}, UnusableModel, "own code"),
    "own tokenizer": (
        {"config.json": json.dumps(UNKNOWN).encode(), "tokenizer_config.json": b'{"auto_map": {}}'},
        UnusableModel,
        "in tokenizer_config.json",
    ),
    "quantized": (
        {"config.json": json.dumps(CONFIG | {"quantization_config": {"quant_method": "hqq"}}).encode()},
        UnusableModel,
        "the model is quantized by hqq, which slipway can't serve",
    ),
    "no architecture": ({"config.json": b"{}"}, UnusableModel, "names no 'architectures'"),
    "empty architecture": ({"config.json": b'{"architectures": [], "model_type": "x"}'}, UnusableModel, "names no"),
    "a page": ({"config.json": b"<html>oops</html>"}, DamagedModel, "config.json is not JSON"),
    "a list": ({"config.json": b"[]"}, DamagedModel, "config.json is not a JSON object"),
    "too deep": ({"config.json": b"[" * 100_000}, DamagedModel, "config.json is not JSON"),
}


def test_a_model_that_transformers_supports_may_still_have_an_auto_map(tmp_path: Path) -> None:
    write_model(tmp_path, {"config.json": json.dumps(CONFIG | {"auto_map": {"AutoModel": "x.Y"}}).encode()})
    assert check_configuration(tmp_path) == "LlamaForCausalLM"


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_an_unusable_configuration_is_refused(tmp_path: Path, case: str) -> None:
    files, kind, message = CONFIGURATIONS[case]
    with pytest.raises(kind, match=message):
        check_configuration(write_model(tmp_path, tiny_model(**files)))


def test_a_null_quantization_counts_as_none(tmp_path: Path) -> None:
    config = {"config.json": json.dumps(CONFIG | {"quantization_config": None}).encode()}
    assert check_configuration(write_model(tmp_path, tiny_model(**config))) == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("card", "license_"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlicense: other\nlicense_name: llama3.1\n---\n", "llama3.1"),
        ("---\nlicense: other\n---\n", "other"),
        ("\ufeff---\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("---\ntags: [x]\n---\n", None),
        ("---\n: [\n---\n", None),
        ("---\n- a\n---\n", None),
        ("# no front matter\n---\nlicense: mit\n---\n", None),
    ],
)
def test_the_license_is_the_one_on_the_card(tmp_path: Path, card: str, license_: str | None) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert card_license(tmp_path / "README.md") == license_


def test_without_a_card_there_is_no_license(tmp_path: Path) -> None:
    assert card_license(tmp_path / "README.md") is None


# The weights


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_the_parameters_of_a_good_checkpoint_are_counted(tmp_path: Path) -> None:
    found = check(write_model(tmp_path, sharded_model()), SHARDS)
    assert (found.architecture, found.license, found.parameters) == ("LlamaForCausalLM", "apache-2.0", 128)


def test_a_header_of_the_reference_implementation_is_read(tmp_path: Path) -> None:
    tensors = {
        "scalar": np.float32(1),
        "empty": np.zeros((0, 4), np.int64),
        "bytes": np.arange(5, dtype=np.uint8),
        "half": np.ones((2, 3), np.float16),
    }
    save_file({name: np.asarray(value) for name, value in tensors.items()}, tmp_path / "x", metadata={"format": "pt"})
    header = read_header(tmp_path / "x")
    assert {name: (each.dtype, each.shape, each.count) for name, each in header.items()} == {
        "scalar": ("F32", (), 1),
        "empty": ("I64", (0, 4), 0),
        "bytes": ("U8", (5,), 5),
        "half": ("F16", (2, 3), 6),
    }
    content = (tmp_path / "x").read_bytes()
    half = header["half"]
    assert content[half.start : half.end] == np.ones((2, 3), np.float16).tobytes()


@pytest.mark.parametrize("kept", [0, 7, 8, 50, -1, -40])
def test_the_error_names_a_truncated_shard_and_its_size(tmp_path: Path, kept: int) -> None:
    content = weights("embed")[:kept]
    write_model(tmp_path, sharded_model(**{SHARDS[1]: content}))
    with pytest.raises(DamagedModel, match=rf"{SHARDS[1]} is truncated.*: {len(content)} bytes, its header") as damaged:
        check(tmp_path, SHARDS)
    assert "try another --revision" in damaged.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>not found</html>", "truncated or not a safetensors file"),
        (with_header(b"{nonsense"), "header does not parse"),
        (with_header([]), "header does not parse"),
        (with_header({"a": {}}), "header does not parse"),
        (with_header({"a": entry(0, -4, [1])}), "header does not parse"),
        (with_header({"a": entry(0, 4, ["1"])}), "header does not parse"),  # type: ignore[list-item]
        (with_header({"a": entry(0, 8, [1])}, bytes(8)), "tensor a is not where the header says"),
        (with_header({"a": entry(4, 8, [1])}, bytes(8)), "tensor a is not where the header says"),
        (
            with_header({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
            "tensor b is not where the header says",
        ),
        (with_header({"a": entry(0, 4, [1])}, bytes(9)), "has bytes that belong to no tensor"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedModel, match=message):
        read_header(tmp_path / "x")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_damaged_model(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.flush()
        with contextlib.suppress(DamagedModel):
            assert read_header(Path(file.name)) == {}


def test_the_error_names_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_model(tmp_path, sharded_model(**{SHARDS[0]: weights("other")}))
    with pytest.raises(DamagedModel, match=f"{SHARDS[0]} lacks tensor embed, which"):
        check(tmp_path, SHARDS)


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_model(**{"model.safetensors": save({"none": np.zeros((0, 4), np.float32)})}))
    with pytest.raises(DamagedModel, match="holds no weights"):
        check(tmp_path, ["model.safetensors"])


def stored(kind: str, values: np.ndarray) -> bytes:
    """The bytes of the values in a safetensors type; bfloat16 is the upper half of a float32."""
    if kind == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[kind]).tobytes()


def first_not_finite(path: Path, kind: str, values: np.ndarray) -> tuple[str, int] | None:
    good, bad = stored("F16", np.full(9, 3.0)), stored(kind, values)
    header = {"ok": entry(0, 18, [9], "F16"), "bad": entry(18, 18 + len(bad), list(values.shape), kind)}
    path.write_bytes(with_header(header, good + bad))
    found = find_not_finite(iter(read_header(path).values()))
    return (found[0].name, found[1]) if found else None


KINDS = {"F16": 65504.0, "BF16": 3.38e38, "F32": 3.4e38, "F64": 1.79e308}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_in_every_type(tmp_path: Path, kind: str, value: float) -> None:
    values = np.ones((5, 7))
    values[2, 3] = value
    values[4, 6] = value
    assert first_not_finite(tmp_path / "x", kind, values) == ("bad", 17)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_and_smallest_numbers_are_finite(tmp_path: Path, kind: str) -> None:
    extremes = np.array([KINDS[kind], -KINDS[kind], 1e-45, -1e-45, 0.0, -0.0, 1.0])
    assert first_not_finite(tmp_path / "x", kind, extremes) is None


def test_a_value_far_into_a_large_tensor_is_found(tmp_path: Path) -> None:
    large = np.zeros(9 << 20, np.float32)
    large[-5] = np.nan
    save_file({"large": large}, tmp_path / "x")
    found = find_not_finite(iter(read_header(tmp_path / "x").values()))
    assert found is not None
    assert found[1] == (9 << 20) - 5


def test_a_large_checkpoint_is_checked_in_little_memory(tmp_path: Path) -> None:
    header = json.dumps({"large": entry(0, 1 << 30, [1 << 28])}).encode()
    with (tmp_path / "x").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))  # a sparse file
    program = (
        "import pathlib, resource, sys; from stages.parts.model.safetensors import *; path = pathlib.Path(sys.argv[1]);"
        "import numpy; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "assert find_not_finite(iter(read_header(path).values())) is None;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    root = Path(__file__).parents[4]
    grown_kib = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert int(grown_kib) < 200 * 1024
