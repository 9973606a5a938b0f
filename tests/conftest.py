from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.hub.server import HubServer

# A runner that was started in the background ignores Ctrl-C, and everything that it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty Hub of the test's own."""
    with HubServer() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker waits for them at the end: whole pipelines, then single servers."""
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, len(item.path.parts)))
