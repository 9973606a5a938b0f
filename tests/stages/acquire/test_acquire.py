from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from stages.acquire.ensure import ensure, intact
from stages.parts.base.program import Report
from stages.parts.base.store import ModelStore
from stages.parts.model.description import local_commit
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from tests.hub import HubServer
from tests.hub.models import CONFIG, Stages, big_weights, sharded_model, tiny_model, weights, write_model
from tests.serving import wait_until, waits_for

MIB = 1 << 20
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIG = big_weights(24)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def stages(hub: HubServer, tmp_path: Path) -> Stages:
    return Stages(hub.url, tmp_path)


def published(base: Path) -> set[str]:
    return {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}


def big_model() -> dict[str, bytes]:
    return tiny_model(**{"model.safetensors": BIG})


def partial_bytes(stages: Stages) -> int:
    return sum(path.stat().st_size for path in stages.store.glob("*/.building/base/*/.partial/*"))


def wait_for_some_bytes(stages: Stages, process: subprocess.Popen[str]) -> None:
    """Wait until the first 10 MiB of the big file, one block of huggingface_hub, are on the disk."""
    while partial_bytes(stages) < 10 * MIB:
        assert process.poll() is None
        time.sleep(0.01)


# The files of a model


def test_only_the_files_that_serving_needs_are_downloaded(hub: HubServer, stages: Stages) -> None:
    others: tuple[str, ...] = (
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "modeling_tiny.py",
        "tf.h5",
    )
    others += ("original/model.safetensors", "onnx/model.onnx", "tiny.gguf", "training_args.bin", ".gitattributes")
    needed = sharded_model() | {"LICENSE": b"free", "additional_chat_templates/tools.jinja": b"{{ tools }}"}
    commit = hub.add_repo("org/tiny", needed | dict.fromkeys(others, b"not served"))
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert published(stages.base()) == {*needed, ACQUIRED}
    assert {path: (stages.base() / path).read_bytes() for path in needed} == needed
    assert not [each for path in others for each in hub.requests_for(f"*/{path}")]


