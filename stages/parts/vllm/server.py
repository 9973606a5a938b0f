"""vLLM's server: it is started, asked whether it answers, and always stopped.

The evaluation and the production endpoint start it in the same way: otherwise what was measured would not hold in
production.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import httpx

from stages.parts.base.errors import ConfigError, Interrupted, PortInUse, ServerFailed, ServerKilled, SlipwayError
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.process import GRACE_S, Contained
from stages.parts.model.checkpoint import config_in
from stages.parts.records.evaluation import ColdStart
from stages.parts.vllm.arguments import (
    FOR_CLIENTS,
    core_binding,
    engine_arguments,
    environment,
    lora_arguments,
    serves_on_gpu,
    threads,
    vllm,
)
from stages.parts.vllm.client import (
    HEALTH_TIMEOUT_S,
    LOOPBACK,
    SOCKET,
    Access,
    answer,
    credentials,
    healthy,
    http,
    reachable,
)
from stages.parts.vllm.gpu_room import check_room
from stages.parts.vllm.server_log import CRASH, CRASHES, EngineWatch, ServerLog, error_in, last_line, signal_in

POLL_S: Final = 0.25
SETTLE_S: Final = 2.0
"""Time for vLLM to write what it still has to say once its engine is dead."""
ENGINE_ENDS_S: Final = 10.0
"""Time for the engine to end once its API process is dead, whose exit status is known after that."""
SIGNALLED: Final = 128
"""Plus a signal's number: the exit status of a program that the signal ended."""
API: Final = "APIServer"
"""The name in vLLM's log of the process that was started, whose children the engine's processes are."""
FAILED_CHILD: Final = "Failed core proc(s)"
"""In vLLM's log, without any error, if the engine was killed before it wrote a line."""


