"""``slipway watch``: look at the release in production again and again, as long as it serves."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import Commands, ModelArgument, VolumeOptions
from pipeline.commands.releases import target_of_endpoint
from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError, Degraded, TransientError
from stages.parts.base.log import say
from stages.parts.base.notify import VARIABLE, Event, notify

if TYPE_CHECKING:
    from stages.parts.base.store import ModelStore
    from stages.parts.records.watch import Look

METRICS: Final = "watch.prom"
"""In the model's folder, for the textfile collector of Prometheus' node exporter."""

commands = Commands()


@commands.add("watch org/name --every 5m --rollback", cleans_up=True)
def watch(
    model: ModelArgument,
    every: Annotated[str, typer.Option(help="Time from one look to the next, such as 90s, 5m or 1h.")] = "5m",
    once: Annotated[bool, typer.Option("--once", help="Look once, judge by the looks before, and end.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="At an alarm, go back to an earlier release that is sound.")
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--notify", envvar=VARIABLE, help="URL of a web hook that gets an alarm, and its end (docs/monitoring.md)."
        ),
    ] = None,
    *,
    volume: VolumeOptions,
) -> Printout:
    """Watch whether the endpoint still is what its release was.

    Each look asks the recorded prompts and sends 200 short requests. Ends at an alarm, with exit code 47.
    """
    from pipeline.local.manifest import seconds
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.watch import go_back, look

    interval_s = 0.0
    with contextlib.suppress(ValueError):
        interval_s = seconds(every)
    if not interval_s:
        raise ConfigError(f"--every is {every!r}", hint="a duration such as 90s, 5m or 1h")
    settings, store = volume.load(), volume.of_model(model)
    via = settings.kserve.gateway_url or "" if settings.platform.serves_on != LOCAL else ""
    while True:
        seen = None
        try:
            target = target_of_endpoint(settings, store, model)
            seen = look(store, target, via)
        except TransientError as error:
            if once:
                raise
            say(f"no look: {error}")
        if seen:
            _tell(store, seen, to)
            if once or seen.alarms:
                done = go_back(store, target, settings.rollout, seen) if rollback and seen.alarms else ""
                failure = Degraded(f"{seen.release} is no longer what it was: {', '.join(seen.alarms)}", hint=seen.text)
                text = "\n".join(filter(None, [f"{seen.release}: {seen.verdict}", seen.text, done]))
                document = {"model": model, "look": seen.model_dump(mode="json"), "done": done}
                return Printout(document, text, failure if seen.alarms else None)
        elif once:
            return Printout({"model": model, "look": None}, f"a rollout of {model} is under way: nothing is judged")
        time.sleep(interval_s)


def _tell(store: ModelStore, look: Look, url: str | None) -> None:
    """Put the look into the log, the metrics and the report; post it if an alarm began or ended."""
    from stages.parts.base.files import write_text
    from stages.report.page import renew

    text = f"{look.verdict}: {look.text}"
    say(f"{look.at.astimezone():%Y-%m-%d %H:%M:%S}  {text}")
    series = f'slipway_watch_alarm{{model="{store.model}",release="{look.release}"}}'
    write_text(store.path / METRICS, f"{series} {int(bool(look.alarms))}\n")
    renew(store, look.release)
    if look.changed:
        event: Event = "watch alarm" if look.alarms else "watch ended"
        notify(store.model, event, f"{look.release}: {text}", url=url, look=look.model_dump(mode="json"))
