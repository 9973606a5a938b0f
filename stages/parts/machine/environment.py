"""Environments of their own for libraries whose requirements contradict ours. uv makes each from a lock when it is
first used; an image has one as its only environment."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stages.parts.base.errors import NotInstalled
from stages.parts.base.log import say
from stages.parts.base.store import digest_of, exclusive
from stages.parts.machine.process import run_aloud

ROOT: Final = Path(__file__).parents[3]
TORCH_LOCK: Final = ROOT / "requirements-torch.lock"
TORCH_INDEX: Final = "https://download.pytorch.org/whl"
PIN: Final = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)
CAUSE: Final = re.compile(r"(?:error:|  cause:|  [×╰].*?) *(.+)")
DETAILS: Final = re.compile(r" \+ |Using |Creating |Activate ")
CHECKED: Final = ("--no-deps", "--no-build", "--require-hashes", "--requirement")


@dataclass(frozen=True)
class Environment:
    """An environment with *package*, with what ``requirements-<name>.lock`` lists and the build of torch that is
    installed here."""

    name: str
    package: str

    @property
    def is_here(self) -> bool:
        """Whether this program runs in it."""
        return bool(installed(self.package))

    @property
    def lock(self) -> Path:
        """Raises: NotInstalled: this installation has none."""
        if not (lock := ROOT / f"requirements-{self.name}.lock").exists():
            raise NotInstalled(f"{self.package} is not installed, and there is no {lock}", hint="run in a checkout")
        return lock

    @property
    def directory(self) -> Path:
        """Where it is kept on this machine, or will be: another place for each lock, torch and Python."""
        key = digest_of([self.lock.read_text(), installed("torch"), sys.version])
        return user_cache() / "environments" / f"{self.name}-{key[:12]}"

    def version(self, package: str) -> str:
        """Read the version of a package in it. torch is that of this environment."""
        locked = {} if self.is_here else dict(PIN.findall(self.lock.read_text()))
        return locked.get(package) or installed(package)

    def python(self) -> str:
        """Return its interpreter. It is made now if it is not there. Raises: NotInstalled: it can't be made."""
        if self.is_here:
            return sys.executable
        python = self.directory / "bin" / "python"
        if not python.exists():
            with exclusive(self.directory.parent / f"{self.name}.lock", f"the environment of {self.name}"):
                if not python.exists():
                    self._make()
        return str(python)

    def _make(self) -> None:
        """Make it aside, and put it in place when it is whole."""
        say(f"{self.name}: making an environment of its own in {self.directory}")
        for left in (self.directory, *self.directory.parent.glob(f".{self.name}-*")):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.directory.parent, prefix=f".{self.name}-") as aside:
            made, (release, _, build) = Path(aside, "made"), installed("torch").partition("+")
            install = ("pip", "install", "--python", str(made))
            index = ("--index-url", os.environ.get("TORCH_INDEX") or f"{TORCH_INDEX}/{build}") if build else ()
            self._uv("venv", "--relocatable", "--python", sys.executable, str(made))
            torch = (*CHECKED, str(TORCH_LOCK))
            if build != "cpu":  # builds for GPUs, and the libraries that they bring, are in no lock
                self._uv(*install, *index, f"torch=={release}{f'+{build}' if build else ''}")
            # As the Makefile does: from where UV_FIND_LINKS points, or else from its index.
            elif run_aloud([uv(), *install, "--no-index", *torch], hidden=re.compile(""))[0]:
                self._uv(*install, *index, *torch)
            self._uv(*install, *CHECKED, str(self.lock))
            made.rename(self.directory)

    def _uv(self, *arguments: str) -> None:
        variables = {"UV_SYSTEM_CERTS": "1", **os.environ}
        status, lines = run_aloud([uv(), *arguments], environment=variables, hidden=DETAILS)
        if status:
            causes = [match[1] for match in map(CAUSE.match, lines) if match]
            raise NotInstalled(
                f"uv could not make the environment of {self.name}: {': '.join(causes[:2]) or f'status {status}'}",
                hint="it needs the package index (UV_INDEX_URL) or a folder of wheels (UV_FIND_LINKS); try it by "
                f"uv pip install --dry-run --no-deps --requirement {self.lock}",
            )


def uv() -> str:
    """Find uv: the user's own, or the one beside this Python. Raises: NotInstalled."""
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if not found:
        raise NotInstalled("uv, which makes environments, is not installed", hint=f"{sys.executable} -m pip install uv")
    return found


def installed(package: str) -> str:
    """Read the version of a package that is installed here; empty if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def user_cache() -> Path:
    """Name the folder in the user's cache for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "slipway"


LLM_COMPRESSOR: Final = Environment("llm-compressor", "llmcompressor")
ENVIRONMENTS: Final = {LLM_COMPRESSOR.name: LLM_COMPRESSOR}
