"""The Kubernetes API over HTTP, as far as Slipway speaks it, with faults on request.

Strict: an unknown path, query parameter, content type or selector is refused, as is an object that its resource's
``check`` finds wrong. ``mistakes`` keeps what was refused for being malformed, so that a test can ask that there was
nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kubernetes.faults import Fault, KubernetesRequest, Watched
from tests.kubernetes.handler import POLL_S, Handler
from tests.kubernetes.objects import Object, Objects, Refused, Resource
from tests.kubernetes.resources import RESOURCES


@dataclass
class KubernetesServer:
    """Serves in a background thread while the ``with`` block lasts. ``default`` and ``kube-system`` are there."""

    port: int = 0
    token: str = "let-me-in"
    objects: Objects = field(default_factory=Objects)
    requests: list[KubernetesRequest] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Lines by namespace and pod."""
    user: str = "jane@example.com"
    """Who the caller is."""
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """(verb, plural) that this user may not."""

    def __post_init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._watches: list[Watched] = []
        self._server: ThreadingHTTPServer | None = None
        self.stopped = threading.Event()
        for resource in RESOURCES:
            self.register(resource)
        for name in ("default", "kube-system"):
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stopped.set()
        self.stop()

    def start(self) -> None:
        """Listen, again on the same port after ``stop``."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (Handler,), {"cluster": self}))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Be gone: nothing listens, watches are cut. Objects stay, and controllers go on."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.cut_watches()

    def kubeconfig(self, path: Path, *, namespace: str = "default", token: str | None = None) -> Path:
        """A kubeconfig file for this server with the contexts ``test`` (current) and ``other``."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token or self.token}}],
            "contexts": [
                {"name": name, "context": {"cluster": "test", "user": "test", "namespace": place}}
                for name, place in (("test", namespace), ("other", "default"))
            ],
            "current-context": "test",
        }
        path.write_text(json.dumps(document))
        return path

    def register(self, resource: Resource) -> None:
        self.objects.resources[resource.api_version, resource.plural] = resource
        with self.objects.changed:
            self.objects.changed.notify_all()

    def unregister(self, api_version: str, plural: str) -> None:
        """Remove a resource as if its CustomResourceDefinition were not installed."""
        del self.objects.resources[api_version, plural]

    def resource(self, kind: str, api_version: str = "") -> Resource:
        return next(
            each
            for each in self.objects.resources.values()
            if each.kind == kind and api_version in ("", each.api_version)
        )

    # What a controller, or a test in its place, does: without HTTP, as the user *manager*.

    def put(self, body: Object, *, manager: str = "controller") -> Object:
        """Create an object, its status included, or give it another content."""
        resource = self.resource(body["kind"], body["apiVersion"])
        namespace = body["metadata"].get("namespace", "default") if resource.namespaced else ""
        name = body["metadata"]["name"]
        with self.objects.changed:
            try:
                old = self.objects.find(resource, namespace, name)
            except Refused:
                self.objects.create(resource, namespace, body, manager, dry_run=False)
                return self.set_status(resource.kind, namespace, name, body.get("status"), manager=manager)
            new = body | {"metadata": old["metadata"] | body["metadata"]}
            new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
            self.objects.replace(resource, namespace, name, new, manager, part="", dry_run=False)
            return self.set_status(resource.kind, namespace, name, body.get("status"), manager=manager)

    def set_status(
        self, kind: str, namespace: str, name: str, status: Object | None, *, manager: str = "controller"
    ) -> Object:
        """Replace an object's status; None leaves it."""
        resource = self.resource(kind)
        with self.objects.changed:
            if status is not None and resource.status:
                new = {"status": status}
                return self.objects.replace(resource, namespace, name, new, manager, part="status", dry_run=False)
            old = self.objects.find(resource, namespace, name)
            if status is None:
                return old
            return self.objects.replace(
                resource, namespace, name, old | {"status": status}, manager, part="", dry_run=False
            )

    def find(self, kind: str, name: str, namespace: str = "default") -> Object:
        """Raises: Refused: 404."""
        resource = self.resource(kind)
        return self.objects.find(resource, namespace if resource.namespaced else "", name)

    def all(self, kind: str, namespace: str | None = None) -> list[Object]:
        return self.objects.select(self.resource(kind), namespace, "", "")

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        resource = self.resource(kind)
        self.objects.delete(resource, namespace if resource.namespaced else "", name)

    def on_change(self, kind: str, callback: Callable[[str, Object], None]) -> None:
        """Call *callback* with ADDED, MODIFIED or DELETED and the object, one by one, in a thread of its own."""
        resource, seen = self.resource(kind), self.objects.version

        def tell() -> None:
            nonlocal seen
            while not self.stopped.is_set():
                for change in self.objects.since(resource, None, seen, wait_s=POLL_S):
                    seen = change.version
                    callback(change.type, change.object)

        threading.Thread(target=tell, name=f"controller of {kind}", daemon=True).start()

    # Faults.

    def fail(
        self, verb: str, pattern: str, status: int, *, times: int | None = 1, retry_after: int | None = None
    ) -> None:
        """*verb* is create, get, list, watch, update, patch, delete or *; *pattern* as in a shell, of the path."""
        self._faults.append(Fault(verb, pattern, times, status, retry_after))

    def hang_up(self, verb: str, pattern: str, *, times: int | None = 1) -> None:
        """Close the connection instead of answering, before anything is done."""
        self._faults.append(Fault(verb, pattern, times))

    def lose_answer(self, verb: str, pattern: str, *, times: int | None = 1) -> None:
        """Do what is asked, then close the connection instead of answering."""
        self._faults.append(Fault(verb, pattern, times, after=True))

    def cut_watches(self) -> None:
        with self._lock:
            for each in self._watches:
                each.cut = True

    def expire_watches(self) -> None:
        """Every watch ends with 410, and one from before now can't be started any more."""
        self.objects.forget()
        with self._lock:
            for each in self._watches:
                each.expired = True

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def requests_for(self, verb: str, pattern: str) -> list[KubernetesRequest]:
        with self._lock:
            return [each for each in self.requests if each.verb == verb and fnmatch(each.path, pattern)]

    def fault_for(self, verb: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and fault.verb in ("*", verb) and fnmatch(path, fault.pattern):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def log(self, request: KubernetesRequest) -> None:
        with self._lock:
            self.requests.append(request)

    def watching(self) -> Watched:
        with self._lock:
            self._watches.append(watched := Watched(cut=self._server is None))
        return watched

    def forget_watch(self, watched: Watched) -> None:
        with self._lock:
            self._watches.remove(watched)

    @property
    def open_watches(self) -> int:
        return len(self._watches)
