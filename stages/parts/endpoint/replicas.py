"""The servers of one release, each of which is kept up by itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stages.parts.base.errors import SlipwayError
from stages.parts.endpoint.clusters import Backend
from stages.parts.endpoint.endpoint import ServerState
from stages.parts.endpoint.supervised_server import RestartPolicy, SupervisedServer
from stages.parts.vllm.server import ServerSpec


class Replicas:
    """See ``SupervisedServer``.

    Args:
        specs: of each server.
    """

    def __init__(self, specs: Sequence[ServerSpec], policy: RestartPolicy, changed: threading.Event) -> None:
        self.half = specs[0].half
        self._servers = [SupervisedServer(spec, policy, changed) for spec in specs]
        self._started = False

    @property
    def states(self) -> tuple[ServerState, ...]:
        return tuple(server.state for server in self._servers)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Where those listen that are up."""
        return tuple(server.backend for server in self._servers if server.backend)

    @property
    def started(self) -> bool:
        """Whether all of them have been up at the same time."""
        self._started = self._started or len(self.backends) == len(self._servers)
        return self._started

    @property
    def error(self) -> SlipwayError | None:
        """Why the release failed for good: a server did not start, or all failed later."""
        errors = [server.error for server in self._servers if server.error]
        return errors[0] if errors and (len(errors) == len(self._servers) or not self.started) else None

    def stop(self) -> None:
        """Ask the servers to end; return at once."""
        for server in self._servers:
            server.stop()

    def ended(self) -> bool:
        return all(server.ended() for server in self._servers)

    def join(self) -> None:
        """Wait until the servers and their threads have ended."""
        for server in self._servers:
            server.join()
