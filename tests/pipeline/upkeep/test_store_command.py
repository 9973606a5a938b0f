"""``slipway store`` as a person calls it, and the endpoint after the loss of its store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import endpoint, stop
from stages.parts.vllm.client import healthy
from tests.samples import MODEL
from tests.serving import ROLLOUT, SERVING, environment, publish, stage, stand_in_variant


def slipway(store: ModelStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "store", *arguments, "--store", str(store.root)]
    return subprocess.run(command, env=environment(store), capture_output=True, text=True, check=False)


def test_a_sound_store_is_shown_and_checked(store: ModelStore) -> None:
    shown = slipway(store, "du")
    assert shown.stdout.splitlines()[0].split()[:4] == ["Model", "Base", "Variants", "Releases"]
    assert shown.stdout.splitlines()[1].split()[0] == MODEL
    (counted,) = json.loads(slipway(store, "du", MODEL, "--json").stdout)
    assert counted["base"] == sum(path.stat().st_size for path in store.base.iterdir())
    assert counted["shared"] >= len("weights of awq")
    checked = slipway(store, "check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert f"{MODEL}: " in checked.stdout
    assert "0 damaged" in checked.stdout


def test_damage_is_shown_with_the_release_and_exit_code_14(store: ModelStore) -> None:
    weights = store.optimized("awq") / "model.safetensors"
    weights.write_bytes(weights.read_bytes().upper())
    (store.path / "forgotten").write_text("")
    checked = slipway(store, "check")
    assert checked.returncode == 14
    for line in (f"part of {store.production.readlink().name}", f"slipway rollback {MODEL}", "forgotten"):
        assert line in checked.stdout
    assert checked.stderr.startswith(f"error: damaged: {MODEL}\n")
    (result,) = json.loads(slipway(store, "check", "--json").stdout)
    assert result["damaged"][0]["releases"] == [store.production.readlink().name]


def test_prune_needs_a_model_or_all_and_says_what_it_removed_and_freed(store: ModelStore) -> None:
    current = store.production.resolve()
    names = [f"{number:04d}-{current.name.partition('-')[2]}" for number in range(2, 6)]
    for name in names:
        shutil.copytree(current, store.releases / name)
    assert slipway(store, "prune").returncode == 2
    assert slipway(store, "prune", MODEL, "--keep", "0").returncode == 2
    assert "--older '30x' is no time" in slipway(store, "prune", "--all", "--older", "30x").stderr
    listed = slipway(store, "prune", "--all", "--keep", "2", "--dry-run")
    assert listed.stdout.startswith(f"{MODEL}: would remove {names[1]}, {names[0]}; ")
    assert len([*store.releases.iterdir()]) == 5
    removed = slipway(store, "prune", MODEL, "--keep", "2")
    assert removed.stdout.startswith(f"{MODEL}: removed {names[1]}, {names[0]}; ")
    assert {path.name for path in store.releases.iterdir()} == {current.name, *names[2:]}
    assert slipway(store, "prune", MODEL).stdout == f"{MODEL}: nothing to remove: 3 releases are kept\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ModelStore]:
    served = ModelStore(tmp_path / "served", MODEL)
    yield served
    if served.path.exists():
        stop(served)


def test_after_the_loss_of_its_store_the_endpoint_serves_the_same_release(served: ModelStore, tmp_path: Path) -> None:
    flags = ["--serving", json.dumps(SERVING), "--rollout", json.dumps(ROLLOUT)]
    release, kept = publish(served, 1, stand_in_variant(served, "fp16")), str(tmp_path / "kept")
    shutil.copy(served.optimized("fp16") / "variant.json", served.releases / release)
    shutil.rmtree(served.root / "source-fp16")
    assert stage("serve", *flags, variables=environment(served, stand_in=True)).returncode == 0
    copied = slipway(served, "backup", kept)  # while it is served
    assert copied.returncode == 0, copied.stderr
    assert "all of them verified" in copied.stdout
    stop(served)
    shutil.rmtree(served.root)
    returned = slipway(served, "restore", kept)
    assert returned.returncode == 0, returned.stderr
    assert slipway(served, "restore", kept).returncode == 2
    assert stage("serve", *flags, variables=environment(served, stand_in=True)).returncode == 0
    running = endpoint(served)
    assert running
    assert running.release == release
    assert healthy(running.url)
