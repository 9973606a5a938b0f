"""A client of the Kubernetes API for plain manifests: requests and responses are dicts.

Temporary errors (a lost connection, 429, 5xx) are retried for a while; every other error becomes one of ours at once.
Each call can be repeated: callers choose the names of the objects that they create, so that a repeated creation fails
with ``AlreadyExists`` if only the response was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from stages.parts.base.errors import (
    AccessDenied,
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    NotInstalled,
    SlipwayError,
)
from stages.parts.cluster.kinds import PODS, PROVIDERS, Kind, Object
from stages.parts.cluster.login import Login, by_kubeconfig, in_cluster

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

FIELD_MANAGER: Final = "slipway"
APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
MERGE: Final = "application/merge-patch+json"
CONNECT_S: Final = 10.0
ANSWER_S: Final = 60.0
PATIENCE_S: Final = 60.0
"""How long a call is retried."""
FIRST_PATIENCE_S: Final = 3.0
"""How long a call is retried before the first response, so that a wrong address fails soon."""
PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
WATCH_S: Final = 240
"""The server ends a watch after this time. It sends a bookmark about every minute, so silence is a lost connection."""
PAGE: Final = 500
TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})


class Absent(ClusterRefused):
    """404: there is no such object."""


class AlreadyExists(Conflict):
    """409: an object of this name exists."""


class Expired(ClusterRefused):
    """410: the server no longer has the changes since the requested version. List the objects again."""


class Unanswered(ClusterUnavailable):
    """No answer, or a temporary error. *wait_s* is the pause that the server asked for; 0 if it asked for none."""

    wait_s: float = 0.0


def parsed(content: bytes) -> Object:
    """Parse the body of a response; a body that is not a JSON object becomes its ``message``."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"message": content[:200].decode(errors="replace").strip()}


def refusal(status: int, content: Object, address: str, retry_after: str | None = None) -> SlipwayError:
    """Our error for a Kubernetes Status."""
    message = " ".join(str(content.get("message") or f"HTTP {status}").split())
    if status in TRANSIENT:
        busy = Unanswered(f"{address} is overloaded or has a problem: {message}", hint="try again later")
        pause = retry_after or content.get("details", {}).get("retryAfterSeconds") or 0
        busy.wait_s = float(pause) if str(pause).isdigit() else 0.0
        return busy
    if status == 401:
        return AccessDenied(f"{address} does not accept this login: {message}", hint="log in to the cluster again")
    if status == 403:
        return AccessDenied(message, hint="to see which rights are missing: slipway doctor --engine argo")
    if status == 409:
        return AlreadyExists(message) if content.get("reason") == "AlreadyExists" else Conflict(message)
    return {404: Absent, 410: Expired}.get(status, ClusterRefused)(message)


def lost(error: Exception, address: str) -> SlipwayError:
    """Our error for a request without a response."""
    import urllib3

    if isinstance(error, urllib3.exceptions.SSLError):
        hint = "check the CA in the kubeconfig"
        return AccessDenied(f"the certificate of {address} is not trusted: {error}", hint=hint)
    hint = "check the kubeconfig, the network and the VPN"
    return Unanswered(f"{address} does not answer: {type(error).__name__}", hint=hint)


