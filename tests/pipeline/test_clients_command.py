"""``slipway clients``: a key is shown once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from stages.parts.base.errors import ConfigError
from stages.parts.endpoint.clients import FILE, hash_of, read_clients


def said(store: Path, *arguments: str) -> str:
    ended = CliRunner().invoke(app, ["clients", *arguments, "--store", str(store)], catch_exceptions=False)
    if isinstance(ended.exception, SystemExit) and ended.exit_code:
        raise AssertionError(ended.output)
    return ended.stdout


def test_a_client_is_added_listed_given_another_key_and_removed(tmp_path: Path) -> None:
    limits = ("--model", "org/name", "--requests-per-minute", "60", "--tokens-per-minute", "20000")
    key = said(tmp_path, "add", "search", *limits, "--requests-at-once", "4", "--priority", "-1").strip()
    (client,) = read_clients(tmp_path).clients
    assert (client.key_sha256, len(key) > 40) == (hash_of(key), True)
    assert key not in (tmp_path / FILE).read_text()
    assert json.loads(said(tmp_path, "list", "--json")) == [
        {
            "name": "search",
            "models": ["org/name"],
            "requests_per_minute": 60,
            "tokens_per_minute": 20_000,
            "requests_at_once": 4,
            "priority": -1,
        }
    ]
    assert "20,000" in said(tmp_path, "list")
    other = json.loads(said(tmp_path, "rotate", "search", "--json"))["key"]
    assert read_clients(tmp_path).clients[0].key_sha256 == hash_of(other) != hash_of(key)
    assert read_clients(tmp_path).clients[0].tokens_per_minute == 20_000
    assert said(tmp_path, "rm", "search") == "removed search\n"
    assert read_clients(tmp_path).clients == ()
    assert "no clients" in said(tmp_path, "list")


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name: String should match"):
        said(tmp_path, "add", "Not A Name")
