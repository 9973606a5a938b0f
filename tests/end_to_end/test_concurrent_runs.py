"""Many runs at once on one store, of one model, of two, and from two hosts: each piece of work is done once."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from stages.parts.base.program import outcomes
from stages.parts.base.store import ModelStore
from tests.demo import DEMO
from tests.end_to_end.command_line import CONFIG, EIGHT_BIT, MODEL, Pipeline, processes_naming, wait_until_gone
from tests.hub.server import HubServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
OTHER = "slipway/another-llama"
VARIANTS = ("fp16", "int8") if EIGHT_BIT else ("fp16",)
OPTIONS = (*CONFIG, "--set", f"optimize.variants=[{', '.join(VARIANTS)}]", "--no-serve", "--json")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Pipeline]:
    with HubServer() as hub:
        for model in (MODEL, OTHER):
            hub.add_repo(model, DEMO / "model")
        yield Pipeline(tmp_path, hub)
        wait_until_gone(str(tmp_path))
        assert processes_naming(str(tmp_path)) == []


def run_at_once(place: Pipeline, models: Sequence[str], hosts: Sequence[str] = ("",)) -> list[str]:
    """Start a run of each of *models*, on each of *hosts* in turn; return the runs' names once all have ended well.

    Args:
        hosts: names of machines; for each that is not empty its runs have processes and a name of their own, as in a
            container.
    """
    environment = place.environment.copy()
    del environment["HF_TOKEN"]
    with ExitStack() as stack:
        started = []
        for number, model in enumerate(models):
            command = place.command("run", model, *OPTIONS)
            if host := hosts[number % len(hosts)]:
                named = ("sh", "-c", f'hostname {host} && exec "$@"', "sh")
                command = ["unshare", "--fork", "--pid", "--mount-proc", "--uts", "--kill-child", *named, *command]
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            started.append(stack.enter_context(process))
        ended = [(*process.communicate(timeout=3000), process.returncode) for process in started]
    assert [code for _, _, code in ended] == [0] * len(models), [said[-2000:] for _, said, code in ended if code]
    return [json.loads(answer)["run"] for answer, _, _ in ended]


def check_done_once(place: Pipeline, model: str, runs: Sequence[str]) -> None:
    """Each stage was done by one of *runs*, and its result used by the others; their decision is one."""
    store = ModelStore(place.root, model)
    done = Counter[tuple[str, str]]()
    for run in runs:
        for outcome in outcomes(store.run(run)):
            assert outcome.result in ("done", "reused", "left out", "not tried"), outcome
            done[outcome.stage, outcome.variant] += outcome.result == "done"
    once = [("acquire", ""), *(("optimize", variant) for variant in VARIANTS)]
    once += [("evaluate", variant) for variant in VARIANTS]
    assert {work: done[work] for work in once} == dict.fromkeys(once, 1)
    assert len(list(store.releases.iterdir())) == 1
    assert store.production.resolve().parent == store.releases
    for run in runs:
        verified = place.call("verify-decision", run)
        assert verified.returncode == 0, verified.stderr


def test_ten_runs_of_one_model(place: Pipeline) -> None:
    check_done_once(place, MODEL, run_at_once(place, [MODEL] * 10))


def test_runs_of_two_models(place: Pipeline) -> None:
    models = [MODEL, OTHER, MODEL, OTHER, MODEL]
    runs = run_at_once(place, models)
    for model in (MODEL, OTHER):
        check_done_once(place, model, [run for run, of in zip(runs, models, strict=True) if of == model])


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode != 0,
    reason="may not make namespaces",
)
def test_runs_from_two_hosts(place: Pipeline) -> None:
    check_done_once(place, MODEL, run_at_once(place, [MODEL] * 4, hosts=("host-a", "host-b")))
