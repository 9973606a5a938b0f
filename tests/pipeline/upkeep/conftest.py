"""A store with a finished run: a base model, three variants, their evaluations, and a release in production."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.report.page import collect
from stages.select.selection import select
from tests.samples import MODEL, measured_store


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = measured_store(tmp_path_factory.mktemp("finished"), "run-1")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SLIPWAY_RUN", "run-1")
        select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"])
    collect(store, "run-1", "Succeeded").write(store.run("run-1") / "report.json")
    return store.root


@pytest.fixture
def store(tmp_path: Path, finished: Path) -> ModelStore:
    copied = ModelStore(tmp_path / "store", MODEL)
    shutil.copytree(finished, copied.root, symlinks=True)
    release, variant = copied.production.resolve(), copied.optimized("awq")
    for name in ("model.safetensors", "config.json"):  # shutil copies what was linked
        (release / name).unlink()
        (release / name).hardlink_to(variant / name)
    return copied