@dataclass(frozen=True)
class ServerSpec:
    """How a vLLM server is to be run."""

    directory: Path
    """The model's files."""
    name: str
    """What clients call the model."""
    settings: Serving
    log: Path
    """The server's output is appended to it."""
    host: str = LOOPBACK
    port: int = 0
    """0: a free one."""
    unix_socket: bool = False
    """Whether it listens on a Unix socket that only its user can open, instead of *host* and *port*."""
    api_key: str = ""
    drain_s: int = 0
    """Seconds that requests in flight are given to finish when the server is stopped."""
    log_requests: bool = True
    """Whether the log gets a line for each request."""
    for_clients: bool = False
    """Whether every answer, and every event of a streamed one, tells the tokens that were used so far, and requests are
    taken by their priority."""
    half: int = 0
    """Which half of the machine's cores, 0 or 1; see ``core_binding``."""
    replica: int = 0
    """Which of ``settings.replicas``, from 0."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """The directories of the LoRA adapters that it serves, by the names that clients call them."""
    gpus: str = ""
    """Its ``CUDA_VISIBLE_DEVICES``; empty: those of this process."""

    def command(self, address: Sequence[str], arguments: Sequence[str]) -> list[str]:
        named = ("--served-model-name", self.name)
        command = [*vllm(self.settings.engine_version), "serve", str(self.directory), *named, *address, *arguments]
        # /health and /metrics are requested every few seconds as long as it serves.
        quiet = ["--disable-access-log-for-endpoints", "/health,/metrics"]
        command += quiet if self.log_requests else ["--disable-uvicorn-access-log"]
        command += FOR_CLIENTS if self.for_clients else []
        return command + (["--shutdown-timeout", str(self.drain_s)] if self.drain_s else [])


@dataclass(frozen=True)
class Server:
    """A vLLM server that has answered a completion."""

    url: str
    """Base URL, without ``/v1``; ``unix://localhost`` and a path if it listens on a socket."""
    name: str
    architecture: str
    """The model's, from its configuration."""
    process: Contained
    watch: EngineWatch
    arguments: tuple[str, ...]
    """The arguments that decide how it serves; not the model, the address or the name."""
    startup_log: ServerLog
    log: ServerLog
    """Its output from its first answer on; while it starts, the same as *startup_log*."""
    ready_s: float = 0.0
    start: ColdStart | None = None
    api_key: str = ""

    @property
    def access(self) -> Access:
        return Access(self.url, self.name, self.api_key)

    def check_alive(self) -> None:
        """Check that its processes run. An API process without an engine, which may never end by itself, has failed.

        Raises:
            ServerFailed: it failed; the reason is from its log.
            ServerKilled: something else ended one of its processes.
        """
        if self.process.poll() is None and not self.watch.dead():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            lost = self.watch.lost
            self.process.wait(ENGINE_ENDS_S if lost and lost.name == API else SETTLE_S)
        raise self._failure()

    def _failure(self) -> SlipwayError:
        text, hint = self.log.text(), f"see {self.log.path}"
        cause = error_in(text)
        if cause and not CRASH.match(cause):
            return ServerFailed(f"vLLM ended: {cause}", hint=hint)
        lost, status = self.watch.lost, (self.process.poll() or 0) - SIGNALLED
        of_api = lost is None or lost.name == API
        number = signal_in(text) or (lost.signal if lost else None)
        # The exit status is that of the API process, of which others that end later say nothing.
        if status in set(signal.Signals) and (number is None or (of_api and status == signal.SIGKILL)):
            number = signal.Signals(status)
        if number is None and lost is None and FAILED_CHILD not in text:
            return ServerFailed(f"vLLM ended: {last_line(text)}", hint=hint)
        process = "API server" if lost is None or of_api else lost.name
        ended = f"was ended by {number.name}" if number else "ended without an error in its log"
        doing = "loaded" if self.log == self.startup_log else "served"
        message = f"vLLM's {process} {ended} while it {doing} {self.architecture}"
        if number in CRASHES.values():
            return ServerFailed(message, hint=hint)
        return ServerKilled(message, hint=f"the machine may have run out of memory; {hint}")

    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, as the server itself reports, or else ServerFailed."""
        try:
            reply = http().get(f"{self.url}/v1/models", headers=credentials(self.api_key), timeout=HEALTH_TIMEOUT_S)
            return int(reply.raise_for_status().json()["data"][0]["max_model_len"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerFailed(f"{self.url}/v1/models did not answer: {error}", hint=f"see {self.log.path}") from error


@contextlib.contextmanager
def running(spec: ServerSpec, cancelled: threading.Event | None = None) -> Iterator[Server]:
    """Run a vLLM server, from its first answer until the block is left in whatever way.

    Args:
        cancelled: when set, it ends the wait for the first answer; for a thread, which no signal reaches.

    Raises:
        ConfigError: the host is not an address of this machine, an argument is not allowed, or the weights do not fit.
        PortInUse: something listens on the port; nothing was started.
        ServerFailed: it failed, or did not answer within ``settings.startup_timeout_s``.
        ServerKilled: something else ended it while it started.
        Interrupted: it was cancelled.
    """
    if serves_on_gpu():
        check_room(spec.directory, spec.settings)
    started = time.monotonic()
    binding = core_binding(spec.settings, spec.half, spec.replica)
    # Before the settings' extra arguments, of which the last one holds.
    arguments = [*threads(binding)[1], *lora_arguments(spec.adapters)]
    arguments += engine_arguments(spec.settings, spec.directory)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with _address(spec, stack) as (address, url), spec.log.open("ab") as output:
            startup_log = ServerLog(spec.log, output.tell())
            command = Contained(
                spec.command(address, arguments),
                output=output,
                environment=environment(spec.api_key, binding, spec.gpus, spec.settings),
                grace_s=GRACE_S + spec.drain_s,
            )
            server = Server(
                url=url,
                name=spec.name,
                architecture=str((config_in(spec.directory).get("architectures") or ["the model"])[0]),
                watch=EngineWatch(spec.log, output.tell()),
                process=stack.enter_context(command),
                arguments=tuple(arguments),
                startup_log=startup_log,
                log=startup_log,
                api_key=spec.api_key,
            )
            with _ended_when(cancelled, server.process):
                ready_at, first_answer_s = _wait_until_it_answers(server, spec.settings.startup_timeout_s)
        ready_s = round(time.monotonic() - started, 3)
        start = startup_log.cold_start(ready_s, first_answer_s)
        yield replace(server, log=ServerLog(spec.log, ready_at), ready_s=ready_s, start=start)


@contextlib.contextmanager
def _address(spec: ServerSpec, stack: contextlib.ExitStack) -> Iterator[tuple[list[str], str]]:
    """Where it will listen: vLLM's arguments and the base URL. A port is reserved until the block is left, a socket's
    folder is there as long as *stack*."""
    if spec.unix_socket:
        # Not in the store, whose path may be longer than that of a socket can be.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-"))  # mode 0700
        path = f"{folder}/vllm{SOCKET}"
        yield ["--uds", path], f"unix://localhost{path}"
        return
    with reserved_port(spec.host, spec.port) as port:
        yield ["--host", spec.host, "--port", str(port)], f"http://{reachable(spec.host)}:{port}"


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port that nothing listens on until the block is left.

    It is bound with SO_REUSEADDR but not listened on. Linux then lets vLLM, which sets that option too, bind the same
    port, and does not give it to programs that ask for any free port.

    Raises:
        PortInUse: something listens on the port.
        ConfigError: *host* is not an address of this machine, or the port needs root.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"serving.host {host!r} is not an address", hint="use 127.0.0.1 or 0.0.0.0") from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {port} on {host} is in use",
                    hint="stop the program that uses it, or set another serving.port (0: a free one) or shared_port",
                ) from error
            raise ConfigError(f"cannot serve on {host}:{port}: {error.strerror}", hint="see serving.host") from error
        yield int(listener.getsockname()[1])


@contextlib.contextmanager
def _ended_when(cancelled: threading.Event | None, process: Contained) -> Iterator[None]:
    """End *process*, and so the wait in this block, as soon as *cancelled* is set."""
    if cancelled is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if cancelled.is_set():
                process.terminate()
                return

    watcher = threading.Thread(target=watch)
    try:
        watcher.start()  # an interruption may come before it returns, when the thread already runs
        yield
    except (ServerFailed, ServerKilled) as error:
        if cancelled.is_set():
            raise Interrupted("cancelled while it started") from error
        raise
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join()


def _wait_until_it_answers(server: Server, timeout_s: float) -> tuple[int, float]:
    """Return the length of the log before the first answer, since what follows does not belong to the start, and the
    seconds that this answer took."""
    deadline = time.monotonic() + timeout_s
    while not healthy(server.url):
        server.check_alive()
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"vLLM was not ready after {timeout_s:.0f} s; its last line: {last_line(server.log.text())}",
                hint=f"see {server.log.path}, or raise serving.startup_timeout_s",
            )
        time.sleep(POLL_S)
    ready_at, healthy_at = server.log.path.stat().st_size, time.monotonic()
    try:
        answer(server.url, server.name, server.api_key, timeout_s=max(1.0, deadline - time.monotonic()))
    except ServerFailed as error:
        server.check_alive()
        raise ServerFailed(f"vLLM started but {error}", hint=f"see {server.log.path}") from error
    return ready_at, time.monotonic() - healthy_at
