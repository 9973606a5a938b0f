"""Attempts: which failures are tried again, when, and what a deadline does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from hera.workflows import Parameter, Task, models

from pipeline.local.folder import read_run
from pipeline.runs.state import RunState
from tests.pipeline.local.local_bench import OUTPUTS, Bench, dag, retries

TRANSIENT = "lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.message matches 'evicted'"
DEADLINE_S = 5  # a program is up and has noted it by then, on a busy machine too
FAIL_UNTIL = """
add("attempts", time.time())
attempt = len(open(os.path.join(store, "attempts")).readlines())
print("attempt", attempt, flush=True)
if attempt < int(sys.argv[1]):
    fail(int(sys.argv[2]), "told to fail", "tell me otherwise")
output("digest", "done")
"""


def attempts(bench: Bench, succeeds_at: int, code: int, *, main: str = FAIL_UNTIL, **settings: Any) -> RunState:
    with bench.workflow() as workflow:
        program = bench.program("work", main, arguments=[str(succeeds_at), str(code)], outputs=["digest"], **settings)
        with dag(name="main"):
            Task(name="work", template=program)
    return bench.run(workflow)


def test_exit_code_75_is_retried(bench: Bench) -> None:
    state = attempts(bench, 3, 75, retry_strategy=retries(limit=3, expression=TRANSIENT))
    node = state.node("work")
    assert (state.phase, node.attempts, node.exit_code, node.message) == ("Succeeded", 3, 0, "")
    assert node.outputs == {"digest": "done"}
    assert [(failure.message, failure.exit_code) for failure in node.retried] == [("told to fail", 75)] * 2
    assert read_run(bench.run_dir).node("work").retried == node.retried


def test_exit_code_1_is_final(bench: Bench) -> None:
    state = attempts(bench, 3, 1, retry_strategy=retries(limit=3, expression=TRANSIENT))
    node = state.node("work")
    assert (state.phase, node.phase, node.attempts, node.exit_code) == ("Failed", "Failed", 1, 1)
    assert (node.message, node.hint) == ("told to fail", "tell me otherwise")


def test_the_limit_counts_attempts_after_the_first(bench: Bench) -> None:
    state = attempts(bench, 9, 75, retry_strategy=retries(limit=2, expression=TRANSIENT))
    assert (state.phase, state.node("work").attempts, len(bench.lines("attempts"))) == ("Failed", 3, 3)


def test_a_promised_output_that_is_missing_is_an_error_that_an_expression_can_ask_for(bench: Bench) -> None:
    for expression, attempts_made in ((TRANSIENT, 2), ("lastRetry.status == 'Failed'", 1)):
        strategy = retries(limit=1, expression=expression)
        broken = attempts(bench, 0, 0, main="", retry_strategy=strategy)  # ends well without its output
        assert (broken.phase, broken.node("work").attempts) == ("Error", attempts_made)


def test_without_an_expression_every_failure_is_retried(bench: Bench) -> None:
    assert attempts(bench, 2, 1, retry_strategy=retries(limit=1)).phase == "Succeeded"


def test_without_a_strategy_there_is_one_attempt(bench: Bench) -> None:
    assert attempts(bench, 2, 75).node("work").attempts == 1


def test_attempts_wait_longer_and_longer(bench: Bench) -> None:
    backoff = models.Backoff(duration="100ms", factor=2)
    attempts(bench, 3, 75, retry_strategy=retries(limit=3, backoff=backoff))
    at = [float(line) for line in bench.lines("attempts")]
    waits = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert len(waits) == 2
    assert all(wait >= least for wait, least in zip(waits, (0.1, 0.2), strict=True))
    assert "attempt 1 failed, the next in 0.1 s: told to fail" in bench.progress.getvalue()
    assert "attempt 2 failed, the next in 0.2 s: told to fail" in bench.progress.getvalue()


def test_a_line_in_the_log_separates_attempts(bench: Bench) -> None:
    attempts(bench, 2, 75, retry_strategy=retries(limit=1))
    log = (bench.run_dir / "logs" / "work.log").read_text()
    assert log.index("attempt 1\n") < log.index("\n--- attempt 2 ---\n") < log.rindex("attempt 2\n")


def test_the_message_is_of_the_last_attempt_alone(bench: Bench) -> None:
    code = FAIL_UNTIL.replace("    fail(", "    if attempt > 1:\n        sys.exit(75)\n    fail(")
    state = attempts(bench, 9, 75, main=code, retry_strategy=retries(limit=1))
    assert state.node("work").message == "exit code 75: attempt 2"


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("print('error: other'); fail(9, 'two', 'do it')", "two", "do it"),
        ("fail(2, '2 mistakes\\n    a: x\\n    b: y', 'fix')", "2 mistakes\n    a: x\n    b: y", "fix"),
    ],
)
def test_a_failed_task_shows_the_error_of_its_document(bench: Bench, code: str, message: str, hint: str) -> None:
    state = attempts(bench, 0, 0, main=code)
    assert (state.node("work").message, state.node("work").hint) == (message, hint)
    assert (state.culprit, state.message) == ("work", f"work: {message}")


SAYS_AND_DIES = """
try:
    fail(9, "too early")
