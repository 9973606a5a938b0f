"""Skip what needs one of the extras where it is not installed, without importing it: torch, which vLLM and lm-eval
import, takes seconds in each of the tests' workers."""

from __future__ import annotations

import importlib.util

import pytest


def need(module: str) -> None:
    """Skip the test, or the module whose body asks, unless *module* can be imported."""
    if not importlib.util.find_spec(module):
        pytest.skip(f"{module} is not installed", allow_module_level=True)
