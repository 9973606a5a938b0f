"""Adapters that acquire brings beside the model, by the program, from the tests' Hub and from directories."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from stages.parts.model.adapter import CONFIG, WEIGHTS
from stages.parts.records.acquired import ACQUIRED, Acquired, read_intact
from tests.adapters import files, untrained, write
from tests.hub import HubServer
from tests.hub.models import Stages, tiny_model

BIG = files(untrained(1 << 17, 1 << 17, r=16))
"""16 MiB of weights."""


@pytest.fixture
def stages(hub: HubServer, tmp_path: Path) -> Stages:
    hub.add_repo("org/tiny", tiny_model())
    return Stages(hub.url, tmp_path)


def acquire(stages: Stages, hub: HubServer, **adapters: str) -> subprocess.CompletedProcess[str]:
    commit = hub.repositories["org/tiny"].find("main")
    return stages.run(
        *("acquire", "--model", "org/tiny", "--commit", str(commit)), "--serving", json.dumps({"adapters": adapters})
    )


def kept(stages: Stages, name: str) -> Path:
    return stages.base().parent / "adapters" / name


def test_an_adapter_comes_after_the_model_with_its_record_and_no_other_file(hub: HubServer, stages: Stages) -> None:
    card = {"README.md": b"---\nlicense: mit\n---\n"}
    others = dict.fromkeys(
        ("adapter_model.bin", "training_args.bin", "optimizer.pt", "handler.py", "tokenizer.json"), b"x"
    )
    commit = hub.add_repo("org/support", files(untrained()) | card | others)
    ended = acquire(stages, hub, support="org/support")
    assert ended.returncode == 0, ended.stderr
    assert f"; adapters/support has org/support at {commit}" in ended.stderr
    folder = kept(stages, "support")
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS, "README.md", ACQUIRED}
    record = read_intact(folder)
    assert (record.model, record.source, record.revision, record.commit) == ("org/support", hub.url, "main", commit)
    assert (record.license, record.architecture, record.parameters) == ("mit", "LORA", 1024)
    assert not [each for path in others for each in hub.requests_for(f"/org/support/*/{path}")]


def test_what_is_there_already_is_not_downloaded_again_and_a_new_revision_is(hub: HubServer, stages: Stages) -> None:
    first = hub.add_repo("org/support", files(untrained()))
    assert acquire(stages, hub, support="org/support").returncode == 0
    before = len(hub.requests_for(f"*/{WEIGHTS}"))
    assert acquire(stages, hub, support="org/support").returncode == 0
    assert len(hub.requests_for(f"*/{WEIGHTS}")) == before
    second = hub.add_repo("org/support", files({name: matrix + 1 for name, matrix in untrained().items()}))
    assert acquire(stages, hub, support="org/support").returncode == 0
    assert read_intact(kept(stages, "support")).commit == second != first
    assert acquire(stages, hub, support=f"org/support@{first}").returncode == 0
    assert read_intact(kept(stages, "support")).commit == first
    asked = len(hub.requests)
    assert acquire(stages, hub, support=f"org/support@{first}").returncode == 0
    assert len(hub.requests) == asked, "a full commit that is there needs no request"


def test_a_download_that_was_cut_goes_on_where_it_stopped_and_shows_nothing_before(
    hub: HubServer, stages: Stages
) -> None:
    hub.add_repo("org/support", BIG)
    hub.cut(f"*/{WEIGHTS}", after=12 << 20)
    hub.cut(f"*/{WEIGHTS}", after=0, times=None)
    assert acquire(stages, hub, support="org/support").returncode == 75
    assert not kept(stages, "support").exists()
    assert (stages.base() / ACQUIRED).exists()
    hub.heal()
    assert acquire(stages, hub, support="org/support").returncode == 0
    assert any(each.range and not each.range.startswith("bytes=0-") for each in hub.requests_for(f"*/{WEIGHTS}"))
    assert (kept(stages, "support") / WEIGHTS).read_bytes() == BIG[WEIGHTS]


@pytest.mark.parametrize(
    ("made", "status", "message"),
    [
        ({CONFIG: files(untrained())[CONFIG], "adapter_model.bin": b"x"}, 13, "holds its weights only as pickles"),
        (files({name: matrix * np.float32("nan") for name, matrix in untrained().items()}), 14, "holds NaN"),
        (files(untrained(), peft_type="LOHA"), 13, "is of PEFT's type LOHA"),
    ],
)
def test_an_adapter_that_cannot_be_served_leaves_the_former_one(
    hub: HubServer, stages: Stages, made: dict[str, bytes], status: int, message: str
) -> None:
    first = hub.add_repo("org/support", files(untrained()))
    assert acquire(stages, hub, support="org/support").returncode == 0
    hub.add_repo("org/support", made)
    ended = acquire(stages, hub, support="org/support")
    assert (ended.returncode, message in ended.stderr) == (status, True), ended.stderr
    assert read_intact(kept(stages, "support")).commit == first
    assert not list(stages.store.glob("*/.building/adapters-support/*"))


def test_a_directory_is_copied_and_read_again_when_it_has_changed(
    hub: HubServer, stages: Stages, tmp_path: Path
) -> None:
    source = write(tmp_path / "mine", untrained())
    assert acquire(stages, hub, support="./mine").returncode == 0
    first = read_intact(kept(stages, "support"))
    assert (first.source, first.commit[:6]) == (f"local:{source}", "local-")
    assert (kept(stages, "support") / WEIGHTS).stat().st_nlink == 1
    write(source, untrained(), r=8, lora_alpha=99)
    assert acquire(stages, hub, support="./mine").returncode == 0
    assert read_intact(kept(stages, "support")).commit != first.commit


def test_two_adapters_have_folders_of_their_own(hub: HubServer, stages: Stages) -> None:
    for name in ("support", "sql"):
        hub.add_repo(f"org/{name}", files(untrained(), base_model_name_or_path=name))
    assert acquire(stages, hub, support="org/support", sql="org/sql").returncode == 0
    records = [Acquired.read(kept(stages, name) / ACQUIRED) for name in ("support", "sql")]
    assert len({record.digest for record in records if record}) == 2
