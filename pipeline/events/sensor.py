"""What the committed Sensor makes of an event: the run that it starts, or why it starts none.

Argo Events evaluates ``manifests/events/sensor.yaml`` on a cluster. Here the same file is evaluated, as far as it goes:
filters on data, and parameters from keys and templates. A field beyond that is refused, never passed over.
Semantics: pkg/sensors/dependencies/filter.go and pkg/sensors/triggers/params.go of argo-events 1.9.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.events.gotemplate import render
from pipeline.events.paths import find, put
from stages.parts.base.errors import EventRefused, UnknownName, UnsupportedField
from stages.parts.cluster.kinds import Object

SENSOR: Final = Path(__file__).parents[2] / "manifests" / "events" / "sensor.yaml"
ANCHORED: Final = re.compile(r"\^[^|]*\$")
"""The regular expressions that mean the same in Go and in Python's fullmatch."""
SHOWN: Final = 100
"""Characters of a value that did not pass."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataFilter(_Part):
    path: str
    type: Literal["string"]
    value: tuple[Annotated[str, Field(pattern=ANCHORED)], ...] = Field(min_length=1)

    def refuses(self, event: Object) -> str | None:
        """Why the event does not pass; None if it does."""
        found = find(event, self.path)
        # As gjson's String(): null is the empty text, which no value of ours matches.
        text = found if isinstance(found, str) else ""
        if any(re.fullmatch(value[1:-1], text, re.ASCII) for value in self.value):
            return None
        shown = "null" if found is None else repr(found)[:SHOWN]
        return f"{self.path.removeprefix('body.')} is {shown}; wanted: {' or '.join(self.value)}"


class Filters(_Part):
    data: tuple[DataFilter, ...]


class Dependency(_Part):
    name: str
    event_source: str = Field(alias="eventSourceName")
    event: str = Field(alias="eventName")
    filters: Filters


class Source(_Part):
    dependency: str = Field(alias="dependencyName")
    key: str = Field("", alias="dataKey")
    template: str = Field("", alias="dataTemplate")

    def value(self, event: Object) -> str:
        """Raises: UnsupportedField: there is no text at the key, or the template is not evaluated here."""
        if self.template:
            return render(self.template, {"Input": event})
        found = find(event, self.key)
        if not isinstance(found, str):
            raise UnsupportedField(f"{self.key} is {found!r}, not a text")
        return found


class Parameter(_Part):
    src: Source
    dest: str


class Resource(_Part):
    resource: dict[str, Any]


class Kubernetes(_Part):
    operation: Literal["create"]
    source: Resource
    parameters: tuple[Parameter, ...]


class Template(_Part):
    name: str
    conditions: str
    k8s: Kubernetes


class Trigger(_Part):
    template: Template
    at_least_once: Literal[True] = Field(alias="atLeastOnce")
    retry: dict[str, Any] = Field(alias="retryStrategy")
    rate_limit: dict[str, Any] = Field(alias="rateLimit")


class Specification(_Part):
    template: dict[str, Any]
    """Of the Sensor's own pod."""
    dependencies: tuple[Dependency, ...]
    triggers: tuple[Trigger, ...]


class Sensor(_Part):
    api_version: Literal["argoproj.io/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Sensor"]
    metadata: dict[str, Any]
    spec: Specification

    @classmethod
    def read(cls, path: Path = SENSOR) -> Sensor:
        """Raises: UnsupportedField: it is none, or uses more of Argo Events than is evaluated here."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UnsupportedField(f"{path}: {place}: {first['msg']}", hint="see pipeline/events/sensor.py") from error

    @property
    def providers(self) -> list[str]:
        return [each.name for each in self.spec.dependencies]

    def workflow(self, provider: str, payload: Any) -> Object:
        """The Workflow that the Sensor creates when *provider* has posted *payload*.

        Raises:
            EventRefused: a filter does not let it pass.
            UnknownName: there is no such provider.
        """
        event = {"header": {}, "body": payload}
        dependency = next((each for each in self.spec.dependencies if each.name == provider), None)
        if dependency is None:
            raise UnknownName("provider", provider, self.providers)
        for each in dependency.filters.data:
            if reason := each.refuses(event):
                raise EventRefused(reason, hint="this event starts no run")
        (trigger,) = (each.template.k8s for each in self.spec.triggers if each.template.conditions == provider)
        made = copy.deepcopy(trigger.source.resource)
        for parameter in trigger.parameters:
            put(made, parameter.dest, parameter.src.value(event))
        return made
