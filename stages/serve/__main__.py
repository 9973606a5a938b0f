"""serve: the published release as an OpenAI-compatible endpoint on this machine. A supervisor in a session of its own,
which outlives this stage, keeps it up. If another release is served already, traffic is moved step by step."""

from __future__ import annotations

import argparse

import httpx

from stages.parts.base import program
from stages.parts.base.errors import Interrupted, RolledBack, ServerFailed
from stages.parts.base.files import exclusive
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE, LOG, SERVERS, Endpoint, api_key, endpoint, published, stop
from stages.parts.endpoint.supervised_server import PREVIOUS
from stages.parts.endpoint.supervisor import serve_foreground
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import under_way
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import candidate
from stages.parts.vllm.client import HEALTH_TIMEOUT_S, answer, credentials, healthy, http
from stages.rollout.one_machine import OneMachine, settings_of
from stages.rollout.resume import resume
from stages.rollout.state_machine import roll_out


def main() -> None:
    arguments = _arguments()
    store = ModelName.parse(arguments.model).store()
    serving = parse_json(AskedServing, arguments.serving, "--serving")
    rollout = parse_json(Rollout, arguments.rollout, "--rollout")
    if arguments.foreground:
        try:
            serve_foreground(store, serving, resume=arguments.resume)
        except (KeyboardInterrupt, Interrupted):
            say("stopped")
    elif arguments.stop:
        say("stopped" if stop(store) else "nothing was serving")
    else:
        with program.outcome(store, "serve") as report:
            endpoint, started = ensure(store, serving, arguments.model, rollout)
            served = f"{endpoint.release} as {endpoint.model!r} on {endpoint.url}/v1"
            if endpoint.canary:
                served += f", and {endpoint.canary} with {endpoint.percent} % of the requests"
            if started:
                report.done(f"serving {served}")
            else:
                report.reused(f"already serving {served}")
        program.write_output("url", endpoint.url)
        print(endpoint.url)


def ensure(store: ModelStore, asked: AskedServing, source: str, rollout: Rollout) -> tuple[Endpoint, bool]:
    """Serve the release that was published last, with these settings, of the model that the user named *source*.
    Returns the endpoint, and whether anything was done. The first release is served as soon as it answers; a later one
    is rolled out beside the one that is served.

    Raises:
        NothingToServe: no release is published.
        PortInUse: something else listens on ``serving.port``.
        ServerFailed: the release could not be served.
        RolledBack: it was tried beside the one that is served, and withdrawn.
        Conflict: another release is being rolled out.
    """
    release = candidate(store) or published(store).name
    with exclusive(store.lock("serve"), f"serve {store.model}"):
        target = OneMachine(store, source, asked)
        running = endpoint(store)
        if running and serves(store, running, release, asked):
            interrupted = under_way(store)  # a rollout that was killed at its very end has yet to be marked as ended
            if interrupted is None or interrupted.release != release:
                return running, False
        resume(store, release, target.name)  # raises before anything is changed if another rollout is under way
        if running and running.release != release and (changed := target.changed_settings(running)):
            say(f"first restarting the served release with the new settings ({', '.join(changed)})")
            target.deploy(running.release)
        try:
            roll_out(store, target, release, rollout)
        except (ServerFailed, RolledBack) as error:
            running = endpoint(store)
            suffix = PREVIOUS if running and running.release == release else ".log"  # it is served again as before
            error.hint = f"see {store.path / SERVERS / release}{suffix}, and {store.path / LOG}"
            raise
        if (running := endpoint(store)) is None:
            raise ServerFailed(f"the endpoint of {store.model} ended", hint=f"see {store.path / LOG}")
        return running, True


def serves(store: ModelStore, running: Endpoint, release: str, serving: AskedServing) -> bool:
    """Tell whether *running* serves *release* exactly as asked, and answers with the API key that is set now. The
    release's server is asked itself, as our own requests are."""
    target = (release, None, pinned(store, serving, release), bool(api_key()))
    settings = pinned(store, settings_of(running), release)
    if (running.release, running.canary, settings, running.protected) != target:
        return False
    if not healthy(running.url, serving.tls_certificate):
        return False
    server = running.server(release)
    try:
        if api_key():
            client = http(serving.tls_certificate)
            models = f"{running.url}/v1/models"
            client.get(models, headers=credentials(api_key()), timeout=HEALTH_TIMEOUT_S).raise_for_status()
        answer(server.url if server else "", running.model)
    except (ServerFailed, httpx.HTTPError):
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = program.parser(
        "serve",
        "Serve the published release of a model as an OpenAI-compatible endpoint, and keep it up.",
        f"""if {API_KEY_VARIABLE} is set, clients must send it as their API key
example:
  python -m stages.serve --model org/name --serving '{{"port": 8000}}'
  python -m stages.serve --model org/name --stop""",
    )
    parser.add_argument("--serving", default="{}", help="JSON: AskedServing in stages/parts/base/serving_settings.py")
    parser.add_argument("--rollout", default="{}", help="JSON: Rollout in stages/parts/base/rollout_settings.py")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--foreground", action="store_true", help="serve until interrupted")
    parser.add_argument("--resume", action="store_true", help="serve what serving.json asks for, not what is published")
    mode.add_argument("--stop", action="store_true", help="stop the endpoint and wait until it is gone")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
