"""Environments of their own for libraries whose requirements contradict ours, and for other versions of vLLM. uv makes
each from a lock when it is first used; an image has one as its only environment."""

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
from stages.parts.base.files import digest_of, exclusive, write_text
from stages.parts.base.log import say
from stages.parts.machine.hardware import query_gpus
from stages.parts.machine.process import run_aloud

ROOT: Final = Path(__file__).parents[3]
TORCH_LOCK: Final = ROOT / "requirements-torch.lock"
TORCH_INDEX: Final = "https://download.pytorch.org/whl"
PIN: Final = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)
CAUSE: Final = re.compile(r"(?:error:|  cause:|  [×╰].*?) *(.+)")
DETAILS: Final = re.compile(r" \+ |Using |Creating |Activate ")
CHECKED: Final = ("--no-deps", "--no-build", "--require-hashes", "--requirement")
RESOLVED: Final = "requirements.lock"
"""In an environment of another vLLM, the lock that was resolved when it was made."""
STACK: Final = {"vLLM": "vllm", "PyTorch": "torch", "Transformers": "transformers"}
CPU_BUILD: Final = "manifests/images/vllm-cpu/pyproject.toml"
"""What brings vLLM's CPU build, and how its requirements are resolved."""


@dataclass(frozen=True)
class Environment:
    """An environment with *package*, with what ``requirements-<name>.lock`` lists and the build of torch that is
    installed here."""

    name: str
    package: str
    engine: str = ""
    """The version of vLLM; its lock is none of the checkout's, but resolved when the environment is made."""

    @property
    def is_here(self) -> bool:
        """Whether this program runs in it."""
        here = installed(self.package)
        return here.partition("+")[0] == self.engine if self.engine else bool(here)

    @property
    def lock(self) -> Path:
        """Raises: NotInstalled: this installation has none."""
        return self.directory / RESOLVED if self.engine else self._of_checkout(f"requirements-{self.name}.lock")

    @property
    def directory(self) -> Path:
        """Where it is kept on this machine, or will be: another place for each lock, torch and Python. Another vLLM has
        a torch of its own, and stays after an upgrade."""
        key = digest_of([sys.version] if self.engine else [self.lock.read_text(), installed("torch"), sys.version])
        return user_cache() / "environments" / f"{self.name}-{key[:12]}"

    def version(self, package: str) -> str:
        """Read the version of a package in it. torch is that of this environment."""
        if self.engine and package == self.package:
            return "".join((self.engine, *installed(package).partition("+")[1:]))  # its build is that of this one
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
            made, install = Path(aside, "made"), ("pip", "install", "--python", str(Path(aside, "made")))
            self._uv("venv", "--relocatable", "--python", sys.executable, str(made))
            self._resolve_and_install(made, install) if self.engine else self._install(install)
            made.rename(self.directory)

    def _install(self, install: tuple[str, ...]) -> None:
        release, _, build = installed("torch").partition("+")
        index = ("--index-url", os.environ.get("TORCH_INDEX") or f"{TORCH_INDEX}/{build}") if build else ()
        torch = (*CHECKED, str(TORCH_LOCK))
        if build != "cpu":  # builds for GPUs, and the libraries that they bring, are in no lock
            self._uv(*install, *index, f"torch=={release}{f'+{build}' if build else ''}")
        # As the Makefile does: from where UV_FIND_LINKS points, or else from its index.
        elif run_aloud([uv(), *install, "--no-index", *torch], hidden=re.compile(""))[0]:
            self._uv(*install, *index, *torch)
        self._uv(*install, *CHECKED, str(self.lock))

    def _resolve_and_install(self, made: Path, install: tuple[str, ...]) -> None:
        """Resolve a lock as ``make lock`` does, but with the torch that this version of vLLM wants."""
        lock, project, text = made / RESOLVED, made / "project", f"{self.package}=={self.engine}"
        here, _, build = installed(self.package).partition("+")
        if build:  # the CPU build
            text = self._of_checkout(CPU_BUILD).read_text().replace(here, self.engine)
            text = re.sub(r'\n.*("torch==|"torch"\]).*', "", text)
        write_text(project / (name := "pyproject.toml" if build else "requirements.in"), text)
        resolve = ["--directory", str(project), "pip", "compile", "--quiet", "--generate-hashes"]
        resolve += ["--python", str(made), "--output-file", str(lock), name]
        lines = run_aloud([uv(), *resolve], hidden=re.compile(""))[1]
        url = os.environ.get("TORCH_INDEX") or f"{TORCH_INDEX}/{build}"
        index = ["--extra-index-url", url, "--index-strategy", "unsafe-best-match"]
        index = index if any("no version of torch" in line for line in lines) else []
        self._uv(*resolve, *index)
        self._uv(*install, *index, *CHECKED, str(lock))
        if build:  # with the name that vLLM looks itself up by
            self._uv(*install, "--no-deps", "--build-constraints", str(ROOT / "requirements-build.lock"), str(project))

    def _of_checkout(self, path: str) -> Path:
        if not (found := ROOT / path).exists():
            raise NotInstalled(f"{self.package} is not installed, and there is no {found}", hint="run in a checkout")
        return found

    def _uv(self, *arguments: str) -> None:
        variables = {"UV_SYSTEM_CERTS": "1", **os.environ}
        status, lines = run_aloud([uv(), *arguments], environment=variables, hidden=DETAILS)
        if status:
            wanted = f"{self.package}=={self.engine}" if self.engine else f"--requirement {self.lock}"
            causes = [match[1] for match in map(CAUSE.match, lines) if match]
            raise NotInstalled(
                f"uv could not make the environment of {self.name}: {': '.join(causes[:2]) or f'status {status}'}",
                hint="it needs the package index (UV_INDEX_URL) or a folder of wheels (UV_FIND_LINKS); try it by "
                f"uv pip install --dry-run --no-deps {wanted}",
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


def engine_of(version: str = "") -> Environment:
    """Name the environment of a version of vLLM; by default that of this program."""
    version = version or installed("vllm").partition("+")[0]
    return Environment(f"vllm-{version}", "vllm", version)


def stack_of(version: str = "") -> dict[str, str]:
    """Say by which versions a version of vLLM computes here: of what it is made of, and of the GPUs' driver."""
    versions = {name: engine_of(version).version(tool).partition("+")[0] for name, tool in STACK.items()}
    drivers = query_gpus("driver_version")
    return versions | ({"driver": drivers[0]} if drivers else {})


LLM_COMPRESSOR: Final = Environment("llm-compressor", "llmcompressor")
ENVIRONMENTS: Final = {LLM_COMPRESSOR.name: LLM_COMPRESSOR}
