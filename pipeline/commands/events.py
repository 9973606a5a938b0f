"""``slipway receive`` and ``slipway trigger``: runs that a push to a registry starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.commands import options as common
from pipeline.commands.fleet import apply
from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError
from stages.parts.base.log import say

commands = common.Commands()


@commands.add("trigger --payload event.json --dry-run")
def trigger(
    payload: Annotated[str, typer.Option(metavar="FILE", help="The webhook's body, as JSON. -: standard input.")],
    provider: Annotated[str, typer.Option(help="The registry that posted it: huggingface or harbor.")] = "huggingface",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Workflow, and start nothing.")] = False,
    follow: common.FollowOption = True,
    fleet: Annotated[
        Path | None, typer.Option(help="Run it with its settings in this fleet file, as slipway apply does.")
    ] = None,
    profile: common.ProfileOption = None,
    config: common.ConfigOption = None,
    assignments: common.SetOption = None,
    *,
    where: common.Where,
) -> Printout | None:
    """Start the run that a registry's webhook would start.

    If the event starts no run, it says why and ends with exit code 52.
    """
    from pipeline.events import push as pushes
    from pipeline.events.push import push_of

    push = push_of(provider, _read(payload))
    say(f"{push.model} was pushed at {push.commit}")
    if fleet:
        return apply(fleet, push.model, push.commit, dry_run=dry_run, where=where)
    if dry_run:
        import yaml

        workflow = pushes.workflow(push)
        return Printout(workflow, yaml.safe_dump(workflow, sort_keys=False).rstrip())
    if where.on_cluster:
        from pipeline.cluster.manifests import NAMESPACE

        if profile or config or assignments:
            hint = "leave out --profile, --config and --set (and their environment variables), or use --engine local"
            raise ConfigError("on a cluster a pushed model runs with the settings of the installed template", hint=hint)
        engine = common.argo_engine(where.cluster(namespace=NAMESPACE), follow=follow)
        run = engine.announce(pushes.start(engine.cluster, push), True)
        return engine.result(run)
    settings = where.settings(common.ConfigOptions(config=config, assignments=assignments), profile=profile)
    return where.engine_of().start(settings, push.model, push.commit, serve=True)


@commands.add("receive --allow 'org/*' --forward-to http://slipway-pushes-eventsource-svc:12000/pushes")
def receive(
    forward_to: Annotated[
        str, typer.Option(metavar="URL", envvar="SLIPWAY_FORWARD_TO", help="The EventSource of Argo Events.")
    ],
    allow: Annotated[
        list[str], typer.Option(metavar="PATTERN", envvar="SLIPWAY_ALLOW", help="Models that may start runs: 'org/*'.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free one.")] = 8080,
    per_hour: Annotated[int, typer.Option(min=1, help="Pushes of one model that are forwarded within an hour.")] = 12,
    memory: Annotated[
        Path | None, typer.Option(help="File that keeps over a restart which commits were forwarded.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to retry an EventSource that does not answer.")
    ] = 8.0,
) -> None:
    """Receive webhooks, and forward those that start runs.

    Receives the webhooks of Hugging Face and Harbor, checks their secrets, and forwards pushes that should start a run
    to Argo Events.

    SLIPWAY_WEBHOOK_SECRET is the secret of Hugging Face's webhook (/huggingface), SLIPWAY_HARBOR_TOKEN the Bearer token
    that Harbor sends (/harbor); a provider without a secret is not accepted. SLIPWAY_EVENTS_TOKEN is the EventSource's
    token. Each variable with _FILE at its end names a file with the secret instead.
    """
    from pipeline.events.receiver import serve

    serve(forward_to, allow, host=host, port=port, per_hour=per_hour, memory=memory, patience_s=patience)


def _read(path: str) -> Any:
    """Read the payload. Raises: ConfigError: the file can't be read, or is not JSON."""
    from stages.parts.base.files import from_json

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    try:
        return from_json(text)
    except ValueError as error:
        hint = "--payload takes the body of the webhook's request"
        raise ConfigError(f"{path} is not JSON: {error}", hint=hint) from error
