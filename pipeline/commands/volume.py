"""Commands that need the store: here, or with ``--engine argo`` in a pod of the cluster that has its volume."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import typer

from pipeline.commands.options import ConfigOptions, Where


@dataclasses.dataclass(frozen=True)
class VolumeOptions(Where, ConfigOptions):
    """Where a store is, on this machine or on the volume of a cluster's namespace, and the settings of a command."""

    invocation: typer.Context = dataclasses.field(kw_only=True)


PLACE: Final = frozenset(field.name for field in dataclasses.fields(VolumeOptions))
"""The options that say where a command runs and with which settings: the pod gets the settings themselves."""


def on_the_volume(command: Callable[..., None]) -> Callable[..., None]:
    """Run *command*, which takes the group ``volume``, where the store is: with ``--engine argo`` in a
    pod, with the same output and exit code."""

    @functools.wraps(command)
    def placed(*, volume: VolumeOptions, **values: Any) -> None:
        if not volume.on_cluster:
            command(volume=volume, **values)
            return
        from pipeline.argo.store_command import call

        settings = volume.of_cluster()
        output, exit_code = call(volume.cluster(settings), settings, [*_words(volume.invocation)])
        sys.stdout.write(output)
        if exit_code:
            raise typer.Exit(exit_code)

    return placed


def _words(invocation: typer.Context) -> Iterator[str]:
    """Yield the words of a command line without the options of ``PLACE``."""
    names: list[str] = []
    context: Any = invocation
    while context.parent:
        names.insert(0, context.info_name)
        context = context.parent
    yield from names
    for param in invocation.command.params:
        value = invocation.params.get(param.name or "")
        if param.name in PLACE or value is None or value is False:
            continue
        if param.param_type_name == "argument":
            yield str(value)
        else:
            yield param.opts[0] if value is True else f"{param.opts[0]}={value}"
