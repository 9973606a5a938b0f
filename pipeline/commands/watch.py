"""``slipway watch``: look at the release in production again and again, as long as it serves."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import Commands, ModelArgument, VolumeOptions
from pipeline.commands.releases import target_of_endpoint
from pipeline.runs.engine import Printout
from stages.parts.base.log import say

if TYPE_CHECKING:
    from pathlib import Path

    from stages.parts.base.store import ModelStore
    from stages.parts.records.watch import Look

EVERY: Final = re.compile(r"(\d+)(s|m|h)")
SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
METRICS: Final = "watch.prom"
"""In the model's folder, for the textfile collector of Prometheus' node exporter."""
NOTIFY_TIMEOUT_S: Final = 10.0

commands = Commands()


@commands.add("watch org/name --every 5m --rollback", cleans_up=True)
def watch(
    model: ModelArgument,
    every: Annotated[str, typer.Option(help="Time from one look to the next, such as 90s, 5m or 1h.")] = "5m",
    once: Annotated[bool, typer.Option("--once", help="Look once, judge by the looks before, and end.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="At an alarm, go back to an earlier release that is sound.")
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(envvar="SLIPWAY_NOTIFY", help="URL that gets an alarm, and its end, as JSON with a text."),
    ] = None,
    *,
    volume: VolumeOptions,
) -> Printout:
    """Watch whether the endpoint still is what its release was.

    Each look asks the recorded prompts and sends 200 short requests. Ends at an alarm, with exit code 47.
    """
    from stages.parts.base.errors import Degraded, TransientError
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.watch import go_back, look

    interval_s, settings, store = _seconds(every), volume.load(), volume.of_model(model)
    via = settings.kserve.gateway_url or "" if settings.platform.serves_on != LOCAL else ""
    while True:
        seen: Look | None = None
        try:
            target = target_of_endpoint(settings, store, model)
            seen = look(store, target, via)
        except TransientError as error:
            if once:
                raise
            say(f"no look: {error}")
        if seen is None and once:
            return Printout({"model": model, "look": None}, f"a rollout of {model} is under way: nothing is judged")
        if seen:
            say(f"{seen.at.astimezone():%Y-%m-%d %H:%M:%S}  {seen.verdict}: {seen.text}")
            _tell(store, seen, notify)
            done = go_back(store, target, settings.rollout, seen) if rollback and seen.alarms else ""
            if once or seen.alarms:
                failure = Degraded(f"{seen.release} is no longer what it was: {', '.join(seen.alarms)}", hint=seen.text)
                text = f"{seen.release}: {seen.verdict}\n{seen.text}" + (f"\n{done}" if done else "")
                document = {"model": model, "look": seen.model_dump(mode="json"), "done": done}
                return Printout(document, text, failure if seen.alarms else None)
        time.sleep(interval_s)


def _seconds(every: str) -> int:
    from stages.parts.base.errors import ConfigError

    if not (match := EVERY.fullmatch(every)) or not int(match[1]):
        raise ConfigError(f"--every is {every!r}", hint="a number and s, m or h, such as 5m")
    return int(match[1]) * SECONDS[match[2]]


def _tell(store: ModelStore, look: Look, notify: str | None) -> None:
    """Put the look into the metrics, the report and the task's output; notify if an alarm began or ended."""
    from stages.parts.base.program import write_output
    from stages.parts.records.watch import ALARM, seen
    from stages.report.page import renew

    *_, before = [None, *seen(store).of(look.release)[:-1]]
    changed = bool(look.alarms) != bool(before and before.alarms)
    _write_metrics(store.path / METRICS, store.model, look)
    write_output(ALARM, str(int(bool(look.alarms))))
    renew(store, look.release)
    if changed and notify:
        _notify(notify, f"{store.model}: {look.release}: {look.verdict}. {look.text}", look)


def _write_metrics(path: Path, model: str, look: Look) -> None:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    from stages.parts.base.store import write_text

    registry, failed = CollectorRegistry(), look.failed / look.requests if look.requests else None
    for name, about, value in (
        ("alarm", "Whether what serves is no longer what its release was", float(bool(look.alarms))),
        ("agreement", "Of the answers with the recorded ones", look.agreement),
        ("failed_share", "Of the requests", failed),
        ("ttft_milliseconds", "Median time to first token of the look's own load", look.ttft_ms),
        ("tpot_milliseconds", "Median time per output token of the look's own load", look.tpot_ms),
        ("look_timestamp_seconds", "When the last look began", look.at.timestamp()),
    ):
        if value is not None:
            gauge = Gauge(f"slipway_watch_{name}", about, ("model", "release"), registry=registry)
            gauge.labels(model, look.release).set(value)
    write_text(path, generate_latest(registry).decode())


def _notify(url: str, text: str, look: Look) -> None:
    """Post what happened; that it can't be told is no reason to stop watching."""
    import httpx

    try:
        body = {"text": text, "look": look.model_dump(mode="json")}
        httpx.post(url, json=body, timeout=NOTIFY_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        say(f"not notified: {type(error).__name__}: {error}")
