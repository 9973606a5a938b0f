"""Commands that need the store: here, or with ``--engine argo`` in a pod of the cluster that has its volume."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, get_type_hints

import typer

from pipeline.commands.options import (
    ConfigOption,
    ContextOption,
    EngineOption,
    NamespaceOption,
    PlatformOption,
    load_config,
)

ADDED: Final[Mapping[str, Any]] = {
    "platform": PlatformOption,
    "config": ConfigOption,
    "engine": EngineOption,
    "context": ContextOption,
    "namespace": NamespaceOption,
}
"""The options that every such command has."""
HERE: Final = frozenset({*ADDED, "assignments", "store"})
"""Options that decide where and with which settings it runs: the pod gets the settings themselves."""


def on_the_volume(command: Callable[..., None]) -> Callable[..., None]:
    """Give *command* the options of ``ADDED``: with ``--engine argo`` it runs in a pod, with the same output and exit
    code."""
    own = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    parameters = [each.replace(annotation=hints[name]) for name, each in own.items()]
    parameters.append(inspect.Parameter("asked", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in ADDED.items()
        if name not in own
    ]

    @functools.wraps(command)
    def placed(**given: Any) -> None:
        if given["engine"] != "argo":
            command(**{name: value for name, value in given.items() if name in own})
            return
        from pipeline.argo.store_command import call
        from pipeline.commands.cluster import connected, of_a_cluster

        settings = load_config(given["config"], None, None, given["platform"], given.get("assignments"))
        of_a_cluster(settings)
        there = connected(given["context"], given["namespace"] or settings.platform.namespace)
        said, exit_code = call(there, settings, list(_words(given["asked"])))
        sys.stdout.write(said)
        if exit_code:
            raise typer.Exit(exit_code)

    placed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    placed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return placed


def _words(context: typer.Context) -> Iterator[str]:
    """The command line of *context* without the options of ``HERE``."""
    names = []
    above: Any = context
    while above and above.parent:
        names.append(above.info_name or "")
        above = above.parent
    yield from reversed(names)
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if param.name in HERE or value is None or value is False:
            continue
        if param.param_type_name == "argument":
            yield str(value)
        else:
            yield param.opts[0] if value is True else f"{param.opts[0]}={value}"
