"""``slipway drill``: what a production review asks of the running endpoint, tried on it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import Commands, VolumeOptions, WorkloadOption
from pipeline.commands.releases import target_of_endpoint
from pipeline.runs.engine import Printout
from stages.parts.base.errors import DrillFailed, Interrupted, SlipwayError
from stages.parts.base.log import say

if TYPE_CHECKING:
    from stages.parts.records.drills import Drill
    from stages.rollout.scene import Scene

DRILLS: Final = {
    "load": "Send twice the peak.\n\nFails if requests are lost, or clearly fewer answered than at the peak.",
    "overload": "Send ten times the peak.\n\nFails unless what is too much is refused at once.",
    "long-context": "Keep a request of the maximum length beside short ones.\n\nFails if these get far slower.",
    "kv-full": "Fill the KV cache.\n\nFails if requests are lost.",
    "slow-client": "Keep a thousand streams that are read slowly.\n\nFails if others get slower, or anything is left.",
    "crash": "Kill a server under load.\n\nEnds a server. Fails if it is not up again within five minutes.",
    "cold": "Kill a server, and time its next start.\n\nEnds a server. Fails if that takes far longer than measured.",
    "rollback": "Roll back under load, and forward.\n\nEnds servers. Fails if a request fails, or after five minutes.",
    "scale": "Ask for more than the replicas can take.\n\nFails if requests fail, or no more get ready in time.",
    "all": "Do all of these in turn.\n\nEnds servers. The report then has a section on production readiness.",
}
"""The help of each."""
ServedModelArgument = Annotated[str, typer.Argument(help="A model that is being served.")]

commands = Commands("Test the running endpoint with load and failures.", "drill all org/name --short", name="drill")


@dataclasses.dataclass(frozen=True)
class DrillOptions(VolumeOptions):
    """How a drill is done, and where."""

    short: Annotated[bool, typer.Option("--short", help="Less of everything: under a minute for each drill.")] = False
    peak: Annotated[
        float | None,
        typer.Option(min=0.01, help="Requests per second at the expected peak. Default: what was measured."),
    ] = None
    workload: WorkloadOption = None

    def scene(self, model: str) -> Scene:
        """Gather what is drilled: by requests as the release was measured with, unless a workload is named. They go to
        ``kserve.gateway_url`` where this machine can't resolve the cluster's host names.

        Raises: NothingToServe: nothing is being served.
        """
        from stages.parts.base.workload import Workload
        from stages.parts.records.rollout import LOCAL
        from stages.parts.releases.pinned import MeasuredWith
        from stages.rollout.scene import Scene, served

        settings, store = self.load(workload=self.workload), self.of_model(model)
        target, fields = target_of_endpoint(settings, store, model), settings.workload.model_dump()
        if self.workload is None:
            measured = MeasuredWith.of(store.releases / served(store, target)).workload
            fields |= {name: value for name, value in measured.items() if name in fields}
        via = settings.kserve.gateway_url or "" if target.name != LOCAL else ""
        return Scene(store, target, Workload.model_validate(fields), settings.rollout, via, self.peak, self.short)


def _add(name: str, text: str) -> None:
    def command(model: ServedModelArgument, *, options: DrillOptions) -> Printout:
        from stages.rollout.drills import BY_NAME

        scene = options.scene(model)
        if name == "all":
            _ = scene.peak  # without which most of them are not possible
        return _printout(scene, BY_NAME if name == "all" else {name: BY_NAME[name]})

    command.__doc__ = text
    commands.add(f"drill {name} org/name --short", name, cleans_up=True)(command)


for _name, _text in DRILLS.items():
    _add(_name, _text)


def _printout(scene: Scene, drills: Mapping[str, Callable[[Scene], Drill]]) -> Printout:
    """Do the drills, and print how they went; the command fails if one of them did. One that is not possible here does
    not keep others from being done."""
    from stages.parts.records.drills import keep
    from stages.report.page import renew

    results, impossible = [], {}
    for name, drill in drills.items():
        began, at = time.monotonic(), datetime.now(UTC)
        try:
            outcome = drill(scene)
        except SlipwayError as error:
            if len(drills) == 1 or isinstance(error, DrillFailed | Interrupted):
                raise
            impossible[name] = str(error)
            say(f"{name}: not possible: {error}")
            continue
        seconds = round(time.monotonic() - began, 1)
        result = outcome.model_copy(update={"drill": name, "seconds": seconds, "short": scene.short, "at": at})
        say(f"{name}: {'; '.join(result.failures) or result.verdict}, after {seconds:.0f} s")
        if scene.store.path.is_dir():  # from outside of a cluster, its store is not here
            keep(scene.store, result)
            renew(scene.store, result.release)
        results.append(result)
    lines = [f"{each.drill:13} {each.verdict:13} {each.text}" for each in results]
    lines += [f"{name:13} not possible  {why}" for name, why in impossible.items()]
    failed = [f"{each.drill}: {'; '.join(each.failures)}" for each in results if each.failures]
    errors = dict.fromkeys(error for each in results for error in each.answers.errors)
    failure = DrillFailed("; ".join(failed), hint=f"the requests' errors: {', '.join(errors) or 'none'}")
    document = {"drills": [each.model_dump(mode="json") for each in results], "not_possible": impossible}
    return Printout(document, "\n".join(lines), failure if failed else None)
