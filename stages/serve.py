"""serve: the published release as an OpenAI-compatible endpoint on this machine, kept up by a supervisor in a session
of its own that outlives this stage."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from stages import program
from stages.endpoint import (
    API_KEY_VARIABLE,
    LOG,
    RECORD,
    STOP_TIMEOUT_S,
    Endpoint,
    api_key,
    endpoint,
    published,
    stop,
)
from stages.errors import Interrupted, PortInUse, ServerFailed
from stages.hub import model_id
from stages.server import POLL_S, answer, healthy, reserved_port
from stages.server_log import ServerLog
from stages.settings import Serving, parse_json
from stages.store import STORE_VARIABLE, ModelStore, exclusive, store_root
from stages.supervise import say, serve_foreground

__all__ = ["Endpoint", "endpoint", "ensure", "serve_foreground", "stop"]

PREVIOUS_LOG: Final = "endpoint.previous.log"
ERROR_PREFIX: Final = "error: "


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root().absolute(), model_id(arguments.model))
    serving = parse_json(Serving, arguments.serving, "--serving")
    if arguments.foreground:
        try:
            serve_foreground(store, serving)
        except (KeyboardInterrupt, Interrupted):
            say("stopped")
    elif arguments.stop:
        say("stopped" if stop(store) else "nothing was serving")
    else:
        with program.outcome(store, "serve") as report:
            found, started = ensure(store, serving, arguments.model)
            said = f"{found.release} as {found.model!r} on {found.url}/v1"
            if started:
                report.done(f"serving {said}")
            else:
                report.reused(f"already serving {said}")
        program.write_output("url", found.url)
        print(found.url)


def ensure(store: ModelStore, serving: Serving, source: str) -> tuple[Endpoint, bool]:
    """The endpoint of the published release with these settings, and whether it had to be started.

    One that serves something else is replaced. *source* is the model as the user named it.

    Raises:
        NothingToServe: no release is published.
        PortInUse: something else listens on ``serving.port``.
        ServerFailed: the release could not be served.
    """
    release = published(store)
    with exclusive(store.lock("serve"), f"serve {store.model}"):
        found = endpoint(store)
        if found and serves(found, release, serving):
            return found, False
        # A supervisor that was killed leaves its record, and a server that is still ending.
        ending = stop(store) or (store.path / RECORD).exists()
        wait_for_port(serving, STOP_TIMEOUT_S if ending else 0.0)
        return start(store, serving, source), True


def serves(found: Endpoint, release: Path, serving: Serving) -> bool:
    """Whether *found* serves *release* just as asked, and answers with the API key that is set now."""
    same = (found.release, found.serving, found.protected) == (
        release.name,
        serving.model_dump(mode="json"),
        bool(api_key()),
    )
    if not same or not healthy(found.url):
        return False
    try:
        answer(found.url, found.model, api_key())
    except ServerFailed:
        return False
    return True


def start(store: ModelStore, serving: Serving, source: str) -> Endpoint:
    """Start a supervisor that outlives this process, once it serves; interrupted before, it is stopped again."""
    log = store.path / LOG
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(PREVIOUS_LOG))
    (store.path / RECORD).unlink(missing_ok=True)
    environment = {**os.environ, STORE_VARIABLE: str(store.root)}
    for variable in (program.RUN_VARIABLE, program.OUTPUTS_VARIABLE):  # they are this stage's, which ends
        environment.pop(variable, None)
    command = [sys.executable, "-m", "stages.serve", "--foreground", "--model", source]
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, "--serving", serving.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        while child.poll() is None:
            if (found := endpoint(store)) and found.pid == child.pid:
                return found
            time.sleep(POLL_S)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    raise ServerFailed(_last_error(log) or f"the endpoint ended: {ServerLog(log).cause()}", hint=f"see {log}")


def wait_for_port(serving: Serving, timeout_s: float) -> None:
    """Raises: PortInUse: something still listens on the port when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with reserved_port(serving.host, serving.port):
                return
        except PortInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _last_error(log: Path) -> str:
    """What the supervisor printed last (see ``program.main``), or nothing if it could not."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX)), "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages.serve",
        description="Serve the published release of a model as an OpenAI-compatible endpoint, and keep it up.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""with {API_KEY_VARIABLE} set, clients must send it as their API key
example:
  python -m stages.serve --model org/name --serving '{{"port": 8000}}'
  python -m stages.serve --model org/name --stop""",
    )
    parser.add_argument("--model", required=True, help="org/name as on the Hub, or a path to a local directory")
    parser.add_argument("--serving", default="{}", help="JSON: see Serving in stages/settings.py")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--foreground", action="store_true", help="serve until interrupted")
    mode.add_argument("--stop", action="store_true", help="stop the endpoint and wait until it is gone")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