class Cluster:
    """One cluster, as one user sees it. The namespace of every call defaults to *namespace*."""

    def __init__(self, login: Login, namespace: str = "default", *, patience_s: float = PATIENCE_S) -> None:
        self.login, self.namespace, self.patience_s = login, namespace, patience_s
        self._answered = False
        self._kinds: dict[str, dict[str, Kind]] = {}

    @property
    def address(self) -> str:
        return self.login.host

    def kind(self, api_version: str, name: str) -> Kind:
        """Look up a kind of objects as the cluster describes it; raise NotInstalled if it does not have it."""
        if api_version not in self._kinds:
            resources = self._resources(api_version)
            self._kinds[api_version] = {resource["kind"]: _described(api_version, resource) for resource in resources}
        try:
            return self._kinds[api_version][name]
        except KeyError:
            group = api_version.rpartition("/")[0]
            hint = f"install {PROVIDERS[group]}" if group in PROVIDERS else ""
            raise NotInstalled(f"the cluster {self.address} has no kind {name} of {api_version}", hint=hint) from None

    def require(self, kind: Kind) -> None:
        """Raise NotInstalled, with what to install, if the cluster does not have this kind of objects."""
        self.kind(kind.api_version, kind.name)

    def listable(self) -> tuple[Kind, ...]:
        """Every kind of objects that can be listed in a namespace, each in the version that the cluster prefers."""
        groups = self.request("GET", "/apis")["groups"]
        return tuple(
            _described(api_version, resource)
            for api_version in ("v1", *(group["preferredVersion"]["groupVersion"] for group in groups))
            for resource in self._resources(api_version)
            if resource["namespaced"] and "list" in resource["verbs"]
        )

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Read an object; raise Absent if there is none."""
        return self.request("GET", kind.path(namespace or self.namespace, name))

    def find(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """Read an object, or return None if there is none."""
        with contextlib.suppress(Absent):
            return self.get(kind, name, namespace)
        return None

    def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "", everywhere: bool = False
    ) -> tuple[list[Object], str]:
        """List objects. Returns them and the version of the list, from which a watch can start."""
        path = kind.path(None if everywhere else namespace or self.namespace)
        objects: list[Object] = []
        query = {"limit": str(PAGE), "labelSelector": labels, "fieldSelector": fields, "continue": ""}
        while True:
            page = self.request("GET", path, query=query)
            objects += page["items"]
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return objects, page["metadata"]["resourceVersion"]

    def create(self, kind: Kind, body: Object, namespace: str | None = None) -> Object:
        """Create an object; raise AlreadyExists if there is one, perhaps from an earlier attempt of this call."""
        query = {"fieldManager": FIELD_MANAGER}
        return self.request("POST", kind.path(namespace or self.namespace), query=query, body=body)

    def apply(
        self, kind: Kind, body: Object, namespace: str | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Object:
        """Server-side apply: set the fields in *body*, and remove those that we applied earlier and are not in it. If
        another manager set a field to another value, *force* overwrites it; otherwise that raises Conflict."""
        query = {"fieldManager": FIELD_MANAGER, "force": str(force).lower(), "dryRun": "All" if dry_run else ""}
        path = kind.path(namespace or self.namespace, body["metadata"]["name"])
        return self.request("PATCH", path, query=query, body=body, content_type=APPLY)

    def merge(self, kind: Kind, name: str, change: Object, namespace: str | None = None) -> Object:
        """Merge-patch; raise Absent, or Conflict if the ``metadata.resourceVersion`` in *change* is out of date."""
        path = kind.path(namespace or self.namespace, name)
        return self.request("PATCH", path, query={"fieldManager": FIELD_MANAGER}, body=change, content_type=MERGE)

    def delete(self, kind: Kind, name: str, namespace: str | None = None, *, grace_s: int | None = None) -> None:
        """Delete an object, which has *grace_s* to end instead of its own time; raise Absent if there is none."""
        query = None if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        self.request("DELETE", kind.path(namespace or self.namespace, name), query=query)

    def watch(self, kind: Kind, version: str, *, fields: str) -> Iterator[tuple[str, Object]]:
        """Yield changes since *version*, including ('BOOKMARK', …), until the server ends the watch. Raises Expired if
        *version* is too old, ClusterUnavailable if the connection was lost, or the server is overloaded."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"fieldSelector": fields, "timeoutSeconds": str(WATCH_S)}
        for line in self.lines(kind.path(self.namespace), query):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise refusal(event["object"].get("code", 500), event["object"], self.address)
            yield event["type"], event["object"]

    def logs(
        self, pod: str, namespace: str | None = None, *, follow: bool = False, container: str = "main"
    ) -> Iterator[str]:
        """Yield the log of a pod's container, line by line; raise Absent if the pod is gone."""
        query = {"container": container, "follow": "true" if follow else ""}
        for line in self.lines(f"{PODS.path(namespace or self.namespace, pod)}/log", query):
            yield line.decode(errors="replace") + "\n"

    def lines(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """Yield the response line by line as it arrives. This is not retried: only the caller knows where to
        continue."""
        import urllib3

        try:
            answer = self._send("GET", path, query, None, "", stream=True)
            if answer.status >= 300:
                raise refusal(answer.status, parsed(answer.read()), self.address, answer.headers.get("Retry-After"))
            with contextlib.closing(answer):
                yield from (line.removesuffix(b"\n") for line in answer)
        except urllib3.exceptions.HTTPError as error:
            raise lost(error, self.address) from error

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request. Returns the response as an object. Temporary errors are retried for ``patience_s``.

        Raises:
            AccessDenied, ClusterRefused, Absent, AlreadyExists, Conflict, Expired: the server refused the request.
            ClusterUnavailable: the server still does not answer, or is still overloaded.
        """
        import urllib3

        started, pause_s = time.monotonic(), PAUSE_S
        while True:
            try:
                answer = self._send(method, path, query or {}, body, content_type, stream=False)
                self._answered, content = True, parsed(answer.data)
                if answer.status < 300:
                    return content
                problem = refusal(answer.status, content, self.address, answer.headers.get("Retry-After"))
            except urllib3.exceptions.HTTPError as error:
                problem = lost(error, self.address)
                problem.__cause__ = error
            if not isinstance(problem, Unanswered):
                raise problem
            wait_s = problem.wait_s or pause_s
            patience_s = self.patience_s if self._answered else min(self.patience_s, FIRST_PATIENCE_S)
            if time.monotonic() + wait_s > started + patience_s:
                raise problem
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str, *, stream: bool
    ) -> BaseHTTPResponse:
        import urllib3

        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if authorization := self.login.authorization():
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = content_type
        parameters = urlencode({name: value for name, value in query.items() if value})
        answer: BaseHTTPResponse = self.login.pool.request(
            method,
            self.address + path + (f"?{parameters}" if parameters else ""),
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            preload_content=not stream,
            # A watch sends something at least every minute; a log may be silent for longer.
            timeout=urllib3.Timeout(connect=CONNECT_S, read=WATCH_S + CONNECT_S if stream else ANSWER_S),
            retries=False,
        )
        return answer

    def _resources(self, api_version: str) -> tuple[Object, ...]:
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            return tuple(kind for kind in self.request("GET", root)["resources"] if "/" not in kind["name"])
        except Absent:
            return ()


def _described(api_version: str, resource: Object) -> Kind:
    return Kind(api_version, resource["kind"], resource["name"], resource["namespaced"])


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """Connect to the cluster of the kubeconfig (``KUBECONFIG``), or to the one that this pod runs in. Raises
    ConfigError if there is neither, or no such context; AccessDenied if the program that the kubeconfig names gave no
    token."""
    listed = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config")).split(os.pathsep)
    files = [Path(path) for path in listed if path and Path(path).is_file()]
    within = context is None and not files and "KUBERNETES_SERVICE_HOST" in os.environ
    login, default_namespace = in_cluster() if within else by_kubeconfig(files, context)
    return Cluster(login, namespace or default_namespace)