def test_the_record_names_the_files_and_their_source(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    result = stages.acquire(commit)
    record = Acquired.read(stages.base() / ACQUIRED)
    assert record is not None
    assert (record.model, record.source, record.commit) == ("org/tiny", hub.url, commit)
    assert (record.license, record.architecture, record.parameters) == ("apache-2.0", "LlamaForCausalLM", 128)
    assert {(f.path, f.size_bytes, f.sha256) for f in record.files} == {
        (path, len(content), sha256(content).hexdigest()) for path, content in tiny_model().items()
    }
    assert result.stdout.strip() == record.digest == (stages.folder / "outputs" / "digest").read_text()


def test_a_left_over_index_beside_the_whole_model_is_not_downloaded(hub: HubServer, stages: Stages) -> None:
    index = {"model.safetensors.index.json": sharded_model()["model.safetensors.index.json"]}
    assert stages.acquire(hub.add_repo("org/tiny", tiny_model(**index))).returncode == 0
    assert published(stages.base()) == {*tiny_model(), ACQUIRED}


OWN_CODE = tiny_model(
    **{"config.json": json.dumps(CONFIG | {"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}).encode()}
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (tiny_model(**{"model.safetensors": None, "pytorch_model.bin": b"x"}), "only pickles"),
        (OWN_CODE, "needs its own code"),
    ],
)
def test_an_unsafe_model_is_refused_before_its_weights_are_downloaded(
    hub: HubServer, stages: Stages, files: dict[str, bytes], message: str
) -> None:
    result = stages.acquire(hub.add_repo("org/tiny", files))
    assert result.returncode == 13
    assert message in result.stderr
    assert "\n  hint: " in result.stderr
    assert hub.requests_for("*.safetensors") + hub.requests_for("*.bin") == []
    assert not stages.base().exists()
    assert list(stages.store.glob("*/.building/base/*")) == []


# Damage


def with_nan() -> dict[str, bytes]:
    tensor = np.ones((16, 8), np.float16)
    tensor[3, 4] = np.nan
    return tiny_model(**{"model.safetensors": save({"ok": np.ones(4, np.float16), "bad": tensor})})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (sharded_model(**{SHARDS[1]: sharded_model()[SHARDS[1]][:-40]}), f"{SHARDS[1]} is truncated"),
        (with_nan(), "tensor bad holds NaN"),
    ],
)
def test_a_damaged_model_is_refused_and_the_old_base_stays(
    hub: HubServer, stages: Stages, files: dict[str, bytes], message: str
) -> None:
    good = hub.add_repo("org/tiny", tiny_model())
    assert stages.acquire(good).returncode == 0
    result = stages.acquire(hub.add_repo("org/tiny", files))
    assert result.returncode == 14
    assert message in result.stderr
    asked = len(hub.requests)
    again = stages.acquire(good)
    assert "reused: " in again.stderr
    assert len(hub.requests) == asked
    assert list(stages.store.glob("*/.building/base/*")) == []


def test_a_file_name_that_leads_out_of_the_repository_writes_nothing(hub: HubServer, stages: Stages) -> None:
    result = stages.acquire(hub.add_repo("org/tiny", tiny_model(**{"../config.json": b"evil"})))
    assert result.returncode == 2
    assert "unsafe name: '../config.json'" in result.stderr
    index = {"weight_map": {"embed": "../../../evil.safetensors"}}
    evil = tiny_model(**{"model.safetensors": None, "model.safetensors.index.json": json.dumps(index).encode()})
    result = stages.acquire(hub.add_repo("org/tiny", evil))
    assert result.returncode == 2
    assert "unsafe name: '../../../evil.safetensors'" in result.stderr
    assert hub.requests_for("*evil*") == []
    assert [path for path in stages.folder.rglob("*") if "evil" in path.name] == []


# The network


def test_a_killed_download_resumes_where_it_stopped(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", big_model())
    hub.stall("model.safetensors", 12 * MIB)
    with stages.start("acquire", "--model", "org/tiny", "--commit", commit) as process:
        wait_for_some_bytes(stages, process)
        process.send_signal(signal.SIGKILL)
    assert not stages.base().exists()
    kept = partial_bytes(stages)
    hub.heal()
    asked = len(hub.requests)
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert (stages.base() / "model.safetensors").read_bytes() == BIG
    assert published(stages.base()) == {*big_model(), ACQUIRED}
    later = [each for each in hub.requests[asked:] if "/resolve/" in each.path]
    assert [(each.range, each.sent) for each in later] == [(f"bytes={kept}-", len(BIG) - kept)]


def test_a_download_that_is_asked_to_stop_keeps_its_bytes(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", big_model())
    hub.stall("model.safetensors", 12 * MIB)
    with stages.start("acquire", "--model", "org/tiny", "--commit", commit) as process:
        wait_for_some_bytes(stages, process)
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert errors.endswith("error: asked to stop (SIGTERM)\n")
    assert partial_bytes(stages) >= 10 * MIB


def test_a_download_continues_where_the_connection_was_cut(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", big_model())
    hub.cut("model.safetensors", 15 * MIB)
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    requests = hub.requests_for("model.safetensors")
    assert [each.range for each in requests] == [None, f"bytes={10 * MIB}-"]
    assert requests[1].sent == len(BIG) - 10 * MIB


def test_a_download_succeeds_if_each_attempt_brings_some_bytes(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model(**{"model.safetensors": big_weights(64)}))
    hub.cut("model.safetensors", 11 * MIB, times=5, reset=True)
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert [each.range for each in hub.requests_for("model.safetensors")[1:]] == [
        f"bytes={part * 10 * MIB}-" for part in range(1, 6)
    ]


def test_a_file_that_was_altered_once_is_downloaded_again(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    hub.corrupt("model.safetensors")
    hub.corrupt("config.json")
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert {path: (stages.base() / path).read_bytes() for path in tiny_model()} == tiny_model()
    assert len(hub.requests_for("model.safetensors")) == len(hub.requests_for("config.json")) == 2


def test_a_file_that_is_always_altered_is_refused_and_the_good_files_are_kept(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", sharded_model())
    hub.corrupt(SHARDS[0], times=None)
    result = stages.acquire(commit)
    assert result.returncode == 14
    content = sharded_model()[SHARDS[0]]
    got = bytes([content[0] ^ 0xFF]) + content[1:]
    assert f"{SHARDS[0]} was downloaded altered, twice" in result.stderr
    assert sha256(content).hexdigest() in result.stderr
    assert sha256(got).hexdigest() in result.stderr
    assert not stages.base().exists()
    hub.heal()
    assert stages.acquire(commit).returncode == 0
    assert len(hub.requests_for(SHARDS[0])) == 3
    assert len(hub.requests_for("tokenizer.json")) == 1


def test_a_file_that_is_shorter_than_listed_is_refused(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    content = tiny_model()["model.safetensors"]
    hub.shorten("model.safetensors", 8)
    result = stages.acquire(commit)
    assert result.returncode == 14
    assert f"the download has {len(content) - 8} bytes" in result.stderr


def test_a_request_is_retried_after_a_server_error(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    hub.fail("model.safetensors", 503, times=2)
    hub.fail("config.json", 429, retry_after=0)
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert [each.status for each in hub.requests_for("model.safetensors")] == [503, 503, 200]
    assert [each.status for each in hub.requests_for("config.json")] == [429, 200]


def test_a_server_error_that_persists_is_transient(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    hub.fail("model.safetensors", 500, times=None)
    result = stages.acquire(commit)
    assert result.returncode == 75
    assert "has a problem (500) at model.safetensors" in result.stderr
    assert not stages.base().exists()


def test_a_gated_model_needs_its_license_accepted(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model(), gated=True)
    hub.allow("hf_friend", "org/tiny")
    hub.allow("hf_stranger")
    assert stages.resolve() == commit
    anonymous = stages.acquire(commit)
    assert anonymous.returncode == 12
    assert f"hint: accept it at {hub.url}/org/tiny and set HF_TOKEN" in anonymous.stderr
    stranger = stages.acquire(commit, HF_TOKEN="hf_stranger")
    assert stranger.returncode == 12
    assert f"hint: accept it at {hub.url}/org/tiny with the account of your HF_TOKEN" in stranger.stderr
    friend = stages.acquire(commit, HF_TOKEN="hf_friend")
    assert friend.returncode == 0, friend.stderr
    everything = (stages.base() / ACQUIRED).read_text() + stranger.stderr + friend.stderr
    assert "hf_friend" not in everything
    assert "hf_stranger" not in everything


def test_a_redirected_download_does_not_send_the_token_to_the_other_host(tmp_path: Path) -> None:
    with HubServer(cdn=True) as hub:
        hub.allow("hf_friend", "org/tiny")
        commit = hub.add_repo("org/tiny", big_model(), private=True)
        hub.cut("/cdn/*", 15 * MIB)
        result = Stages(hub.url, tmp_path).acquire(commit, HF_TOKEN="hf_friend")
        assert result.returncode == 0, result.stderr
        redirected = [each for each in hub.requests if each.path.startswith("/cdn/")]
        assert [(each.range, each.authorized) for each in redirected] == [(None, False), (f"bytes={10 * MIB}-", False)]


# A base that exists


def test_a_complete_base_is_reused_without_a_request(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    first = stages.acquire(commit)
    asked = len(hub.requests)
    left = stages.base().parent / ".building" / "base" / commit  # where a loss of power kept both names
    left.mkdir(parents=True)
    second = stages.acquire(commit, HF_HUB_OFFLINE="1", PYTHONPROFILEIMPORTTIME="1")
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert "reused: base/ already has org/tiny" in second.stderr
    assert not left.exists()
    imported = {line.rpartition("|")[2].strip() for line in second.stderr.splitlines()}
    assert "stages.acquire" in imported or "stages.parts.model.checkpoint" in imported
    assert not imported & {"huggingface_hub", "httpx2", "numpy", "torch", "rich", "yaml"}
    assert len(hub.requests) == asked


def test_only_a_damaged_file_is_downloaded_again(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", sharded_model())
    assert stages.acquire(commit).returncode == 0
    asked, inode = len(hub.requests), (stages.base() / SHARDS[1]).stat().st_ino
    alter(stages.base() / SHARDS[0])
    result = stages.acquire(commit)
    assert result.returncode == 0, result.stderr
    assert (stages.base() / SHARDS[0]).read_bytes() == sharded_model()[SHARDS[0]]
    taken = [each.path.rpartition("/")[2] for each in hub.requests[asked:] if "/resolve/" in each.path]
    assert taken == [SHARDS[0]]
    assert (stages.base() / SHARDS[1]).stat().st_ino == inode


def test_a_new_commit_replaces_the_base_and_reuses_its_unchanged_files(hub: HubServer, stages: Stages) -> None:
    old = hub.add_repo("org/tiny", sharded_model())
    assert stages.acquire(old).returncode == 0
    inode = (stages.base() / SHARDS[0]).stat().st_ino
    new = hub.add_repo("org/tiny", sharded_model(**{SHARDS[1]: weights("head", seed=9)}))
    assert stages.acquire(new).returncode == 0
    record = Acquired.read(stages.base() / ACQUIRED)
    assert record is not None
    assert record.commit == new
    assert (stages.base() / SHARDS[1]).read_bytes() == weights("head", seed=9)
    assert (stages.base() / SHARDS[0]).stat().st_ino == inode
    assert len(hub.requests_for(SHARDS[0])) == 1


def test_two_processes_that_acquire_the_same_model_download_it_once(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", big_model())
    hub.stall("model.safetensors", 12 * MIB)
    arguments = ("acquire", "--model", "org/tiny", "--commit", commit)
    lock = ModelStore(stages.store, "org/tiny").lock("acquire")
    with stages.start(*arguments) as one, stages.start(*arguments) as other:
        wait_until(lambda: lock.exists() and waits_for(lock), "one waits for the other")
        hub.heal()
        results = [process.communicate(timeout=60) for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), results
    assert results[0][0] == results[1][0]
    assert len(hub.requests_for("model.safetensors")) == 1
    assert sum("another process has just acquired" in errors for _, errors in results) == 1


def test_the_stage_records_its_outcome_in_the_run(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", with_nan())
    stages.acquire(commit, SLIPWAY_RUN="r1")
    outcome = json.loads((stages.store / "org--tiny/runs/r1/outcomes/acquire.json").read_text())
    assert (outcome["result"], outcome["stage"]) == ("failed", "acquire")
    assert "tensor bad" in outcome["reason"]
    assert "try another --revision" in outcome["hint"]


def test_an_invalid_commit_is_refused(stages: Stages) -> None:
    result = stages.acquire("../../../etc")
    assert result.returncode == 2
    assert "is not a commit" in result.stderr
    assert not stages.store.exists()


# Space


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MiB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "none", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_model_larger_than_the_volume_is_refused_before_its_first_byte(
    hub: HubServer, stages: Stages, volume: Path
) -> None:
    commit = hub.add_repo("org/tiny", tiny_model(**{"model.safetensors": big_weights(48)}))
    result = stages.acquire(commit, SLIPWAY_STORE=str(volume))
    assert result.returncode == 15
    assert "the model needs 112.0 MiB, but 100.0 MiB are free" in result.stderr
    assert hub.requests_for("*/resolve/*") == []


def test_on_a_full_volume_the_old_base_stays_and_the_download_can_continue_later(
    hub: HubServer, stages: Stages, volume: Path
) -> None:
    stages.environment["SLIPWAY_STORE"] = str(volume)
    old = hub.add_repo("org/tiny", tiny_model())
    assert stages.acquire(old).returncode == 0
    commit = hub.add_repo("org/tiny", big_model())
    hub.stall("model.safetensors", 12 * MIB)
    with stages.start("acquire", "--model", "org/tiny", "--commit", commit) as process:
        while not list(volume.glob("*/.building/base/*/.partial/model.safetensors*")):
            time.sleep(0.01)
        filler = volume / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(MIB // 4))
        hub.heal()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 15
    assert "no space left on the volume" in errors
    assert "reused: " in stages.acquire(old).stderr
    filler.unlink()
    assert stages.acquire(commit).returncode == 0
    assert (volume / "org--tiny" / "base" / "model.safetensors").read_bytes() == BIG


# A local directory


def test_a_directory_is_copied_and_its_later_edit_changes_nothing(stages: Stages) -> None:
    source = write_model(stages.folder / "mine", sharded_model() | {"pytorch_model.bin": b"x", "train.py": b""})
    commit = stages.resolve("./mine")
    result = stages.acquire(commit, "./mine")
    assert result.returncode == 0, result.stderr
    base = stages.base("local/mine")
    assert published(base) == {*sharded_model(), ACQUIRED}
    with (source / SHARDS[0]).open("r+b") as file:
        file.seek(200)
        file.write(b"\0\0\0\0")
    assert (base / SHARDS[0]).read_bytes() == sharded_model()[SHARDS[0]]
    record = Acquired.read(base / ACQUIRED)
    assert record is not None
    assert (record.model, record.source, record.commit) == ("local/mine", f"local:{source}", commit)
    assert "reused: " in stages.acquire(commit, "./mine").stderr
    edited = stages.resolve("./mine")
    assert edited != commit
    assert stages.acquire(edited, "./mine").returncode == 0
    assert (base / SHARDS[0]).read_bytes() == (source / SHARDS[0]).read_bytes()


def test_links_in_a_directory_are_followed(stages: Stages) -> None:
    blobs = write_model(stages.folder / "blobs", tiny_model())
    snapshot = stages.folder / "snapshot"
    snapshot.mkdir()
    for path in tiny_model():
        (snapshot / path).symlink_to(blobs / path)
    assert stages.acquire(stages.resolve("./snapshot"), "./snapshot").returncode == 0
    base = stages.base("local/snapshot")
    assert not any((base / path).is_symlink() for path in tiny_model())
    assert {path: (base / path).read_bytes() for path in tiny_model()} == tiny_model()
    (blobs / "tokenizer.json").unlink()
    broken = stages.run("resolve", "--model", "./snapshot")
    assert broken.returncode == 14
    assert "tokenizer.json is a broken link" in broken.stderr


def test_a_directory_that_changed_since_it_was_resolved_is_refused(stages: Stages) -> None:
    source = write_model(stages.folder / "mine", tiny_model())
    commit = stages.resolve("./mine")
    (source / "model.safetensors").write_bytes(weights("embed", "head", seed=3))
    result = stages.acquire(commit, "./mine")
    assert result.returncode == 14
    assert "changed since it was resolved" in result.stderr
    assert not stages.base("local/mine").exists()


# A damaged base


@pytest.fixture
def mine(tmp_path: Path) -> tuple[ModelStore, Path, str]:
    """A store with a base from a directory, that directory, and its commit."""
    source = write_model(tmp_path / "mine", sharded_model())
    store = ModelStore(tmp_path / "store", "local/mine")
    commit = local_commit(source)
    ensure(store, ModelName.parse(str(source)), "main", commit, Report())
    return store, source, commit


def alter(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"\0\0\0")


def shorten(path: Path) -> None:
    os.truncate(path, 100)


def alter_and_hide_the_time(path: Path) -> None:
    status = path.stat()
    alter(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def add_another(path: Path) -> None:
    path.with_name("model-extra.safetensors").write_bytes(weights("extra"))


def break_the_record(path: Path) -> None:
    path.with_name(ACQUIRED).write_text('{"model": ')


@pytest.mark.parametrize(
    "damage", [alter, shorten, Path.unlink, alter_and_hide_the_time, add_another, break_the_record]
)
def test_a_damaged_base_is_repaired(mine: tuple[ModelStore, Path, str], damage: Callable[[Path], None]) -> None:
    store, source, commit = mine
    damage(store.base / SHARDS[0])
    assert intact(store.base, commit) is None
    report = Report()
    ensure(store, ModelName.parse(str(source)), "main", commit, report)
    assert report.result == "done"
    assert published(store.base) == {*sharded_model(), ACQUIRED}
    assert {path: (store.base / path).read_bytes() for path in sharded_model()} == sharded_model()
    assert intact(store.base, commit) is not None


@pytest.mark.parametrize("change", [Path.touch, lambda path: os.link(path, path.parents[1] / "release")])
def test_a_file_that_was_only_touched_or_linked_is_read_once_and_reused(
    mine: tuple[ModelStore, Path, str], change: Callable[[Path], None]
) -> None:
    store, source, commit = mine
    before = (store.base / ACQUIRED).stat().st_mtime_ns
    change(store.base / SHARDS[0])
    report = Report()
    ensure(store, ModelName.parse(str(source)), "main", commit, report)
    assert report.result == "reused"
    changed = (store.base / SHARDS[0]).stat().st_ctime_ns
    assert before <= changed < (store.base / ACQUIRED).stat().st_mtime_ns


# Progress


def test_progress_is_lines_in_a_log_and_a_bar_on_a_terminal(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", big_model())
    lines = stages.acquire(commit).stderr
    assert "downloading: 1/1 files, 24.0 MiB of 24.0 MiB" in lines
    assert "\x1b" not in lines
    terminal, end = pty.openpty()
    with stages.start(
        "acquire", "--model", "org/tiny", "--commit", commit, terminal=end, SLIPWAY_STORE=f"{stages.store}-2"
    ) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # raised when the other end of the terminal is closed
            while block := os.read(terminal, 4096):
                shown += block
    os.close(terminal)
    assert process.returncode == 0
    assert "━" in shown.decode()
    assert "25.2/25.2 MB" in shown.decode() or "24.0/24.0 MiB" in shown.decode()
