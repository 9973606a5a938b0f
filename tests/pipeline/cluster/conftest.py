"""A cluster in process, as for the tests of runs on it."""

from __future__ import annotations

from tests.pipeline.argo.conftest import cluster, config, platform, server, slipway, there

__all__ = ["cluster", "config", "platform", "server", "slipway", "there"]
