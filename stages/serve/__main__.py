"""serve: the published release as an OpenAI-compatible endpoint on this machine. A supervisor in a session of its own,
which outlives this stage, keeps it up. If another release is served already, traffic is moved step by step."""

from __future__ import annotations

import argparse

from stages.parts.base import program
from stages.parts.base.errors import Interrupted
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE, stop
from stages.parts.endpoint.supervisor import serve_foreground
from stages.parts.model.name import ModelName
from stages.serve.ensure import ensure


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
