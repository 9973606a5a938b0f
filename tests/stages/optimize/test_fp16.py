from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.optimize.ensure import ensure
from stages.parts.base.errors import DamagedModel, NothingToServe, QuantizationFailed, UnknownName, UnusableModel
from stages.parts.base.formats import FORMATS
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.machine.lock import LOCK_VARIABLE, alone
from stages.parts.records.acquired import ACQUIRED
from stages.parts.records.variant import VARIANT
from tests.serving import wait_until, waits_for
from tests.stages.optimize.tiny import LICENSE, acquire, llama, optimize, publish, record_base, variant

ACQUIRE = "run acquire again: python -m stages.acquire --model test/tiny"
REMOVE = "remove the directory that holds it and run again"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def with_weights(source: Path, root: Path, weights: dict[str, torch.Tensor]) -> ModelStore:
    """The model of *source* with these weights in one file."""
    store = acquire(source, root)
    for path in store.base.glob("model*"):
        path.unlink()
    save_file(weights, store.base / "model.safetensors")
    record_base(store)
    return store


def test_a_16_bit_base_is_its_own_reference_byte_for_byte(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    ended = optimize(store, "fp16", {}, SLIPWAY_OUTPUTS=str(tmp_path / "outputs"))
    assert ended.status == 0, ended.stderr
    made, record = store.optimized("fp16"), variant(store, "fp16")
    assert ended.stdout.strip() == record.digest == (tmp_path / "outputs" / "digest").read_text()
    assert sorted(path.name for path in made.glob("*.safetensors")) == SHARDS
    for name in (*SHARDS, "model.safetensors.index.json"):
        assert (made / name).read_bytes() == (tiny / name).read_bytes()
        assert (made / name).stat().st_ino == (store.base / name).stat().st_ino, "no space is taken"
    assert (record.bits, record.dtype, record.calibration_digest) == (16, "bfloat16", None)
    assert record.weights_bytes == sum(each.nbytes for each in tensors(made).values())
    assert record.stored == {"bfloat16": record.weights_bytes}
    assert record.peak_memory_bytes < 200 << 20


def test_no_variant_is_made_during_a_measurement_on_the_same_machine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = acquire(tiny, tmp_path)
    lock = tmp_path / "machine.lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))
    with ThreadPoolExecutor() as pool:
        with alone("evaluate fp16 of org/other"):
            ended = pool.submit(optimize, store, "fp16", {})
            wait_until(lambda: waits_for(lock), "the program waits for its turn")
            assert not store.optimized("fp16").exists()
        assert ended.result().status == 0, ended.result().stderr
    assert "waiting for evaluate fp16 of org/other" in ended.result().stderr
    assert store.optimized("fp16").exists()


def test_a_float16_base_stays_float16(tiny: Path, tmp_path: Path) -> None:
    weights = {"odd": torch.rand(3).half(), "bias": torch.rand(1)}
    store = with_weights(tiny, tmp_path, weights)
    record, _ = ensure(store, "fp16", Optimize())
    made = tensors(store.optimized("fp16"))
    assert all(torch.equal(made[name], each) and made[name].dtype == each.dtype for name, each in weights.items())
    assert (record.dtype, record.stored) == ("float16", {"float16": 6, "float32": 4})


def test_a_variant_made_by_the_former_rule_is_made_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = acquire(tiny, tmp_path)
    with monkeypatch.context() as formerly:
        formerly.setattr("stages.optimize.fp16.RECIPE", 1)
        assert [ensure(store, "fp16", Optimize())[1] for _ in range(2)] == [True, False]
    assert [ensure(store, "fp16", Optimize())[1] for _ in range(2)] == [True, False]


def test_the_index_and_the_config_of_a_wider_base_say_bfloat16(tiny: Path, tmp_path: Path) -> None:
    store = acquire(publish(tmp_path / "wide", llama(), dtype="float32", shard_size="600KB"), tmp_path / "store")
    record, _ = ensure(store, "fp16", Optimize())
    index = json.loads((store.optimized("fp16") / "model.safetensors.index.json").read_text())
    before = json.loads((store.base / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == before["weight_map"]
    assert index["metadata"]["total_size"] == record.weights_bytes == before["metadata"]["total_size"] // 2
    config = json.loads((store.optimized("fp16") / "config.json").read_text())
    assert config == {**json.loads((store.base / "config.json").read_text()), "dtype": "bfloat16"}


def test_all_other_files_are_copied_unchanged(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    record, _ = ensure(store, "fp16", Optimize())
    carried = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"}
    names = {file.path for file in record.files}
    assert names == {*carried, *SHARDS, "config.json", "model.safetensors.index.json"}
    for name in carried:
        assert (store.optimized("fp16") / name).read_bytes() == (tiny / name).read_bytes()
    assert (store.optimized("fp16") / "LICENSE").read_text() == LICENSE
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in store.optimized("fp16").iterdir())


def test_an_older_config_with_parts_changes_every_dtype_that_it_has(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    config = json.loads((store.base / "config.json").read_text())
    del config["dtype"]
    config |= {"torch_dtype": "float32", "text_config": {"torch_dtype": "float32", "hidden_size": 128}}
    (store.base / "config.json").write_text(json.dumps(config))
    record_base(store)
    ensure(store, "fp16", Optimize())
    made = json.loads((store.optimized("fp16") / "config.json").read_text())
    assert made == {**config, "torch_dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "hidden_size": 128}}


def test_tensors_that_are_not_floating_point_stay_unchanged(tiny: Path, tmp_path: Path) -> None:
    odd = {
        "odd": torch.rand(3),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "wide": torch.rand(2).double(),
    }
    store = with_weights(tiny, tmp_path, odd | {"scalar": torch.tensor(0.5), "empty": torch.zeros(0, 4)})
    ensure(store, "fp16", Optimize())
    made = tensors(store.optimized("fp16"))
    assert torch.equal(made["ids"], odd["ids"])
    assert torch.equal(made["mask"], odd["mask"])
    assert torch.equal(made["odd"], odd["odd"].bfloat16())
    assert torch.equal(made["wide"], odd["wide"].float().bfloat16())
    assert made["scalar"].item() == 0.5
    assert made["empty"].shape == (0, 4)


def test_a_wider_base_is_rounded_as_torch_rounds_whatever_the_size_of_a_weight(tiny: Path, tmp_path: Path) -> None:
    edges = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 7e4, -3e38, 1e-40, 0.0, -0.0])
    weights = torch.cat([edges, torch.randn(10_000, generator=torch.Generator().manual_seed(0))])
    store = with_weights(tiny, tmp_path, {"model.weight": weights})
    ensure(store, "fp16", Optimize())
    made = tensors(store.optimized("fp16"))["model.weight"]
    assert torch.equal(made.view(torch.int16), weights.bfloat16().view(torch.int16))


def test_the_error_names_a_weight_beyond_bfloat16_and_nothing_is_published(tiny: Path, tmp_path: Path) -> None:
    store = with_weights(tiny, tmp_path, {"fits": torch.tensor([65504.0]), "model.big.weight": torch.tensor([3.4e38])})
    ended = optimize(store, "fp16", {})
    assert ended.status == QuantizationFailed.exit_code
    assert ended.error.startswith("error: bfloat16 cannot hold model.big.weight: it has a weight of 3.4e+38")
    assert "hint: " in ended.error
    assert not store.optimized("fp16").exists()


def test_a_repeated_run_finds_the_variant_without_loading_anything(tiny: Path, tmp_path: Path, settings: Any) -> None:
    store = acquire(tiny, tmp_path)
    assert optimize(store, "fp16", settings).status == 0
    created = variant(store, "fp16").created_at
    again = optimize(store, "fp16", settings, "-X", "importtime", SLIPWAY_RUN="r1")
    assert again.status == 0
    assert "reused: fp16: 16 bit" in again.stderr
    assert not {"torch", "transformers", "gptqmodel", "numpy"} & {
        line.rpartition("|")[2].strip().partition(".")[0] for line in again.stderr.splitlines()
    }
    assert variant(store, "fp16").created_at == created
    outcome = json.loads((store.run("r1") / "outcomes" / "optimize-fp16.json").read_text())
    assert (outcome["result"], outcome["key"]) == ("reused", variant(store, "fp16").key)


def test_the_same_base_gives_the_same_digest_in_every_store(tiny: Path, tmp_path: Path) -> None:
    first, made = ensure(acquire(tiny, tmp_path / "a"), "fp16", Optimize())
    second, _ = ensure(acquire(tiny, tmp_path / "b"), "fp16", Optimize())
    assert made
    assert (first.digest, first.key) == (second.digest, second.key)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no record"])
def test_a_damaged_variant_is_made_again(tiny: Path, tmp_path: Path, damage: str) -> None:
    store = acquire(tiny, tmp_path)
    before, _ = ensure(store, "fp16", Optimize())
    file = store.optimized("fp16") / (VARIANT if damage == "no record" else SHARDS[0])
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.unlink()  # a shard is shared with base/
        file.write_bytes(content[:100])
    after, made = ensure(store, "fp16", Optimize())
    assert made
    assert after.digest == before.digest
    assert ensure(store, "fp16", Optimize()) == (after, False)


def test_a_new_base_makes_a_new_variant(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    before, _ = ensure(store, "fp16", Optimize())
    (store.base / "LICENSE").write_text("Do as you must.\n")
    record_base(store)
    after, made = ensure(store, "fp16", Optimize())
    assert made
    assert after.key != before.key


def test_the_error_for_a_missing_base_says_to_acquire(tmp_path: Path) -> None:
    ended = optimize(ModelStore(tmp_path, "test/tiny"), "fp16", {})
    assert ended.status == NothingToServe.exit_code
    assert ended.error == (
        "error: test/tiny is not in the store: there is no base/acquired.json\n"
        "  hint: run acquire again: python -m stages.acquire --model test/tiny"
    )


@pytest.mark.parametrize(
    ("name", "content", "said", "hint"),
    [
        (SHARDS[1], b"short", "has 5 bytes", ACQUIRE),
        ("tokenizer.json", None, "tokenizer.json is missing", ACQUIRE),
        (ACQUIRED, b"{}", "not a valid Acquired record", REMOVE),
        (ACQUIRED, b"\xff", "not a valid Acquired record", REMOVE),
    ],
)
def test_a_base_that_does_not_match_its_record_is_refused(
    tiny: Path, tmp_path: Path, name: str, content: bytes | None, said: str, hint: str
) -> None:
    store = acquire(tiny, tmp_path)
    if content is None:
        (store.base / name).unlink()
    else:
        (store.base / name).write_bytes(content)
    with pytest.raises(DamagedModel, match=said) as caught:
        ensure(store, "fp16", Optimize())
    assert caught.value.hint == hint


def test_an_edited_record_is_refused(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    record = json.loads((store.base / ACQUIRED).read_text())
    record["files"] = record["files"][1:]
    (store.base / ACQUIRED).write_text(json.dumps(record))
    with pytest.raises(DamagedModel, match="contradicts itself"):
        ensure(store, "fp16", Optimize())


def test_a_model_that_is_already_quantized_is_refused(tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    config = json.loads((store.base / "config.json").read_text())
    (store.base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    record_base(store)
    with pytest.raises(UnusableModel, match=r"quantized.*awq"):
        ensure(store, "fp16", Optimize())


def test_the_error_for_an_unknown_method_lists_the_known_methods(tiny: Path, tmp_path: Path) -> None:
    ended = optimize(acquire(tiny, tmp_path), "gtpq", {})
    assert ended.status == UnknownName.exit_code
    assert (
        ended.error == f"error: unknown method 'gtpq'\n  hint: did you mean 'gptq'? known: {', '.join(sorted(FORMATS))}"
    )


def test_the_error_names_all_wrong_settings(tiny: Path, tmp_path: Path) -> None:
    ended = optimize(acquire(tiny, tmp_path), "fp16", {"group_size": 100, "calibraton": {}})
    assert ended.status == 2
    assert "2 mistakes in --settings" in ended.error
    assert "did you mean 'calibration'?" in ended.error
