"""stop, retry and report for runs on this machine: real processes, a real download to interrupt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.hub import HubServer
from tests.hub.models import tiny_model


def slipway(*arguments: str, store: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env=os.environ | environment | {"SLIPWAY_STORE": str(store)},
        capture_output=True,
        text=True,
        check=False,
    )


def runs(store: Path) -> list[dict[str, Any]]:
    return json.loads(slipway("runs", "--json", store=store).stdout)


def test_a_stopped_run_has_ended_and_left_its_report_when_stop_returns(tmp_path, hub: HubServer):
    hub.add_repo("org/name", tiny_model())
    hub.slow("model.safetensors", bytes_per_s=10)
    run = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "run", "org/name", "--no-serve"],
        env=os.environ | {"SLIPWAY_STORE": str(tmp_path), "HF_ENDPOINT": hub.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/runs/*/logs/acquire.log")):
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    stopped = slipway("stop", "latest", store=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("stopped ")
    assert runs(tmp_path)[0]["phase"] == "Failed"
    assert run.wait(timeout=60) == 130
    report = Path(slipway("report", "latest", store=tmp_path).stdout.strip())
    assert report.is_file()
    assert json.loads(slipway("report", "latest", "--json", store=tmp_path).stdout)["status"] == "Failed"
    assert "has ended already" in slipway("stop", "latest", store=tmp_path).stdout


def test_a_retried_run_gets_the_same_arguments_and_fails_for_the_same_reason(tmp_path, hub: HubServer):
    first = slipway("run", "org/nothing", "--profile", "chatbot", "--no-serve", store=tmp_path, HF_ENDPOINT=hub.url)
    again = slipway("retry", "latest", store=tmp_path, HF_ENDPOINT=hub.url)
    assert (first.returncode, again.returncode) == (10, 10)
    newer, older = runs(tmp_path)
    assert newer["name"] != older["name"]
    assert newer["arguments"] == older["arguments"]
    assert json.loads(newer["arguments"]["profile"])["name"] == "chatbot"


def test_a_retried_run_may_go_on_without_a_variant(tmp_path, hub: HubServer):
    slipway("run", "org/nothing", "--set", "optimize.group_size=64", "--no-serve", store=tmp_path, HF_ENDPOINT=hub.url)
    again = slipway("retry", "latest", "--allow-incomplete", store=tmp_path, HF_ENDPOINT=hub.url)
    assert again.returncode == 10, again.stderr
    newer, older = (json.loads(each["arguments"].pop("optimize")) for each in runs(tmp_path))
    assert newer == older | {"allow_incomplete": True}
    assert not older["allow_incomplete"]


def test_a_run_without_a_report_says_so(tmp_path, hub: HubServer):
    slipway("run", "org/nothing", "--no-serve", store=tmp_path, HF_ENDPOINT=hub.url)
    for report in tmp_path.glob("*/runs/*/report.json"):
        report.unlink()
    ended = slipway("report", store=tmp_path)
    assert ended.returncode == 51
    assert "has no report" in ended.stderr
    assert "Traceback" not in ended.stderr
