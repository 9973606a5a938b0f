"""Answers one request after the other as the Kubernetes API does. See ``api``."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.kubernetes.access import may
from tests.kubernetes.faults import Fault, KubernetesRequest
from tests.kubernetes.objects import Object, Refused, Resource, matches

if TYPE_CHECKING:
    from tests.kubernetes.api import KubernetesServer

PATH: Final = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[a-z0-9.-]+/v\w+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<part>status|log))?)?"
)
WRITES: Final = frozenset({"fieldManager", "dryRun", "fieldValidation"})
LISTS: Final = frozenset({"labelSelector", "fieldSelector", "limit", "continue", "resourceVersion"})
WATCHES: Final = frozenset(
    {"watch", "labelSelector", "fieldSelector", "resourceVersion", "allowWatchBookmarks", "timeoutSeconds"}
)
LOGS: Final = frozenset({"container", "follow", "tailLines"})
VERBS: Final = ["create", "delete", "get", "list", "patch", "update", "watch"]
BOOKMARK_S: Final = 0.5
POLL_S: Final = 0.02
ACCESS_REVIEW: Final = "selfsubjectaccessreviews"
ACCOUNT_REVIEW: Final = "subjectaccessreviews"
USER_REVIEW: Final = "selfsubjectreviews"


class _HungUp(Exception):
    pass


class Handler(BaseHTTPRequestHandler):
    cluster: KubernetesServer
    protocol_version = "HTTP/1.1"
    # One packet for an answer: the client would delay its acknowledgement of the first of two.
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are kept, not printed."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = PATH.fullmatch(url.path)
        verb = self._verb(named=bool(found and found["name"]))
        self.request_log = KubernetesRequest(verb, unquote(url.path), self.query, self.headers.get("User-Agent", ""))
        self.cluster.log(self.request_log)
        fault = self.cluster.fault_for(verb, unquote(url.path))
        self.lost = fault is not None and fault.after
        try:
            if fault and not fault.after:
                self._go_wrong(fault)
            self._authenticate()
            if found is None:
                self._discover(url.path)
            else:
                self._route(found, verb)
        except Refused as refusal:
            if refusal.code in (400, 405, 406, 415, 422) or refusal.reason == "UnknownPath":
                self.cluster.mistakes.append(f"{self.command} {self.path}: {refusal}")
            self._send(refusal.code, refusal.status())
        except _HungUp:
            self._hang_up()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _verb(self, *, named: bool) -> str:
        if self.command == "GET":
            return "watch" if self.query.get("watch") in ("true", "1") else "get" if named else "list"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[self.command]

    def _go_wrong(self, fault: Fault) -> None:
        if not fault.status:
            raise _HungUp
        reasons = {401: "Unauthorized", 403: "Forbidden", 429: "TooManyRequests", 503: "ServiceUnavailable"}
        headers = {"Connection": "close"}
        headers |= {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        status = Refused(fault.status, reasons.get(fault.status, "InternalError"), "as the test asked").status()
        self._send(fault.status, status, headers)
        raise BrokenPipeError

    def _authenticate(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.cluster.token}":
            raise Refused(401, "Unauthorized", "Unauthorized")

    def _discover(self, path: str) -> None:
        known = self.cluster.objects.resources.values()
        if path == "/version":
            self._send(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.0"})
            return
        if path == "/apis":
            self._send(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups(known)})
            return
        api_version = re.sub(r"^/apis?/", "", path)
        listed = [
            {
                "name": each.plural,
                "kind": each.kind,
                "namespaced": each.namespaced,
                "singularName": "",
                "verbs": ["create"] if each.plural.endswith("reviews") else VERBS,
            }
            for each in known
            if each.api_version == api_version
        ]
        if not listed:
            reason = "NotFound" if re.fullmatch(r"/apis/[\w.-]+/v\w+", path) else "UnknownPath"
            raise Refused(404, reason, "the server could not find the requested resource")
        listed += [
            {"name": f"{each.plural}/status", "kind": each.kind, "namespaced": each.namespaced, "singularName": ""}
            for each in known
            if each.api_version == api_version and each.status
        ]
        self._send(
            200,
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": listed},
        )

    def _route(self, found: re.Match[str], verb: str) -> None:
        api_version, plural = found["core"] or found["group"], found["plural"]
        resource = self.cluster.objects.resources.get((api_version, plural))
        if resource is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace, name, part = found["namespace"], unquote(found["name"] or ""), found["part"] or ""
        everywhere = resource.namespaced and namespace is None
        if (everywhere and (name or verb == "create")) or (not resource.namespaced and namespace is not None):
            raise Refused(404, "UnknownPath", "the server could not find the requested resource")
        if part == "status" and not resource.status:
            raise Refused(404, "UnknownPath", f"{plural} have no status subresource")
        self._authorize(verb, resource, f"{plural}/{part}" if part else plural, namespace)
        place = None if everywhere else namespace or ""
        if part == "log":
            self._log(resource, namespace, name)
        elif verb == "watch":
            self._watch(resource, place)
        elif verb == "list":
            self._list(resource, place)
        elif verb == "get":
            self._asks(frozenset({"resourceVersion"}))
            self._send(200, self.cluster.objects.find(resource, place or "", name))
        else:
            self._write(verb, resource, place or "", name, part)

    def _authorize(self, verb: str, resource: Resource, plural: str, namespace: str | None) -> None:
        if (verb, plural) in self.cluster.forbidden:
            group = resource.api_version.rpartition("/")[0]
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            message = (
                f'{plural}{"." + group if group else ""} is forbidden: User "test" cannot {verb} '
                f'resource "{plural}" in API group "{group}"{where}'
            )
            raise Refused(403, "Forbidden", message, group=group, kind=plural)

    def _asks(self, known: frozenset[str]) -> None:
        """Refuse any other query parameter: the real server ignores a mistyped one silently."""
        unknown = sorted(self.query.keys() - known)
        if unknown:
            raise Refused(400, "BadRequest", f"unknown query parameters: {', '.join(unknown)}")

    def _document(self, *content_types: str) -> Object:
        content_type = self.headers.get("Content-Type", "").partition(";")[0]
        if content_type not in content_types:
            message = (
                f"the body of the request was in an unknown format - accepted media types include: {content_types}"
            )
            raise Refused(415, "UnsupportedMediaType", message)
        try:
            body = json.loads(self.body)
        except ValueError as error:
            raise Refused(400, "BadRequest", f"error decoding: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "BadRequest", "the body must be an object")
        return body

    def _write(self, verb: str, resource: Resource, namespace: str, name: str, part: str) -> None:
        objects, manager = self.cluster.objects, self.query.get("fieldManager") or self.headers.get("User-Agent") or "?"
        applies = self.headers.get("Content-Type", "").startswith("application/apply-patch+yaml")
        self._asks(WRITES | ({"force"} if applies else {"gracePeriodSeconds"} if verb == "delete" else set()))
        if self.query.get("dryRun", "All") != "All":
            raise Refused(400, "BadRequest", "dryRun: Unsupported value: supported values: All")
        dry_run = "dryRun" in self.query
        if verb == "create" and not name:
            body = self._document("application/json")
            reviews = {
                ACCESS_REVIEW: self._review,
                ACCOUNT_REVIEW: self._review_account,
                USER_REVIEW: self._user,
            }
            made = reviews[resource.plural](body) if resource.plural in reviews else None
            self._send(201, made or objects.create(resource, namespace, body, manager, dry_run=dry_run))
        elif verb == "update" and name:
            body = self._document("application/json")
            self._send(200, objects.replace(resource, namespace, name, body, manager, part=part, dry_run=dry_run))
        elif verb == "patch" and name and applies:
            self._apply(resource, namespace, name, dry_run=dry_run)
        elif verb == "patch" and name:
            body = self._document("application/merge-patch+json")
            self._send(200, objects.merge(resource, namespace, name, body, manager, part=part, dry_run=dry_run))
        elif verb == "delete" and name:
            self._send(200, objects.delete(resource, namespace, name))
        else:
            raise Refused(405, "MethodNotAllowed", f"the server does not allow this method here: {self.command}")

    def _apply(self, resource: Resource, namespace: str, name: str, *, dry_run: bool) -> None:
        body, manager = self._document("application/apply-patch+yaml"), self.query.get("fieldManager")
        if not manager:
            raise Refused(400, "BadRequest", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        if self.query.get("force", "true") not in ("true", "false"):
            raise Refused(400, "BadRequest", "force must be true or false")
        if body.get("metadata", {}).get("name") != name:
            raise Refused(400, "BadRequest", "the name of the object does not match the name on the URL")
        if body["metadata"].get("managedFields"):
            raise Refused(400, "BadRequest", "metadata.managedFields must be nil")
        force = self.query.get("force") == "true"
        made = self.cluster.objects.apply(resource, namespace, name, body, manager, force=force, dry_run=dry_run)
        self._send(200, made)

    def _review(self, body: Object) -> Object:
        asks = body["spec"]["resourceAttributes"]
        plural = asks["resource"] + (f"/{asks['subresource']}" if asks.get("subresource") else "")
        return body | {"status": {"allowed": (asks["verb"], plural) not in self.cluster.forbidden}}

    def _review_account(self, body: Object) -> Object:
        """Answer from the Roles and RoleBindings that are there; ClusterRoles are not looked at."""
        spec = body["spec"]
        if not spec.get("user") and not spec.get("groups"):
            raise Refused(422, "Invalid", "spec.user: Invalid value: at least one of user or group must be specified")
        return body | {"status": {"allowed": may(self.cluster, spec["user"], spec["resourceAttributes"])}}

    def _user(self, body: Object) -> Object:
        return body | {"status": {"userInfo": {"username": self.cluster.user}}}

    def _list(self, resource: Resource, namespace: str | None) -> None:
        self._asks(LISTS)
        limit, start = int(self.query.get("limit", 0)), int(self.query.get("continue") or 0)
        with self.cluster.objects.changed:
            version = str(self.cluster.objects.version)
            found = self.cluster.objects.select(
                resource, namespace, self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
            )
        end = start + limit if limit else len(found)
        metadata = {"resourceVersion": version} | ({"continue": str(end)} if end < len(found) else {})
        document = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata}
        self._send(200, document | {"items": found[start:end]})

    def _watch(self, resource: Resource, namespace: str | None) -> None:
        self._asks(WATCHES)
        labels, fields = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        matches(resource, {"metadata": {}}, labels, fields)
        end = time.monotonic() + float(self.query.get("timeoutSeconds", 300))
        seen, bookmark = int(self.query.get("resourceVersion") or 0), time.monotonic() + BOOKMARK_S
        watched = self.cluster.watching()  # before the client knows of it
        try:
            self._stream("application/json")
            if not seen:
                seen = self.cluster.objects.version
                for each in self.cluster.objects.select(resource, namespace, labels, fields):
                    self._chunk(_event("ADDED", each))
            while time.monotonic() < end:
                if watched.cut:
                    raise _HungUp
                if watched.expired or seen < self.cluster.objects.forgotten:
                    raise Refused(410, "Expired", f"too old resource version: {seen}")  # noqa: TRY301
                sent = self.cluster.objects.version  # read first: a later change may not be in what follows
                for change in self.cluster.objects.since(resource, namespace, seen, wait_s=POLL_S):
                    seen = change.version
                    if matches(resource, change.object, labels, fields):
                        self._chunk(_event(change.type, change.object))
                if self.query.get("allowWatchBookmarks") == "true" and time.monotonic() > bookmark:
                    bookmark = time.monotonic() + BOOKMARK_S
                    seen = max(seen, sent)
                    place = {"resourceVersion": str(seen)}
                    self._chunk(
                        _event(
                            "BOOKMARK",
                            {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": place},
                        )
                    )
            self._chunk(b"")
        except Refused as refusal:
            self._chunk(_event("ERROR", refusal.status()))
            self._chunk(b"")
        finally:
            self.cluster.forget_watch(watched)

    def _log(self, resource: Resource, namespace: str, name: str) -> None:
        self._asks(LOGS)
        pod = self.cluster.objects.find(resource, namespace, name)
        containers = [each["name"] for each in pod["spec"]["containers"]]
        if self.query.get("container", containers[0]) not in containers:
            raise Refused(400, "BadRequest", f"container {self.query['container']} is not valid for pod {name}")
        if pod.get("status", {}).get("phase", "Pending") == "Pending":
            message = f'container "main" in pod "{name}" is waiting to start: ContainerCreating'
            raise Refused(400, "BadRequest", message)
        sent, watched = 0, self.cluster.watching()
        try:
            self._stream("text/plain")
            while True:
                phase = self.cluster.objects.find(resource, namespace, name)["status"]["phase"]
                lines = list(self.cluster.logs.get((namespace, name), ()))  # last: an ended pod writes no more
                for line in lines[sent:]:
                    self._chunk(line.encode() + b"\n")
                sent = len(lines)
                if watched.cut:
                    raise _HungUp
                if phase != "Running" or self.query.get("follow") != "true":
                    self._chunk(b"")
                    return
                time.sleep(POLL_S)
        finally:
            self.cluster.forget_watch(watched)

    def _stream(self, content_type: str) -> None:
        self.request_log.status = 200
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, document: Object, headers: Mapping[str, str] | None = None) -> None:
        if self.lost:
            raise _HungUp
        content = json.dumps(document).encode()
        self.request_log.status = status
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has gone already
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


def _groups(known: Iterable[Resource]) -> list[Object]:
    """The groups besides the core, each with its newest version as the preferred one."""
    versions = sorted({each.api_version for each in known if "/" in each.api_version})
    by_group = {version.partition("/")[0]: version for version in versions}
    return [
        {"name": name, "preferredVersion": {"groupVersion": version, "version": version.partition("/")[2]}}
        for name, version in by_group.items()
    ]


def _event(type_: str, each: Object) -> bytes:
    return json.dumps({"type": type_, "object": each}).encode() + b"\n"
