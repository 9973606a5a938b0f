"""What ``slipway store check`` finds, and what ``du`` counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.upkeep import checking
from pipeline.upkeep.checking import Checked, Digests, check
from pipeline.upkeep.contents import models_in, space
from stages.parts.base.errors import ConfigError, UnknownName
from stages.parts.base.files import exclusive
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import SAMPLES_SUFFIX
from stages.parts.records.variant import VARIANT
from stages.parts.releases.release import current_release
from tests.samples import MODEL


def checked(store: ModelStore) -> Checked:
    return check(store, Digests())


def flip(path: Path) -> None:
    """Change one byte in place, as a bad disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_sound_store_is_read_whole_and_every_shared_file_once(store: ModelStore) -> None:
    result = checked(store)
    assert (result.damaged, result.unreferenced) == ((), ())
    weights = {
        path.stat().st_ino: path.stat().st_size for path in store.path.rglob("*") if path.suffix == ".safetensors"
    }
    samples = {
        path.stat().st_ino: path.stat().st_size for path in store.path.rglob("*") if path.name.endswith(SAMPLES_SUFFIX)
    }
    configs = {path.stat().st_ino: path.stat().st_size for path in store.path.rglob("config.json")}
    read = weights | samples | configs
    assert (result.files, result.size_bytes) == (len(read), sum(read.values()))


def test_one_byte_of_what_is_in_production_names_the_release_and_the_way_back(store: ModelStore) -> None:
    release = current_release(store)
    flip(store.optimized("awq") / "model.safetensors")
    (damage,) = checked(store).damaged
    assert damage.paths == ("optimized/awq/model.safetensors", f"releases/{release}/model.safetensors")
    assert damage.releases == (release,)
    assert f"slipway rollback {MODEL}" in damage.hint


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("base/model.safetensors", "remove base and run again"),
        ("optimized/gptq/config.json", "remove optimized/gptq and run again"),
        (f"evaluations/gptq{SAMPLES_SUFFIX}", "remove evaluations/gptq"),
        (f"runs/run-1/measurements/gptq{SAMPLES_SUFFIX}", "its decision can't be verified"),
    ],
)
def test_one_altered_or_missing_file_is_found_and_what_to_do_is_said(store: ModelStore, path: str, hint: str) -> None:
    file = store.path / path
    content = file.read_bytes()
    file.unlink()  # what links to it stays sound
    file.write_bytes(content)
    assert checked(store).damaged == ()
    flip(file)
    (altered,) = checked(store).damaged
    assert (altered.paths, altered.releases) == ((path,), ())
    assert "sha256" in altered.problem
    assert hint in altered.hint
    file.unlink()
    (missing,) = checked(store).damaged
    assert (missing.paths, "is missing" in missing.problem) == ((path,), True)


def test_records_that_are_cut_or_altered_and_a_link_to_nowhere_are_damage(store: ModelStore) -> None:
    record = store.optimized("gptq") / VARIANT
    record.write_text(record.read_text().replace('"size_bytes": 2,', '"size_bytes": 3,', 1))
    (store.optimized("fp16") / VARIANT).write_text("{")
    (store.run("run-1") / "decision.json").write_bytes(b"{")
    store.production.unlink()
    store.production.symlink_to("releases/0009-awq-aaaaaaaaaaaa")
    problems = {damage.paths[0]: damage.problem for damage in checked(store).damaged}
    assert "was altered" in problems[f"optimized/gptq/{VARIANT}"]
    assert "not a valid Variant record" in problems[f"optimized/fp16/{VARIANT}"]
    assert "not valid JSON" in problems["runs/run-1/decision.json"]
    assert "leads to releases/0009-awq-aaaaaaaaaaaa" in problems["production"]
    assert len(problems) == 4


def test_what_nobody_refers_to_is_listed_but_not_what_is_being_made(store: ModelStore) -> None:
    for name in ("optimized/awq/more.bin", "unknown", ".building/base/commit/model.safetensors"):
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_text("12345")
    with exclusive(store.lock("base"), "acquire"):
        result = checked(store)
        assert (result.unreferenced, result.unreferenced_bytes) == (("optimized/awq/more.bin", "unknown"), 10)
    assert ".building/base/commit/model.safetensors" in checked(store).unreferenced
    assert checked(store).damaged == ()


def test_space_counts_what_is_linked_once(store: ModelStore) -> None:
    before = space(store)
    size = sum(path.stat().st_size for path in store.optimized("awq").iterdir())
    files = {path.stat().st_ino: path.stat().st_size for path in store.path.rglob("*") if path.is_file()}
    assert before.total == sum(files.values())
    record = sum(
        path.stat().st_size for path in store.production.resolve().glob("*.json") if path.name != "config.json"
    )
    assert before.releases == record
    (store.optimized("awq") / "model.safetensors").unlink()  # the release alone has it now
    assert space(store).releases == record + len("weights of awq")
    assert size > len("weights of awq")


def test_a_store_or_a_model_that_is_not_there_is_an_error(store: ModelStore, tmp_path: Path) -> None:
    assert [each.model for each in models_in(store.root)] == [MODEL]
    with pytest.raises(ConfigError, match="there is no store"):
        models_in(tmp_path / "elsewhere")
    with pytest.raises(UnknownName, match="org/nam"):
        models_in(store.root, "org/nam")


@pytest.mark.parametrize("gone", [".aside/optimized/fp16/0123456789abcdef", ".building/base/0123456789abcdef"])
def test_a_folder_that_vanishes_while_it_is_listed_is_left_out(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    (store.path / gone / "fp16").mkdir(parents=True)
    usual = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith(gone):
            shutil.rmtree(path, ignore_errors=True)
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)
    result = checked(store)
    assert not (store.path / gone).exists()
    assert (result.damaged, result.unreferenced) == ((), ())


def test_a_file_that_vanishes_once_it_is_listed_does_not_end_the_check(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = store.path / ".building" / "base" / "left"
    left.parent.mkdir(parents=True)
    left.write_text("four")

    def vanishes(_: ModelStore, path: Path) -> bool:
        if path == left:
            path.unlink()
        return False

    monkeypatch.setattr(checking, "_in_work", vanishes)
    result = checked(store)
    assert (result.unreferenced, result.unreferenced_bytes) == ((".building/base/left",), 4)
