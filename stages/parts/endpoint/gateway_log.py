"""Takes a gateway's access log into the database of usage, and what the servers count that its lines name. It runs
beside each proxy of a cluster: ``python -m stages.parts.endpoint.gateway_log FOLDER``."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Final

from stages.parts.base.errors import ConfigError, SlipwayError
from stages.parts.base.log import say
from stages.parts.endpoint.access_log import LoggedRequest, files, leave
from stages.parts.endpoint.database import URL_VARIABLE, usage_url
from stages.parts.endpoint.metering import REOPEN, import_lines, keep_importing, reading_of
from stages.parts.vllm.client import http, read_metrics
from stages.parts.vllm.prometheus import read_start, read_tokens

ADMIN: Final = "http://127.0.0.1:19000"
"""Where Envoy Gateway's proxies can be administered, within their pods."""


class GatewayServers:
    """The servers that the lines in *folder* name by an address. A server may start again there, with counts from zero,
    or another one; so in the database a server has the time of its start in its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts: dict[str, dict[float, str]] = defaultdict(dict)
        """By the address and the time: the server's name."""
        self._in_use: dict[str, str] = {}
        """The release that answered last at each address that still answers."""
        self._releases: dict[str, str] = {}
        """By the server's name: one and the same in all of its readings."""
        self._last: dict[str, list[tuple[int, int]]] = {}
        """What the last two readings of each server say: one more follows a change, because what was counted in it may
        have been a request under way."""

    def named(self, request: LoggedRequest) -> LoggedRequest:
        """Give the server that answered its name."""
        if (address := request.server) is None:
            return request
        is_new = address not in self._in_use
        self._in_use[address] = request.release or self._in_use.get(address, "")
        if is_new:
            self._read(address)
        names = [name for start, name in self._starts[address].items() if start <= request.at]
        return request.model_copy(update={"server": names[-1] if names else address})

    def read(self) -> None:
        """Leave what each server that still answers has counted."""
        for address in list(self._in_use):
            if not self._read(address):
                del self._in_use[address]  # until a line names it again

    def _read(self, address: str) -> bool:
        with contextlib.suppress(ValueError, OSError, SlipwayError):
            text = read_metrics(f"http://{address}", address)
            tokens, (model, start) = read_tokens(text), read_start(text)
            server = self._starts[address].setdefault(start, f"{address}@{start:.0f}")
            before = self._last.get(server, [])
            if before != [tokens, tokens]:
                release = self._releases.setdefault(server, self._in_use.get(address, ""))
                leave(self._folder, reading_of(server, model, release, tokens))
                self._last[server] = [*before[-1:], tokens]
            return True
        return False


def take_in(folder: Path, url: str, servers: GatewayServers) -> str:
    """Take in what there is. Returns why that was not possible; empty if it was."""
    servers.read()
    return import_lines(folder.parent, url, folder, lambda: http().post(ADMIN + REOPEN), servers.named)


def main() -> None:
    """Take in what the proxy of this pod logs, until it has ended."""
    folder, url, ended = Path(sys.argv[1]), usage_url(), threading.Event()
    if not url:
        raise ConfigError(f"{URL_VARIABLE} is not set", hint="the Secret of cluster.clients.usage_secret has it as url")
    servers = GatewayServers(folder)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if problem := keep_importing(lambda: take_in(folder, url, servers), ended):
        left = sum(path.read_bytes().count(b"\n") for path in files(folder) if path.is_file())
        say(f"{left} lines of the log, or fewer, are lost with this pod: {problem}")


if __name__ == "__main__":
    main()
