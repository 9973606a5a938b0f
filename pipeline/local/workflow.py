"""A workflow that was checked: every name that it uses exists, and every expression can be read.

``parse`` reports all mistakes of a manifest before anything runs. ``Workflow.bind`` adds the arguments of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.local.checking import ManifestCheck
from pipeline.local.manifest import Spec, Template, Volume
from pipeline.local.node_names import inside
from pipeline.local.reading import read, refused
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE
from stages.parts.base.errors import ConfigError, UnknownName, UnsupportedField


@dataclass(frozen=True)
class Workflow:
    name: str
    spec: Spec
    templates: dict[str, Template]
    graphs: dict[str, Graph]
    """The graphs of the dag templates, by template."""

    def bind(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """The values of the workflow's parameters for one run: *arguments*, else the manifest's own values.

        Raises:
            UnknownName: an argument for which the workflow has no parameter.
            ConfigError: parameters without a value; all are named.
        """
        parameters = {parameter.name: parameter for parameter in self.spec.arguments.parameters}
        for name in arguments:
            if name not in parameters:
                raise UnknownName("workflow parameter", name, parameters)
        values = {name: arguments.get(name, parameter.value) for name, parameter in parameters.items()}
        if missing := [name for name, value in values.items() if value is None]:
            lines = "".join(f"\n    {name}: needs a value" for name in missing)
            raise ConfigError(f"the workflow's arguments{lines}")
        return {name: value for name, value in values.items() if value is not None}

    def volumes(self, template: Template) -> dict[str, Volume]:
        return {volume.name: volume for volume in (*self.spec.volumes, *template.volumes)}

    def used(self) -> Iterator[tuple[str, Template]]:
        """Every container that may run, with the name of its node; the exit handler comes last."""
        yield from self._within("", self.templates[self.spec.entrypoint])
        if self.spec.on_exit:
            yield from self._within(EXIT_NODE, self.templates[self.spec.on_exit])

    def _within(self, name: str, template: Template) -> Iterator[tuple[str, Template]]:
        if template.container:
            yield name, template
        for task in template.tasks:
            yield from self._within(inside(name, task.name), self.templates[task.template])


def parse(manifest: Mapping[str, Any]) -> Workflow:
    """Read and check a compiled WorkflowTemplate or Workflow.

    Raises:
        UnsupportedField: it uses fields that the local engine does not support; each is named.
        ConfigError: it contradicts itself; each mistake is named.
    """
    shape = read(manifest)
    check = ManifestCheck(shape)
    check.whole()
    if check.unsupported or check.wrong:
        raise refused(UnsupportedField if check.unsupported else ConfigError, [*check.unsupported, *check.wrong])
    return Workflow(name=shape.metadata.name or "workflow", spec=shape.spec, templates=check.known, graphs=check.graphs)
