"""A store with releases, and a cluster whose KServe serves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import STORE_VARIABLE
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.login import by_kubeconfig
from stages.parts.records.rollout import Journal
from stages.rollout.kserve.detect import target_on
from stages.rollout.kserve.objects import KServeEndpoint
from stages.rollout.kserve.route import route_name
from stages.rollout.kserve.settings import VARIABLE, KServe
from stages.rollout.kserve.target import KServeTarget
from stages.rollout.state_machine import roll_out
from stages.rollout.target import Target
from tests.kubernetes import KubernetesServer
from tests.kubernetes.gateway import Gateway
from tests.kubernetes.kserve import KServeController
from tests.serving import REPOSITORY
from tests.stages.rollout.stage import GOOD, SETTINGS, Stage

STRAIGHT = "http://127.0.0.1:{port}"
"""Services have names of a cluster; their servers listen on this machine."""


PROPAGATION_S = 0.25
"""More than the cluster's ``lag_s``."""


class OnKServe(Stage):
    def __init__(
        self, folder: Path, server: KubernetesServer, *, gateway: bool = False, asked: Any = "auto", **changed: Any
    ) -> None:
        """*asked*: ``kserve.mode``."""
        super().__init__(folder)
        self.folder, self.server = folder, server
        self.store.releases.mkdir(parents=True)
        servers = folder / "servers"
        servers.mkdir()
        self.gateway = Gateway(servers)
        if gateway:
            self.gateway.start()
            changed["gateway"] = self.gateway
        self.kserve = KServeController(server, self.store.releases, servers, **changed)
        self.settings = KServe(mode=asked, service_url=STRAIGHT, in_force_s=60, propagation_s=PROPAGATION_S, drain_s=0)
        self.serving = Serving()
        self.kserve.start()

    @property
    def name(self) -> str:
        return self.endpoint().name

    @property
    def route(self) -> str:
        """The HTTPRoute's name in mode ``route``."""
        return route_name(self.endpoint())

    def endpoint(self) -> KServeEndpoint:
        return KServeEndpoint(self.store, self.serving, self.settings, "default")

    def connect(self, **changed: Any) -> KServeTarget:
        """The target, as a process of its own would get it."""
        found = target_on(self.cluster(), self.store, self.serving, self.settings.model_copy(update=changed))
        assert isinstance(found, KServeTarget)
        return found

    def cluster(self) -> Cluster:
        login, _ = by_kubeconfig([self.server.kubeconfig(self.folder / "kubeconfig")], None)
        return Cluster(login, patience_s=30)

    def roll(self, release: str, target: Target | None = None, **changed: Any) -> Journal:
        settings = SETTINGS.model_copy(update=changed)
        return roll_out(self.store, target or self.connect(), release, settings)

    def first(self, release: str = GOOD, **behaviour: Any) -> str:
        """The first release, in production and served."""
        self.make(release, **behaviour)
        self.roll(release)
        return release

    def program(self, *arguments: str, **changed: Any) -> subprocess.Popen[str]:
        """``python -m stages.rollout --target kserve`` as a process of its own, that can be killed."""
        settings = SETTINGS.model_copy(update=changed).model_dump_json()
        command = [sys.executable, "-m", "stages.rollout", "--model", "org/name", "--target", "kserve"]
        environment = os.environ | {
            "KUBECONFIG": str(self.server.kubeconfig(self.folder / "kubeconfig")),
            STORE_VARIABLE: str(self.store.root),
            VARIABLE: self.settings.model_dump_json(),
        }
        return subprocess.Popen(
            [*command, "--settings", settings, *arguments],
            cwd=REPOSITORY,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def service(self) -> dict[str, Any]:
        return self.server.find("InferenceService", self.name)

    def services(self) -> list[dict[str, Any]]:
        """Everything that serves, in any mode."""
        return [*self.server.all("InferenceService"), *self.server.all("LLMInferenceService")]

    def deployment(self, release: str) -> str:
        (found,) = [each.name for each in self.kserve.deployments.values() if each.release == release]
        return found
