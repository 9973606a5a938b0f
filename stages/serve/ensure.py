"""Ensures that the release that was published last is served on this machine, whatever is served now."""

from __future__ import annotations

import httpx

from stages.parts.base.errors import RolledBack, ServerFailed
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore, exclusive
from stages.parts.endpoint.endpoint import LOG, SERVERS, Endpoint, api_key, endpoint, published
from stages.parts.endpoint.supervised_server import PREVIOUS
from stages.parts.records.rollout import under_way
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import candidate
from stages.parts.vllm.client import HEALTH_TIMEOUT_S, answer, credentials, healthy, http
from stages.rollout.one_machine import OneMachine, settings_of
from stages.rollout.resume import resume
from stages.rollout.state_machine import roll_out


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
