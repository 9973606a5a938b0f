"""Secrets from the environment: which are refused, and that no message shows one."""

from __future__ import annotations

import pytest

from pipeline.events.forwarding import optional_secret, secret
from stages.parts.base.errors import ConfigError


@pytest.mark.parametrize("value", ["short", "with a space in the middle", "gehéim" * 4, "a-line\n-break-in-between"])
def test_a_weak_or_malformed_secret_is_refused_and_not_shown(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", value)
    with pytest.raises(ConfigError, match="at least 16 visible ASCII") as refused:
        optional_secret("SLIPWAY_TEST_SECRET")
    assert value not in refused.value.render()


def test_a_secret_given_twice_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", "x" * 20)
    monkeypatch.setenv("SLIPWAY_TEST_SECRET_FILE", "/somewhere")
    with pytest.raises(ConfigError, match="both set"):
        secret("SLIPWAY_TEST_SECRET")


def test_a_line_break_at_the_end_is_no_part_of_a_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", "x" * 20 + "\n")
    assert secret("SLIPWAY_TEST_SECRET") == "x" * 20


def test_an_optional_secret_may_be_missing_and_a_required_one_may_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", "")
    monkeypatch.delenv("SLIPWAY_TEST_SECRET_FILE", raising=False)
    assert optional_secret("SLIPWAY_TEST_SECRET") is None
    with pytest.raises(ConfigError, match="SLIPWAY_TEST_SECRET_FILE are not set"):
        secret("SLIPWAY_TEST_SECRET")
