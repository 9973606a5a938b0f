"""serve: the published release as an OpenAI-compatible endpoint on this machine, kept up by a supervisor in a session
of its own that outlives this stage. Where another release is served already, traffic is moved step by step."""

from __future__ import annotations

import argparse

from stages import program
from stages.endpoint import API_KEY_VARIABLE, LOG, SERVERS, Endpoint, Wanted, api_key, endpoint, published, say, stop
from stages.errors import Interrupted, RolledBack, ServerFailed
from stages.hub import model_id
from stages.releases import candidate
from stages.rollout.local.detached import start
from stages.rollout.local.target import OneMachine
from stages.rollout.settings import Rollout
from stages.server import answer, healthy, serves_on_gpu
from stages.settings import Serving, parse_json
from stages.store import ModelStore, exclusive, store_root
from stages.supervise import serve_foreground

__all__ = ["Endpoint", "endpoint", "ensure", "serve_foreground", "stop"]


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root().absolute(), model_id(arguments.model))
    serving = parse_json(Serving, arguments.serving, "--serving")
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
            found, started = ensure(store, serving, arguments.model, rollout)
            said = f"{found.release} as {found.model!r} on {found.url}/v1"
            if found.canary:
                said += f", and {found.canary} with {found.percent} % of the requests"
            if started:
                report.done(f"serving {said}")
            else:
                report.reused(f"already serving {said}")
        program.write_output("url", found.url)
        print(found.url)


def ensure(store: ModelStore, serving: Serving, source: str, rollout: Rollout) -> tuple[Endpoint, bool]:
    """The endpoint of the release that was published last, with these settings, and whether anything had to be done.

    The first release is served as soon as it answers; the next one is rolled out beside it. *source* is the model as
    the user named it.

    Raises:
        NothingToServe: no release is published.
        PortInUse: something else listens on ``serving.port``.
        ServerFailed: the release could not be served.
        RolledBack: it was tried beside the one that is served, and withdrawn.
    """
    from stages.rollout.machine import roll_out

    release = candidate(store) or published(store).name
    with exclusive(store.lock("serve"), f"serve {store.model}"):
        found = endpoint(store)
        if found and serves(found, release, serving):
            return found, False
        target = OneMachine(store, source, serving)
        if found and found.release != release and (changed := target.changed_settings(found)):
            say(f"first the served release with the new settings ({', '.join(changed)})")
            target.deploy(found.release)
        replaced = found if found and found.release != release and not fits_twice(serving) else None
        if replaced:
            say("two servers do not fit on the GPU (serving.gpu_memory_utilization > 0.5): replacing the served one")
            stop(store)
        try:
            roll_out(store, target, release, rollout)
        except (ServerFailed, RolledBack) as error:
            error.hint = f"see {store.path / SERVERS / release}.log, and {store.path / LOG}"
            if replaced:
                start(store, source, serving, Wanted(stable=replaced.release))
            raise
        if (found := endpoint(store)) is None:
            raise ServerFailed(f"the endpoint of {store.model} ended", hint=f"see {store.path / LOG}")
        return found, True


def fits_twice(serving: Serving) -> bool:
    """Whether a canary's server finds room beside the stable one's: they share a GPU, of which each takes its share."""
    return not serves_on_gpu() or serving.gpu_memory_utilization <= 0.5


def serves(found: Endpoint, release: str, serving: Serving) -> bool:
    """Whether *found* serves *release* just as asked, and answers with the API key that is set now."""
    same = (found.release, found.canary, found.serving, found.protected) == (
        release,
        None,
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
    parser.add_argument("--rollout", default="{}", help="JSON: see Rollout in stages/rollout/settings.py")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--foreground", action="store_true", help="serve until interrupted")
    parser.add_argument("--resume", action="store_true", help="serve what serving.json wants, not what is published")
    mode.add_argument("--stop", action="store_true", help="stop the endpoint and wait until it is gone")
    return parser.parse_args()


if __name__ == "__main__":
    program.main(main)
