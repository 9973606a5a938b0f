from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.rollout.kserve import applied, knative, move
from tests.kubernetes import KubernetesServer
from tests.stages.rollout.kserve.on_kserve import OnKServe


@pytest.fixture(autouse=True)
def _polling(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (applied, knative, move):
        monkeypatch.setattr(module, "POLL_S", 0.02)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., OnKServe]]:
    """Makes a cluster whose KServe is as the arguments say."""
    made: list[OnKServe] = []
    with KubernetesServer() as server:

        def make(**changed: Any) -> OnKServe:
            made.append(OnKServe(tmp_path, server, **changed))
            return made[0]

        yield make
        for each in made:
            each.kserve.stop()
            assert server.mistakes == []
            assert each.kserve.contested == []


@pytest.fixture
def standard(serve: Callable[..., OnKServe]) -> OnKServe:
    return serve()
