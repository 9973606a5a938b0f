"""What a Kubernetes API server keeps: objects, their versions, who owns which field, and what has changed.

An object with finalizers that is deleted stays, marked, until the last of them is gone.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from tests.kubernetes.ownership import apply, claim, copied

Object: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str, str, str]
"""apiVersion, plural, namespace ('' for what has none), name."""
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_KEY: Final = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
REQUIREMENT: Final = re.compile(r"(?P<key>[\w./-]+)\s*(?P<operator>==|!=|=)\s*(?P<value>[\w.-]*)")


@dataclass(frozen=True)
class Resource:
    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    status: bool = False
    """Whether status is a subresource: then only .../status changes it."""
    fields: frozenset[str] = frozenset({"metadata.name", "metadata.namespace"})
    """That a field selector may name."""
    check: Callable[[Object], str] | None = None
    """What is wrong with an object of this kind; '' if nothing."""


class Refused(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code, self.reason, self.details = code, reason, details

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


@dataclass(frozen=True)
class Change:
    version: int
    type: str
    resource: Resource
    object: Object


@dataclass
class Objects:
    """Every method is atomic; ``changed`` is notified after each change."""

    resources: dict[tuple[str, str], Resource] = field(default_factory=dict)
    """The key is apiVersion and plural."""
    kept: dict[Key, Object] = field(default_factory=dict)
    """An object that changes is replaced by another one: ``changes`` has the same, and only readers get copies."""
    changes: list[Change] = field(default_factory=list)
    version: int = 1000
    forgotten: int = 0
    """Watches from before this version have expired."""
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def find(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            found: Object = copied(self._found(resource, namespace, name))
            return found

    def select(self, resource: Resource, namespace: str | None, labels: str, fields: str) -> list[Object]:
        matches(resource, {"metadata": {}}, labels, fields)  # a selector that can't be read is refused in any case
        with self.changed:
            found = [
                each
                for (api_version, plural, place, _), each in sorted(self.kept.items())
                if (api_version, plural) == (resource.api_version, resource.plural) and namespace in (None, place)
            ]
            return copied([each for each in found if matches(resource, each, labels, fields)])

    def create(self, resource: Resource, namespace: str, body: Object, manager: str, *, dry_run: bool) -> Object:
        with self.changed:
            new = copied(body)
            metadata = new.setdefault("metadata", {})
            if not metadata.get("name"):
                if not metadata.get("generateName"):
                    raise Refused(422, "Invalid", f'{resource.kind} "" is invalid: metadata.name: Required value')
                metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
            self._check(resource, namespace, new)
            if self._key(resource, namespace, metadata["name"]) in self.kept:
                message = f'{resource.plural}.{resource.api_version} "{metadata["name"]}" already exists'
                raise Refused(409, "AlreadyExists", message, name=metadata["name"], kind=resource.plural)
            if metadata.get("resourceVersion"):
                raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
            if resource.status:
                new.pop("status", None)
            metadata |= {
                "uid": str(uuid.uuid4()),
                "generation": 1,
                "creationTimestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            }
            if resource.namespaced:
                metadata["namespace"] = namespace
            claim(new, {}, manager, "Update")
            return self._keep("ADDED", resource, namespace, new, dry_run)

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, manager: str, *, part: str, dry_run: bool
    ) -> Object:
        """PUT: optimistic locking by resourceVersion. *part* is 'status' or ''."""
        with self.changed:
            old = self._found(resource, namespace, name)
            self._same_version(resource, old, body)
            return self._update(resource, namespace, old, copied(body), manager, part, dry_run)

    def merge(
        self, resource: Resource, namespace: str, name: str, patch: Object, manager: str, *, part: str, dry_run: bool
    ) -> Object:
        with self.changed:
            old = self.find(resource, namespace, name)
            self._same_version(resource, old, patch)
            return self._update(resource, namespace, old, merged(old, patch), manager, part, dry_run)

    def apply(
        self, resource: Resource, namespace: str, name: str, body: Object, manager: str, *, force: bool, dry_run: bool
    ) -> Object:
        with self.changed:
            key = self._key(resource, namespace, name)
            if key not in self.kept:
                empty = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {"name": name}}
                new, _ = apply(empty, body, manager)
                managed = new["metadata"].pop("managedFields")
                created = self.create(resource, namespace, new, manager, dry_run=True)
                created["metadata"]["managedFields"] = managed
                return self._keep("ADDED", resource, namespace, created, dry_run)
            self._same_version(resource, self.kept[key], body)
            new, conflicts = apply(self.kept[key], body, manager)
            if conflicts and not force:
                causes = [
                    {"reason": "FieldManagerConflict", "message": f'conflict with "{owner}"', "field": path}
                    for path, owner in conflicts
                ]
                said = "\n".join(f"- {cause['message']}: {cause['field']}" for cause in causes)
                count = "1 conflict" if len(causes) == 1 else f"{len(causes)} conflicts"
                raise Refused(409, "Conflict", f"Apply failed with {count}:\n{said}", causes=causes)
            return self._update(resource, namespace, self.kept[key], new, None, "", dry_run)

    def delete(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            old = self.find(resource, namespace, name)
            if old["metadata"].get("finalizers"):
                deleted = {"deletionTimestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"} | old["metadata"]
                return self._keep("MODIFIED", resource, namespace, old | {"metadata": deleted}, False)
            del self.kept[self._key(resource, namespace, name)]
            self.version += 1
            old["metadata"]["resourceVersion"] = str(self.version)
            self._tell("DELETED", resource, old)
            if resource.plural == "namespaces":
                self._empty(name)
            return old

    def _empty(self, namespace: str) -> None:
        """Delete what a namespace holds. The real server takes a while for that."""
        for api_version, plural, place, name in list(self.kept):
            if place == namespace:
                self.delete(self.resources[api_version, plural], namespace, name)

    def since(self, resource: Resource, namespace: str | None, version: int, *, wait_s: float) -> list[Change]:
        """Changes after *version*; if there are none, what comes within *wait_s*."""

        def found() -> list[Change]:
            newer = itertools.takewhile(lambda each: each.version > version, reversed(self.changes))
            wanted = [each for each in newer if each.resource == resource]
            return [each for each in wanted if namespace in (None, each.object["metadata"].get("namespace", ""))][::-1]

        with self.changed:
            if not found():
                self.changed.wait(wait_s)
            return found()

    def forget(self) -> None:
        """Compact the history as etcd does: a watch from before now has expired."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version

    def _update(
        self,
        resource: Resource,
        namespace: str,
        old: Object,
        new: Object,
        manager: str | None,
        part: str,
        dry_run: bool,
    ) -> Object:
        """*manager* claims what changed; None: *new* names its managers already."""
        if part == "status":
            new = old | {"metadata": dict(old["metadata"]), "status": new.get("status", {})}
        elif resource.status:
            new = {key: value for key, value in new.items() if key != "status"}
            new |= {"status": old["status"]} if "status" in old else {}
        for fixed in ("uid", "creationTimestamp", "deletionTimestamp", "namespace", "name", "generation"):
            if fixed in old["metadata"]:
                new["metadata"][fixed] = old["metadata"][fixed]
        self._check(resource, namespace, new)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        if manager is not None:
            new["metadata"]["managedFields"] = old["metadata"].get("managedFields", [])
            claim(new, old, manager, "Update")
        if _without_version(new) == _without_version(old):
            return copied(old)
        if "deletionTimestamp" in old["metadata"] and not new["metadata"].get("finalizers") and not dry_run:
            self.kept[self._key(resource, namespace, new["metadata"]["name"])] = copied(new)
            return self.delete(resource, namespace, new["metadata"]["name"])
        return self._keep("MODIFIED", resource, namespace, new, dry_run)

    def _keep(self, type_: str, resource: Resource, namespace: str, new: Object, dry_run: bool) -> Object:
        if not dry_run:
            self.version += 1
            new["metadata"]["resourceVersion"] = str(self.version)
            self.kept[self._key(resource, namespace, new["metadata"]["name"])] = new
            self._tell(type_, resource, new)
        kept: Object = copied(new)
        return kept

    def _tell(self, type_: str, resource: Resource, each: Object) -> None:
        self.changes.append(Change(self.version, type_, resource, each))
        self.changed.notify_all()

    def _found(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object itself, which nobody changes."""
        try:
            return self.kept[resource.api_version, resource.plural, namespace, name]
        except KeyError:
            raise _not_found(resource, name) from None

    def _key(self, resource: Resource, namespace: str, name: str) -> Key:
        return resource.api_version, resource.plural, namespace if resource.namespaced else "", name

    def _same_version(self, resource: Resource, old: Object, body: Object) -> None:
        asked = body.get("metadata", {}).get("resourceVersion")
        if asked is not None and asked != old["metadata"]["resourceVersion"]:
            message = (
                f'Operation cannot be fulfilled on {resource.plural} "{old["metadata"]["name"]}": '
                "the object has been modified; please apply your changes to the latest version and try again"
            )
            raise Refused(409, "Conflict", message, name=old["metadata"]["name"], kind=resource.plural)

    def _check(self, resource: Resource, namespace: str, new: Object) -> None:
        if (new.get("apiVersion"), new.get("kind")) != (resource.api_version, resource.kind):
            said = f"{new.get('apiVersion')}, Kind={new.get('kind')}"
            message = f"the object provided is unrecognized: {said} is no {resource.kind} of {resource.api_version}"
            raise Refused(400, "BadRequest", message)
        metadata = new["metadata"]
        if resource.namespaced:
            if metadata.get("namespace", namespace) != namespace:
                message = "the namespace of the provided object does not match the namespace sent on the request"
                raise Refused(400, "BadRequest", message)
            if ("v1", "namespaces", "", namespace) not in self.kept:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        wrong = "" if NAME.fullmatch(metadata["name"]) else f"metadata.name: Invalid value: {metadata['name']!r}"
        for key, value in (metadata.get("labels") or {}).items():
            if not (LABEL_KEY.fullmatch(key) and isinstance(value, str) and LABEL_VALUE.fullmatch(value)):
                wrong = f"metadata.labels: Invalid value: {key}={value!r}"
        for key, value in (metadata.get("annotations") or {}).items():
            if not (LABEL_KEY.fullmatch(key) and isinstance(value, str)):
                wrong = f"metadata.annotations: Invalid value: {key}={value!r}"
        wrong = wrong or (resource.check(new) if resource.check else "")
        if wrong:
            raise Refused(422, "Invalid", f'{resource.kind} "{metadata["name"]}" is invalid: {wrong}')


def matches(resource: Resource, each: Object, labels: str, fields: str) -> bool:
    """Whether an object meets the selectors.

    Raises:
        Refused: 400, a selector can't be read, or names a field that this kind can't be selected by.
    """
    own = each["metadata"].get("labels") or {}
    asked = [(own.get(key), operator, value) for key, operator, value in _requirements(labels)]
    for path, operator, value in _requirements(fields):
        if path not in resource.fields:
            raise Refused(400, "BadRequest", f"field label not supported: {path}")
        asked.append((_at(each, path), operator, value))
    return all((found == value) is (operator != "!=") for found, operator, value in asked)


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copied(patch)
    result = copied(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _requirements(selector: str) -> Iterator[tuple[str, str, str]]:
    for each in filter(None, selector.split(",")):
        found = REQUIREMENT.fullmatch(each.strip())
        if not found:
            raise Refused(400, "BadRequest", f"unable to parse requirement: {each!r}")
        yield found["key"], found["operator"], found["value"]


def _at(each: Object, path: str) -> Any:
    value: Any = each
    for name in path.split("."):
        value = value.get(name, "") if isinstance(value, dict) else ""
    return value


def _without_version(each: Object) -> Object:
    return each | {"metadata": {key: value for key, value in each["metadata"].items() if key != "resourceVersion"}}


def _not_found(resource: Resource, name: str) -> Refused:
    group = resource.api_version.rpartition("/")[0]
    where = f"{resource.plural}.{group}" if group else resource.plural
    return Refused(404, "NotFound", f'{where} "{name}" not found', name=name, kind=resource.plural)