except SystemExit:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('step 1'); print('  step 2  '); print(); sys.exit(9)", "exit code 9: step 2"),
        ("sys.exit(9)", "exit code 9"),
        ("output('failure.json', '{'); sys.exit(9)", "exit code 9"),
        ("os.kill(os.getpid(), 9)", "killed (SIGKILL): perhaps the machine ran out of memory"),
        (SAYS_AND_DIES, "killed (SIGKILL): perhaps the machine ran out of memory"),
        ("sys.stdout.buffer.write(b'\\xff broken \\xfe'); sys.exit(4)", "exit code 4: � broken �"),
        ("print('x' * 10**6); print('late'); sys.exit(4)", "exit code 4: late"),
    ],
)
def test_a_task_without_a_failure_document_is_explained_by_its_exit_status_and_the_end_of_its_log(
    bench: Bench, code: str, message: str
) -> None:
    state = attempts(bench, 0, 0, main=code)
    assert (state.node("work").message, state.node("work").hint) == (message, "")


STUBBORN = """
import subprocess
if len(sys.argv) == 2:
    child = "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", child, sys.argv[1]], start_new_session=True)
    write("started")
    time.sleep(600)
"""


def test_a_task_beyond_its_deadline_ends_with_everything_it_started(
    bench: Bench, living: Callable[[str], list[int]]
) -> None:
    marker = f"marker-{uuid4().hex}"
    with bench.workflow() as workflow:
        program = bench.program(
            "work",
            STUBBORN,
            arguments=[marker],
            active_deadline_seconds=DEADLINE_S,
            retry_strategy=retries(limit=3, expression="lastRetry.exitCode == '143'"),
        )
        with dag(name="main"):
            Task(name="work", template=program)
    node = bench.run(workflow).node("work")
    assert (bench.store / "started").exists()
    assert (node.phase, node.message) == ("Failed", f"took longer than {DEADLINE_S} s (activeDeadlineSeconds)")
    assert node.attempts == 1  # a deadline is no preemption: its exit code is unknown to the expression
    assert living(marker) == []


SLOW_AT_FIRST = """
add("attempts", 1)
if len(open(os.path.join(store, "attempts")).readlines()) < 2:
    time.sleep(60)
output("digest", 1)
"""


def test_each_attempt_has_the_whole_deadline(bench: Bench) -> None:
    state = attempts(
        bench,
        2,
        0,
        main=SLOW_AT_FIRST,
        active_deadline_seconds=DEADLINE_S,
        retry_strategy=retries(limit=1, expression="lastRetry.message matches 'activeDeadlineSeconds'"),
    )
    assert (state.phase, state.node("work").attempts) == ("Succeeded", 2)


def test_a_workflow_beyond_its_deadline_fails_and_its_exit_handler_runs(bench: Bench) -> None:
    with bench.workflow(active_deadline_seconds=DEADLINE_S, on_exit="ending") as workflow:
        bench.handler("write('status', sys.argv[1])")
        slow = bench.program("slow", "time.sleep(60)", retry_strategy=retries(limit=5))
        with dag(name="main"):
            Task(name="slow", template=slow) >> Task(name="next", template=slow)
    state = bench.run(workflow)
    assert (state.phase, state.message) == ("Failed", f"the workflow took longer than {DEADLINE_S} s")
    assert {node.name: node.phase for node in state.nodes} == {
        "slow": "Failed",
        "next": "Omitted",
        "onExit": "Succeeded",
        "onExit.report": "Succeeded",
    }
    assert bench.lines("status") == ["Failed"]
    assert DEADLINE_S <= (state.seconds or 0) < 60


