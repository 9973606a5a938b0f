"""One attempt of a task: a contained process, its folders, its log and its results."""

from __future__ import annotations

import shutil
import site
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import stages
from pipeline.local.folder import SCRATCH, log_file, safe, writable
from pipeline.local.manifest import Template, Volume, substitute
from pipeline.local.resources import MachineResources, ResourceRequest, request
from pipeline.runs.progress import last_line
from pipeline.runs.state import FailedAttempt, Node, Phase
from stages.parts.base.program import FAILURE, OUTPUTS_VARIABLE, StageFailure
from stages.parts.machine.process import Contained

SIGNALS: Final = {137: "killed (SIGKILL): perhaps the machine ran out of memory", 143: "asked to stop (SIGTERM)"}


@dataclass(frozen=True)
class Prepared:
    """What a task with a container runs and needs, with every reference resolved. Paths are still the container's."""

    command: tuple[str, ...]
    environment: dict[str, str]
    outputs: dict[str, str]
    """The file of each output, by name."""
    fresh: dict[str, str]
    """The emptyDirs: the volume's name, by mount path."""
    fixed: dict[str, Path]
    """The claims: the local folder that stands for each, by mount path."""
    request: ResourceRequest
    mutexes: tuple[str, ...]

    @classmethod
    def of(
        cls, template: Template, volumes: Mapping[str, Volume], mounts: Mapping[str, Path], lookup: Callable[[str], str]
    ) -> Prepared:
        """Resolve the references of *template*. Raises: Unresolved: by *lookup*."""
        program = template.program
        claims = {mount.mount_path: volumes[mount.name].persistent_volume_claim for mount in program.volume_mounts}
        return cls(
            command=tuple(substitute(text, lookup) for text in (*program.command, *program.args)),
            environment={one.name: substitute(one.value, lookup) for one in program.env if not one.value_from},
            outputs={
                parameter.name: substitute(parameter.value_from.path, lookup)
                for parameter in template.outputs.parameters
            },
            fresh={mount.mount_path: mount.name for mount in program.volume_mounts if not claims[mount.mount_path]},
            fixed={path: mounts[path] for path, claim in claims.items() if claim},
            request=request(program.resources.requests, program.resources.limits),
            mutexes=template.synchronization.names(lookup),
        )


@dataclass(frozen=True)
class Ended:
    task: str
    exit_code: int
    outputs: dict[str, str]
    failure: FailedAttempt | None = None


class Attempt:
    """A process that starts at once. Its thread calls *ended* when no process of it is left."""

    def __init__(
        self,
        node: Node,
        spec: Prepared,
        share: MachineResources,
        environment: Mapping[str, str],
        folder: Path,
        ended: Callable[[Ended], None],
    ) -> None:
        self.share, self.since = share, time.monotonic()
        self.reason = ""
        """Why the engine stopped it, if it did."""
        self._task, self._ended = node.name, ended
        self._scratch = folder / SCRATCH / f"{safe(node.name)}-{node.attempts}"
        folders = dict(spec.fixed)
        folders |= {path: self._scratch / volume for path, volume in spec.fresh.items()}
        self._outputs = {name: Path(translated(path, folders)) for name, path in spec.outputs.items()}
        variables = {name: translated(value, folders) for name, value in spec.environment.items()}
        self._failure = Path(variables.get(OUTPUTS_VARIABLE, "")) / FAILURE
        self._log = folder / log_file(node.name)
        with writable(folder):
            for path in spec.fresh:
                folders[path].mkdir(parents=True, exist_ok=True)
            log = self._log.open("ab", buffering=0)
        with log:
            if node.attempts > 1:
                log.write(f"\n--- attempt {node.attempts} ---\n".encode())
            self._log_start = log.tell()
            # With -P, modules in the working directory don't hide installed ones.
            interpreter = [sys.executable, "-P"] if spec.command[0] == "python" else spec.command[:1]
            command = [*interpreter, *spec.command[1:]]
            self._process = Contained(command, output=log, environment={**environment, **variables})
        self._thread = threading.Thread(target=self._wait, name=f"attempt {node.name}", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Ask it to end, and kill it after a while; returns at once. The first reason counts."""
        if not self.reason:
            self.reason = reason
            self._process.terminate()

    def join(self) -> None:
        """Wait until no process of it is left."""
        self._thread.join()

    def _wait(self) -> None:
        status = self._process.wait()
        self._process.stop()
        try:
            ended = self._read(status)
        except Exception as error:  # whatever the error is, the engine must learn of the end
            ended = self._failed(status, f"its outputs can't be read: {error}")
        shutil.rmtree(self._scratch, ignore_errors=True)  # before the engine is told, because it may exit then
        self._ended(ended)

    def _read(self, status: int) -> Ended:
        outputs = {}
        for name, path in self._outputs.items():
            if path.is_file():
                # Argo removes one newline, too.
                outputs[name] = path.read_text(encoding="utf-8").removesuffix("\n")
            elif status == 0:
                return self._failed(status, f"it succeeded, but wrote no output {name!r} to {path}")
        if status == 0:
            return Ended(self._task, status, outputs)
        if failure := StageFailure.read(self._failure, status):
            return self._failed(status, failure.message, failure.hint, outputs)
        # A program that left no document is explained by its exit status and the last line of its log.
        said = (SIGNALS.get(status, f"exit code {status}"), last_line(self._log, self._log_start))
        return self._failed(status, ": ".join(filter(None, said)), outputs=outputs)

    def _failed(self, status: int, message: str, hint: str = "", outputs: dict[str, str] | None = None) -> Ended:
        phase: Phase = "Failed" if status else "Error"
        failure = FailedAttempt(phase=phase, message=message, hint=hint, exit_code=status)
        return Ended(self._task, status, outputs or {}, failure)


def translated(value: str, folders: Mapping[str, Path]) -> str:
    """Translate a path on a mounted volume to the local path; any other text stays as it is."""
    for mount in sorted(folders, key=len, reverse=True):
        if value == mount or value.startswith(mount.rstrip("/") + "/"):
            return str(folders[mount] / value[len(mount) :].strip("/"))
    return value


def code_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a PYTHONPATH with which a task finds the same ``stages`` as this process, installed or not."""
    root = str(Path(stages.__file__ or "").parents[1])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return {}
    inherited = environment.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}:{inherited}" if inherited else root}
