from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty Hub of the test's own."""
    with HubServer() as server:
        yield server