@pytest.mark.parametrize(("fails", "handler_fails"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_exit_handler_always_runs_and_knows_the_status(bench: Bench, fails: bool, handler_fails: bool) -> None:
    with bench.workflow(on_exit="ending", arguments=[Parameter(name="model", value="m")]) as workflow:
        report = bench.handler(f"write('status', ' '.join(sys.argv[1:])); sys.exit({int(handler_fails)})")
        report.args += ["{{workflow.parameters.model}}", "{{workflow.name}}"]
        work = bench.program("work", f"sys.exit({5 * fails})")
        with dag(name="main"):
            Task(name="work", template=work)
    state = bench.run(workflow)
    assert bench.lines("status") == [f"{'Failed' if fails else 'Succeeded'} m run-1"]
    assert state.phase == ("Failed" if fails or handler_fails else "Succeeded")
    assert state.culprit == ("work" if fails else "onExit.report" if handler_fails else None)
    assert state.node("onExit").phase == ("Failed" if handler_fails else "Succeeded")


def cached(bench: Bench, code: str) -> Any:
    with bench.workflow(arguments=[Parameter(name="key", value="abc-1")]) as workflow:
        memoize = models.Memoize(
            key="{{workflow.parameters.key}}",
            max_age="24h",
            cache=models.Cache(config_map=models.LocalObjectReference(name="commits")),
        )
        program = bench.program("resolve", code, outputs=["commit"], memoize=memoize)
        use = bench.program("use", "add('used', sys.argv[1])", inputs=["c"], arguments=["{{inputs.parameters.c}}"])
        with dag(name="main"):
            resolve = Task(name="resolve", template=program)
            resolve >> Task(name="use", template=use, arguments={"c": resolve.get_parameter("commit")})
    return workflow


RESOLVE = "add('runs', 1); output('commit', 'commit-%d' % len(open(os.path.join(store, 'runs')).readlines()))"


def test_a_memoized_task_runs_once_per_key_and_gives_its_outputs_again(bench: Bench) -> None:
    workflow = cached(bench, RESOLVE)
    first, second = bench.run(workflow), bench.run(workflow)
    assert [state.node("resolve").cached for state in (first, second)] == [False, True]
    assert second.node("resolve").outputs == {"commit": "commit-1"}
    assert second.node("resolve").message == "from run run-1"
    assert "resolve  Cached" in bench.progress.getvalue()
    bench.run(workflow, {"key": "another"})
    assert bench.lines("used") == ["commit-1", "commit-1", "commit-2"]


def test_an_old_result_is_not_used(bench: Bench) -> None:
    bench.run(cached(bench, RESOLVE))
    entry = bench.state_dir / "memo" / "commits" / "abc-1.json"
    kept = json.loads(entry.read_text())
    entry.write_text(json.dumps(kept | {"created_at": "2020-01-01T00:00:00Z"}))
    assert not bench.run(cached(bench, RESOLVE)).node("resolve").cached
    assert bench.run(cached(bench, RESOLVE)).node("resolve").cached  # the entry is new again


def test_a_failed_task_is_not_remembered(bench: Bench) -> None:
    code = "output('commit', 'x')\nadd('runs', 1)\nsys.exit(1)"
    assert [bench.run(cached(bench, code)).phase for _ in range(2)] == ["Failed", "Failed"]
    assert len(bench.lines("runs")) == 2
    assert not list(bench.state_dir.rglob("*.json"))


def test_a_damaged_entry_is_replaced(bench: Bench) -> None:
    bench.run(cached(bench, RESOLVE))
    entry = bench.state_dir / "memo" / "commits" / "abc-1.json"
    entry.write_text(entry.read_text()[:20])
    assert not bench.run(cached(bench, RESOLVE)).node("resolve").cached
    assert bench.run(cached(bench, RESOLVE)).node("resolve").cached


@pytest.mark.parametrize("key", ["org/model_v1.0", "-a", "", "../../etc/passwd", "a b"])
def test_a_key_that_argo_would_refuse_is_an_error_here_too(bench: Bench, key: str) -> None:
    node = bench.run(cached(bench, RESOLVE), {"key": key}).node("resolve")
    assert (node.phase, node.attempts) == ("Error", 0)
    assert node.message == f"memoize.key {key!r} must be letters, digits and '-'"
    assert OUTPUTS not in node.hint
