"""vLLM's server: started, asked whether it answers, and always stopped.

The evaluation and the production endpoint start it alike, or the measurement would say nothing of production.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from stages.errors import ConfigError, Interrupted, PortInUse, ServerFailed
from stages.gpu_room import check_room
from stages.hardware import core_halves, gpus
from stages.process import GRACE_S, Contained, contained
from stages.server_log import ServerLog, last_line
from stages.settings import Serving

VLLM: Final = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The ``vllm`` command of this very environment, whether or not it is on PATH."""
BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.25
SIGNALLED: Final = 128
"""Plus a signal's number: the exit status of a program that it ended."""
HEALTH_TIMEOUT_S: Final = 5.0
CPU_KV_CACHE_MIB: Final = 1024
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Server:
    """A vLLM server that has answered."""

    url: str
    port: int
    name: str
    process: Contained
    arguments: tuple[str, ...]
    """What decides how it serves; not the model, the address or the name."""
    startup_log: ServerLog
    log: ServerLog
    """What it says from its first answer on; while it starts, the same as *startup_log*."""
    ready_s: float = 0.0
    api_key: str = ""

    def check_alive(self) -> None:
        """Raises: ServerFailed: it has ended, with the reason from its log."""
        status = self.process.poll()
        if status is None:
            return
        hint = f"see {self.log.path}"
        if status == SIGNALLED + signal.SIGKILL:
            raise ServerFailed("vLLM was killed", hint=f"the machine may have run out of memory; {hint}")
        raise ServerFailed(f"vLLM ended: {self.log.cause()}", hint=hint)

    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, as the server itself says.

        Raises:
            ServerFailed: it does not say.
        """
        try:
            reply = http().get(f"{self.url}/v1/models", headers=credentials(self.api_key), timeout=HEALTH_TIMEOUT_S)
            return int(reply.raise_for_status().json()["data"][0]["max_model_len"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerFailed(f"{self.url}/v1/models did not answer: {error}", hint=f"see {self.log.path}") from error


@contextlib.contextmanager
def running(
    directory: Path,
    name: str,
    settings: Serving,
    *,
    log: Path,
    host: str = LOOPBACK,
    port: int = 0,
    api_key: str = "",
    drain_s: int = 0,
    log_requests: bool = True,
    half: int = 0,
    cancelled: threading.Event | None = None,
) -> Iterator[Server]:
    """``vllm serve`` on *directory*, from its first answer until the block is left in whatever way.

    Args:
        name: what clients call the model.
        port: 0 takes a free one.
        log: the server's output is appended to it.
        drain_s: seconds that requests in flight are given to finish when it is stopped.
        log_requests: a line for each request in the log, which grows with them.
        half: 0 or 1, of the machine's cores: see ``core_binding``.
        cancelled: set, it ends the wait for the first answer, where no signal reaches (a thread).

    Raises:
        ConfigError: *host* is not an address of this machine, an argument is not for here, or the weights find no room.
        PortInUse: something listens on *port*; nothing was started.
        ServerFailed: it ended, or did not answer within ``settings.startup_timeout_s``.
        Interrupted: it was cancelled.
    """
    if serves_on_gpu():
        check_room(directory, settings)
    started = time.monotonic()
    arguments = engine_arguments(settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with reserved_port(host, port) as chosen, log.open("ab") as output:
            command = [*VLLM, "serve", str(directory), "--served-model-name", name]
            command += ["--host", host, "--port", str(chosen), *arguments]
            # These two are asked every few seconds for as long as it serves.
            quiet = ["--disable-access-log-for-endpoints", "/health,/metrics"]
            command += quiet if log_requests else ["--disable-uvicorn-access-log"]
            if drain_s:
                command += ["--shutdown-timeout", str(drain_s)]
            said = ServerLog(log, output.tell())
            process = stack.enter_context(
                contained(
                    command,
                    output=output,
                    environment=environment(api_key, core_binding(settings, half)),
                    grace_s=GRACE_S + drain_s,
                )
            )
            url = f"http://{reachable(host)}:{chosen}"
            server = Server(url, chosen, name, process, tuple(arguments), said, said, api_key=api_key)
            with _ended_when(cancelled, process):
                ready_at = _wait_until_it_answers(server, settings.startup_timeout_s)
        ready_s = round(time.monotonic() - started, 3)
        yield replace(server, log=ServerLog(log, ready_at), ready_s=ready_s)


def engine_arguments(settings: Serving, *, on_gpu: bool | None = None) -> list[str]:
    """The arguments of ``vllm serve`` that decide how it serves.

    Args:
        on_gpu: where it will serve; None: here.

    Raises:
        ConfigError: an extra argument would show a secret in the process list.
    """
    if any(each.replace("_", "-").startswith("--api-key") for each in settings.extra_arguments):
        raise ConfigError("an API key in serving.extra_arguments would be shown by ps", hint="set SLIPWAY_API_KEY")
    on_gpu = serves_on_gpu() if on_gpu is None else on_gpu
    dtype = settings.dtype if settings.dtype != "auto" else "float16" if on_gpu else "bfloat16"
    arguments = ["--dtype", dtype]
    if settings.max_model_len:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    if on_gpu:
        arguments += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    kv_cache_mib = settings.kv_cache_mib or (None if on_gpu else CPU_KV_CACHE_MIB)
    if kv_cache_mib:
        arguments += ["--kv-cache-memory-bytes", str(kv_cache_mib * MIB)]
    if settings.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if settings.enforce_eager:
        arguments.append("--enforce-eager")
    return [*arguments, *settings.extra_arguments]


def serves_on_gpu() -> bool:
    """Whether vLLM will use a GPU: there is one, and it is not vLLM's CPU build."""
    return not installed_version("vllm").endswith("+cpu") and bool(gpus())


