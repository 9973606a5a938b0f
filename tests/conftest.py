from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from stages.parts.machine.lock import LOCK_VARIABLE
from tests import preloaded
from tests.hub.server import HubServer

END_TO_END: Final = "tests/end_to_end"
LOWER_PRIORITY: Final = 5

# Properties are about results, not about how busy the machine is.
settings.register_profile("slipway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipway")

# A runner that was started in the background ignores Ctrl-C, and everything that it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

preloaded.install()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty Hub of the test's own."""
    with HubServer() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def machine_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured on this machine besides the tests does not keep them waiting."""
    os.environ[LOCK_VARIABLE] = str(tmp_path_factory.mktemp("machine") / "lock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker waits for them at the end: the whole pipeline, then single servers."""
    items.sort(key=lambda item: (not item.nodeid.startswith(END_TO_END), item.get_closest_marker("e2e") is None))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The whole pipeline takes longest and compares real servers: the other workers' tests give way to it."""
    if not item.nodeid.startswith(END_TO_END) and "PYTEST_XDIST_WORKER" in os.environ:
        os.nice(max(0, LOWER_PRIORITY - os.nice(0)))


class OneStore(LoadFileScheduling):
    """A file's tests stay on one worker, which their fixtures are made for; the whole pipeline's share one store."""

    def _split_scope(self, nodeid: str) -> str:
        return END_TO_END if nodeid.startswith(END_TO_END) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneStore:
    return OneStore(config, log)
