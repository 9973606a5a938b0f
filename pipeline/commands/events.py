"""``slipway receive`` and ``slipway trigger``: runs that a push to a registry starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.commands import cluster
from pipeline.options import (
    STORE,
    ConfigOption,
    ContextOption,
    Engine,
    EngineOption,
    JsonOption,
    NamespaceOption,
    ProfileOption,
    SetOption,
    StoreOption,
    load_config,
    print_result,
)
from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from stages.parts.cluster.kinds import Object

HUGGING_FACE: Final = "huggingface"


def register(app: typer.Typer) -> None:
    app.command("trigger", epilog="Example: slipway trigger --payload event.json --dry-run")(trigger)
    app.command(
        "receive",
        epilog="Example: slipway receive --allow 'org/*' --forward-to http://slipway-pushes-eventsource-svc:12000/huggingface",
    )(receive)


def trigger(
    payload: Annotated[str, typer.Option(metavar="FILE", help="What the registry posted, as JSON. -: standard input.")],
    provider: Annotated[str, typer.Option(help="Who posted it: huggingface or harbor.")] = HUGGING_FACE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Workflow that it would start.")] = False,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    follow: Annotated[bool, typer.Option(help="On a cluster: stay until the run ends.")] = True,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Do what the Sensor does with a registry's event: start the run of what was pushed, or say why none is started.

    Evaluates manifests/events/sensor.yaml. An event that starts no run ends with exit code 52.
    """
    from pipeline.argo.status import arguments_of
    from pipeline.events.sensor import Sensor

    workflow = Sensor.read().workflow(provider, _read(payload))
    given = arguments_of(workflow)
    sys.stderr.write(f"{given['model']} was pushed at {given['revision']}\n")
    if dry_run:
        import yaml

        print_result(workflow, yaml.safe_dump(workflow, sort_keys=False).rstrip(), as_json)
    elif engine is Engine.ARGO:
        if profile or config or assignments:
            raise ConfigError(
                "a pushed model is run with the settings of the installed template",
                hint="leave out --profile, --config and --set (and their environment variables), or: --engine local",
            )
        _on_a_cluster(workflow, context, namespace, follow=follow, as_json=as_json)
    else:
        from pipeline import submit

        settings = load_config(config, profile, None, "local", assignments)
        finished = submit.run(
            settings,
            given["model"],
            given["revision"],
            store=store.absolute(),
            serve=given["serve"] == "true",
            refresh=False,
        )
        print_result(finished.document(), finished.summary(), as_json)


def receive(
    forward_to: Annotated[
        str, typer.Option(metavar="URL", envvar="SLIPWAY_FORWARD_TO", help="The EventSource of Argo Events.")
    ],
    allow: Annotated[
        list[str], typer.Option(metavar="PATTERN", envvar="SLIPWAY_ALLOW", help="Models that may start runs: 'org/*'.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free one.")] = 8080,
    per_hour: Annotated[int, typer.Option(min=1, help="Pushes of one repository that go on in an hour.")] = 12,
    memory: Annotated[
        Path | None, typer.Option(help="File that remembers over a restart which commits went on.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long an EventSource that is away is tried again.")
    ] = 8.0,
) -> None:
    """Receive Hugging Face's webhooks, check their secret, and hand on to Argo Events what starts a run.

    SLIPWAY_WEBHOOK_SECRET is the webhook's secret and SLIPWAY_EVENTS_TOKEN the EventSource's token; or
    SLIPWAY_WEBHOOK_SECRET_FILE and SLIPWAY_EVENTS_TOKEN_FILE, files with them.
    """
    from pipeline.events.receiver import Options, serve

    serve(
        Options(
            forward_to=forward_to,
            allowed=allow,
            host=host,
            port=port,
            per_hour=per_hour,
            memory=memory,
            patience_s=patience,
        )
    )


def _read(path: str) -> Any:
    """Raises: ConfigError: it can't be read, or is not JSON."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="--payload takes the body that was posted") from error


def _on_a_cluster(workflow: Object, context: str | None, namespace: str | None, *, follow: bool, as_json: bool) -> None:
    from pipeline.argo.engine import announced
    from pipeline.events.starting import start
    from pipeline.manifests import NAMESPACE

    there = cluster.connected(context, namespace or NAMESPACE)
    cluster.print_started(there, announced(start(there, workflow), new=True), follow=follow, as_json=as_json)