def installed_version(tool: str) -> str:
    """Raises: ConfigError: *tool* is not installed."""
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{tool} is not installed", hint="pip install 'slipway[evaluate]'") from error


def core_binding(settings: Serving, half: int = 0) -> str:
    """The cores that a server's threads are bound to without a GPU, such as ``0,1,2``; empty where vLLM chooses.

    vLLM would bind those of every server to the same cores, where a release and the one beside it starve each other by
    turns. Evaluations get as many as a release will. It chooses in a pod, which has its server to itself, with tensor
    parallelism, which takes a NUMA node for each part, and on a single core.
    """
    if chosen := os.environ.get(BINDING):
        return chosen
    alone = "KUBERNETES_SERVICE_HOST" in os.environ or settings.tensor_parallel_size > 1
    halves = None if alone or serves_on_gpu() else core_halves()
    return ",".join(map(str, halves[half])) if halves else ""


def environment(api_key: str = "", binding: str = "") -> dict[str, str]:
    """vLLM's environment: offline, unobserved, with a cache of its own, and the API key where ps can't see it."""
    variables = dict(os.environ)
    # Whole GiB, and it would override --kv-cache-memory-bytes.
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    variables.pop("VLLM_API_KEY", None)
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # server_log.py reads it
        "VLLM_CONFIGURE_LOGGING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    variables.setdefault("VLLM_CACHE_ROOT", str(_cache()))
    if api_key:
        variables["VLLM_API_KEY"] = api_key
    if binding:
        variables[BINDING] = binding
    return variables


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """A port that nothing listens on, kept from others until the block is left.

    It is bound but not listened on, with SO_REUSEADDR: Linux then lets vLLM, which sets it too, bind it beside us,
    and gives it to nobody who asks for any free port.

    Raises:
        PortInUse: something listens on it.
        ConfigError: *host* is not an address of this machine, or the port needs root.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"serving.host {host!r} is not an address", hint="use 127.0.0.1 or 0.0.0.0") from error
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {port} on {host} is in use",
                    hint="stop what uses it, or choose another with --set serving.port=… (0: a free one)",
                ) from error
            raise ConfigError(f"cannot serve on {host}:{port}: {error.strerror}", hint="see serving.host") from error
        yield int(held.getsockname()[1])


@functools.cache
def http() -> httpx.Client:
    """The client for servers of ours: no proxy in between, and a new connection for each request, since a server
    that was restarted knows nothing of an old one."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def credentials(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def healthy(url: str) -> bool:
    """Whether ``/health`` is 200: the API answers and its engine lives."""
    try:
        return http().get(f"{url}/health", timeout=HEALTH_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False


def answer(url: str, name: str, api_key: str = "", *, timeout_s: float = 60.0) -> str:
    """One token of a real completion, which only a whole, loaded model gives.

    Raises:
        ServerFailed: no answer, or one that is none.
    """
    body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    try:
        reply = http().post(f"{url}/v1/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        if not reply.is_success:
            raise ServerFailed(f"{url} refused a completion: {_refusal(reply)}")
        completion: dict[str, Any] = reply.json()
        if completion["usage"]["completion_tokens"] != 1:
            raise ServerFailed(f"{url} answered with {completion['usage']['completion_tokens']} tokens, not one")
        return str(completion["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error


def answers_chat(url: str, name: str, api_key: str = "", *, timeout_s: float = 60.0) -> bool:
    """Whether it completes a chat; False: not at the moment.

    Raises:
        ServerFailed: it refuses: its chat template is missing or broken, which no waiting mends.
    """
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    try:
        reply = http().post(f"{url}/v1/chat/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        if reply.status_code == httpx.codes.BAD_REQUEST:
            raise ServerFailed(f"{url} refused a chat completion: {_refusal(reply)}", hint="see its chat template")
        return reply.is_success and bool(reply.json()["choices"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer of the model in *directory* says how a chat becomes a prompt."""
    if any((directory / each).is_file() for each in ("chat_template.jinja", "chat_template.json")):
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    return False


def run_against(server: Server, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
    """Run a client of *server* to its end; return its exit status. Neither survives the other's failure.

    Raises:
        ServerFailed: the server ended first.
    """
    with log.open("wb") as output, contained(command, output=output, environment=beside_server(variables)) as process:
        while (status := process.poll()) is None:
            server.check_alive()
            time.sleep(POLL_S)
    server.check_alive()
    return status


def beside_server(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server's client on the same machine: no proxy for the Internet stands in between."""
    around = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy")), LOOPBACK, "localhost"]))
    return {**os.environ, "NO_PROXY": around, "no_proxy": around, **variables}


@contextlib.contextmanager
def _ended_when(cancelled: threading.Event | None, process: Contained) -> Iterator[None]:
    """End *process* as soon as *cancelled* is set, and with it the wait in this block.

    Raises:
        Interrupted: it was set.
    """
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
    watcher.start()
    try:
        yield
    except ServerFailed as error:
        if cancelled.is_set():
            raise Interrupted("cancelled while it started") from error
        raise
    finally:
        over.set()
        watcher.join()


def _wait_until_it_answers(server: Server, timeout_s: float) -> int:
    """Returns where the log stood before the first answer: what it says from there on is no matter of the start."""
    deadline = time.monotonic() + timeout_s
    while not healthy(server.url):
        server.check_alive()
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"vLLM was not ready after {timeout_s:.0f} s; its last line: {last_line(server.log.text())}",
                hint=f"see {server.log.path}, or raise serving.startup_timeout_s",
            )
        time.sleep(POLL_S)
    ready_at = server.log.path.stat().st_size
    try:
        answer(server.url, server.name, server.api_key, timeout_s=max(1.0, deadline - time.monotonic()))
    except ServerFailed as error:
        server.check_alive()
        raise ServerFailed(f"vLLM started but {error}", hint=f"see {server.log.path}") from error
    return ready_at


def _refusal(reply: httpx.Response) -> str:
    """vLLM's own message, else the status."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return f"{reply.status_code} {reply.json()['error']['message']}"
    return f"{reply.status_code} {reply.reason_phrase}"


def reachable(host: str) -> str:
    """The address to reach a server bound to *host*, as it stands in a URL."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else LOOPBACK)
    return f"[{address}]" if address.version == 6 else str(address)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "slipway" / f"vllm-{installed_version('vllm')}"
