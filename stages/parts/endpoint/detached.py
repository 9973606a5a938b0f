"""Starts the supervisor of a model's endpoint in a session of its own, so that it outlives the starting process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

import psutil

from stages.parts.base import program
from stages.parts.base.errors import PortInUse, ServerFailed
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.endpoint.database import URL_VARIABLE, usage_url
from stages.parts.endpoint.endpoint import (
    API_KEY_VARIABLE,
    LOG,
    RECORD,
    SERVERS,
    STOP_TIMEOUT_S,
    WANTED,
    Endpoint,
    Wanted,
    endpoint,
)
from stages.parts.endpoint.tls import tls_of
from stages.parts.vllm.server import POLL_S, reserved_port
from stages.parts.vllm.server_log import ServerLog

PREVIOUS_LOG: Final = "endpoint.previous.log"


def start(
    store: ModelStore, source: str, serving: AskedServing, wanted: Wanted, *, secrets: Mapping[str, str] | None = None
) -> Endpoint:
    """Serve what is *wanted* and return once the stable release answers. If this is interrupted, it is stopped again.

    Args:
        source: the model as the user named it.
        secrets: see ``secrets_of``; if None, what is set for this process.

    Raises:
        ConfigError: see ``tls_of`` and ``usage_url``.
        PortInUse: something else listens on ``serving.port``.
        ServerFailed: it could not be served.
    """
    tls_of(serving)
    secrets = {URL_VARIABLE: usage_url()} if secrets is None else secrets
    # The proxy of a supervisor that ended a moment ago, or was killed, may still be ending.
    _wait_for_port(serving, STOP_TIMEOUT_S if (store.path / WANTED).exists() else 0.0)
    log = store.path / LOG
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(PREVIOUS_LOG))
    (store.path / RECORD).unlink(missing_ok=True)
    wanted.write(store.path / WANTED)
    failure = store.path / SERVERS / program.FAILURE
    failure.unlink(missing_ok=True)
    command = [sys.executable, "-m", "stages.serve", "--foreground", "--resume", "--model", source]
    variables = {**os.environ, STORE_VARIABLE: str(store.root), program.OUTPUTS_VARIABLE: str(failure.parent)}
    variables.pop(program.RUN_VARIABLE, None)  # the run ends before the endpoint does
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, "--serving", serving.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**variables, **secrets},
            start_new_session=True,
        )
    try:
        while child.poll() is None:
            if (running := endpoint(store)) and running.pid == child.pid:
                return running
            time.sleep(POLL_S)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    error = program.StageFailure.read(failure, child.returncode)
    if error is None:  # it was killed
        raise ServerFailed(f"the endpoint ended: {ServerLog(log).cause()}", hint=f"see {log}")
    raise ServerFailed(error.message, hint=error.hint or f"see {log}")


def secrets_of(running: Endpoint) -> dict[str, str]:
    """Read the environment variables of a running endpoint that no file holds: the key that it requires, and where it
    puts its usage."""
    try:
        variables = psutil.Process(running.pid).environ()
    except psutil.Error:
        variables = dict(os.environ)
    return {name: variables.get(name, "") for name in (API_KEY_VARIABLE, URL_VARIABLE)}


def _wait_for_port(serving: AskedServing, timeout_s: float) -> None:
    """Wait until nothing listens on the port."""
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    in_use, over = retry_if_exception_type(PortInUse), stop_after_delay(timeout_s)
    for attempt in Retrying(retry=in_use, stop=over, wait=wait_fixed(POLL_S), reraise=True):
        with attempt, reserved_port(serving.host, serving.port):
            pass
