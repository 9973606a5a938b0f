"""DAGs within DAGs, steps, exit hooks: what they take, what they give, and how they fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hera.workflows import DAG, Parameter, Step, Steps, Task, models
from local_bench import Bench

from pipeline.local.state import RunState

SAY = "add('order', sys.argv[1]); output('digest', sys.argv[1] + '!'); sys.exit('bad' in sys.argv[1])"


def phases(state: RunState) -> dict[str, str]:
    return {node.name: node.phase for node in state.nodes}


def say(bench: Bench, **settings: Any) -> Any:
    code = settings.pop("code", SAY)
    return bench.program(
        "say", code, inputs=["n"], arguments=["{{inputs.parameters.n}}"], outputs=["digest"], **settings
    )


def gives(name: str, **value_from: Any) -> Parameter:
    return Parameter(name=name, value_from=models.ValueFrom(**value_from))


def nested(bench: Bench, n: str, *, of: Any = DAG, fail_fast: bool | None = None) -> RunState:
    """main: before → two inner dags side by side (one more level in the second) → after."""
    with bench.workflow() as workflow:
        program = say(bench)
        with DAG(
            name="deep",
            inputs=[Parameter(name="n")],
            outputs=[gives("d", parameter="{{tasks.x.outputs.parameters.digest}}")],
        ):
            Task(name="x", template=program, arguments={"n": "deep-{{inputs.parameters.n}}"})
        with DAG(
            name="pair",
            inputs=[Parameter(name="n"), Parameter(name="how", default="{{workflow.name}}")],
            outputs=[
                gives("left", parameter="tasks.left.outputs.parameters.digest"),
                gives(
                    "both", expression="tasks.deep.status == 'Succeeded' ? tasks['deep'].outputs.parameters.d : 'none'"
                ),
                gives("how", expression="inputs.parameters.how"),
            ],
        ):
            left = Task(name="left", template=program, arguments={"n": "{{inputs.parameters.n}}"})
            left >> Task(name="deep", template="deep", arguments={"n": "{{tasks.left.outputs.parameters.digest}}"})
        with DAG(name="main", fail_fast=fail_fast):
            before = Task(name="before", template=program, arguments={"n": "0"})
            inner = Task(name="inner", template="pair", arguments={"n": n})
            other = Task(name="other", template=program, arguments={"n": "other"})
            after = Task(
                name="after",
                template=program,
                arguments={
                    "n": " ".join(f"{{{{tasks.inner.outputs.parameters.{x}}}}}" for x in ("left", "both", "how"))
                },
            )
            before >> [inner, other] >> after
    return bench.run(workflow)


def test_a_dag_within_a_dag_takes_inputs_and_gives_outputs(bench: Bench) -> None:
    state = nested(bench, "1")
    assert state.phase == "Succeeded"
    assert [node.name for node in state.nodes] == [
        "before",
        "inner",
        "inner.left",
        "inner.deep",
        "inner.deep.x",
        "other",
        "after",
    ]
    assert [node.kind for node in state.nodes][1:5] == ["DAG", "Pod", "DAG", "Pod"]
    assert bench.lines("order")[-1] == "1! deep-1!! run-1"
    assert state.node("inner").outputs == {"left": "1!", "both": "deep-1!!", "how": "run-1"}


def test_a_failure_deep_inside_is_named_and_fails_what_holds_it(bench: Bench) -> None:
    state = nested(bench, "bad")
    assert (state.phase, state.culprit) == ("Failed", "inner.left")
    assert state.node("inner").message == "inner.left: exit code 1"
    assert (state.node("inner.deep").phase, state.node("after").phase) == ("Omitted", "Omitted")
    assert state.node("inner").outputs == {}


@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_reaches_into_inner_dags(bench: Bench, fail_fast: bool) -> None:
    with bench.workflow() as workflow:
        bad = bench.program("bad", "wait_for('inner-runs'); sys.exit(2)")
        slow = bench.program("slow", f"write('inner-runs'){bench.until_failed('bad')}")
        with DAG(name="pair"):
            Task(name="one", template=slow) >> Task(name="two", template=slow)
        with DAG(name="main", fail_fast=fail_fast):
            Task(name="inner", template="pair")
            Task(name="bad", template=bad)
    state = bench.run(workflow)
    assert (state.phase, state.culprit) == ("Failed", "bad")
    inner, two = state.node("inner"), state.node("inner.two")
    assert (inner.phase, two.phase) == (("Omitted", "Omitted") if fail_fast else ("Succeeded", "Succeeded"))
    assert two.message == ("not started: bad failed (failFast)" if fail_fast else "")


@pytest.mark.parametrize("end", ["skipped", "ran"])
def test_outputs_of_a_dag_fall_back_to_their_defaults(bench: Bench, end: str) -> None:
    """docs/variables.md, "Outputs of Skipped and Omitted Nodes": at the aggregating output, and ``??``."""
    where = "{{tasks.x.outputs.parameters.digest}}"
    with bench.workflow() as workflow:
        program = say(bench)
        outputs = [
            gives("a", parameter=where, default="spare"),
            gives("b", expression="tasks.x.outputs.parameters.digest ?? 'fallback'"),
            gives("c", expression="tasks['x'].outputs.parameters['digest']", default="c-spare"),
        ]
        with DAG(name="inner", outputs=outputs):
            Task(name="x", template=program, arguments={"n": "1"}, when=f"{end} == ran")
        with DAG(name="none", outputs=[gives("a", parameter=where)]):
            Task(name="x", template=program, arguments={"n": "1"}, when=f"{end} == ran")
        with DAG(name="main", fail_fast=False):
            Task(name="good", template="inner")
            Task(name="bad", template="none")
    state = bench.run(workflow)
    ran = {"a": "1!", "b": "1!", "c": "1!"}
    assert state.node("good").outputs == (ran if end == "ran" else {"a": "spare", "b": "fallback", "c": "c-spare"})
    assert state.node("bad").phase == ("Succeeded" if end == "ran" else "Error")
    if end == "skipped":
        assert (state.phase, state.culprit) == ("Error", "bad")


def steps(bench: Bench, first: str, **how: Any) -> RunState:
    with bench.workflow() as workflow:
        program = say(bench)
        with Steps(name="main", outputs=[gives("last", parameter="{{steps.two.outputs.parameters.digest}}")]) as group:
            with group.parallel():
                Step(name="one", template=program, arguments={"n": first}, **how)
                Step(name="beside", template=program, with_items=["x", "y"], arguments={"n": "{{item}}"})
            Step(
                name="two",
                template=program,
                arguments={"n": "{{steps.one.status}} {{steps.beside.outputs.parameters.digest}}"},
            )
            Step(name="three", template=program, arguments={"n": "3"}, when="{{steps.one.exitCode}} == 0")
    return bench.run(workflow)


def test_steps_run_group_by_group(bench: Bench) -> None:
    state = steps(bench, "1")
    assert state.phase == "Succeeded"
    assert set(bench.lines("order")[:3]) == {"1", "x", "y"}
    assert bench.lines("order")[3:] == ['Succeeded ["x!","y!"]', "3"]


def test_a_failed_step_ends_the_steps_after_its_group_unless_it_may_fail(bench: Bench) -> None:
    state = steps(bench, "bad")
    assert (state.phase, state.culprit) == ("Failed", "one")
    assert sorted(bench.lines("order")) == ["bad", "x", "y"]
    assert (state.node("two").phase, state.node("three").phase) == ("Omitted", "Omitted")
    state = steps(bench, "bad", continue_on=models.ContinueOn(failed=True))
    assert state.phase == "Succeeded"
    assert (state.node("two").phase, state.node("three").phase) == ("Succeeded", "Skipped")


def hooked(bench: Bench, n: str, hook: str = "sys.exit(0)", **settings: Any) -> RunState:
    """``work`` has an exit hook, ``next`` depends on it, whatever happens."""
    with bench.workflow() as workflow:
        program = say(bench)
        report = bench.program("report", "add('order', sys.argv[1]); " + hook, inputs=["n"])
        report.args += ["{{inputs.parameters.n}}"]
        end = {
            "template": "report",
            "arguments": {"parameters": [{"name": "n", "value": "hook {{tasks.work.status}}"}]},
            **settings,
        }
        with DAG(name="main", fail_fast=False):
            work = Task(name="work", template=program, arguments={"n": n}, hooks={"exit": models.LifecycleHook(**end)})
            work.hooks = {"exit": models.LifecycleHook(**end)}
            Task(name="next", template=program, arguments={"n": "next"}, depends="work.Succeeded || work.Failed")
    return bench.run(workflow)


def test_an_exit_hook_runs_before_what_depends_on_its_task(bench: Bench) -> None:
    """Its own failure is not the task's (workflow/controller/exit_handler.go, assessDAGPhase)."""
    state = hooked(bench, "1", "time.sleep(0.1); sys.exit(4)")
    assert bench.lines("order") == ["1", "hook Succeeded", "next"]
    assert phases(state) == {"work": "Succeeded", "work.onExit": "Failed", "next": "Succeeded"}
    assert state.phase == "Succeeded"


def test_an_exit_hook_runs_after_a_failure_too_and_can_be_conditional(bench: Bench) -> None:
    failed = {"expression": "tasks['work'].status == 'Failed' && tasks.work.exitCode != '0'"}
    hooked(bench, "bad", **failed)
    hooked(bench, "1", **failed)
    assert bench.lines("order") == ["bad", "hook Failed", "next", "1", "next"]


def test_a_hook_can_be_a_dag_and_use_its_tasks_outputs(bench: Bench) -> None:
    with bench.workflow(on_exit="both") as workflow:
        program = say(bench)
        with DAG(name="both", inputs=[Parameter(name="n", default="default")]):
            Task(name="x", template=program, arguments={"n": "x-{{inputs.parameters.n}}"})
        end = models.LifecycleHook(
            template="both",
            arguments=models.Arguments(
                parameters=[models.Parameter(name="n", value="{{tasks.work.outputs.parameters.digest}}")]
            ),
        )
        with DAG(name="main"):
            Task(name="work", template=program, arguments={"n": "1"}, hooks={"exit": end})
    state = bench.run(workflow)
    assert bench.lines("order") == ["1", "x-1!", "x-default"]
    assert [node.name for node in state.nodes] == ["work", "work.onExit", "work.onExit.x", "onExit", "onExit.x"]


def test_the_exit_handler_is_told_what_failed(bench: Bench) -> None:
    """JSON within a quoted text, ``null`` if nothing failed (workflow/controller/operator.go, failedNodeStatus)."""
    for n, expected in (("1", None), ("bad", ["bad", "many(1:bad)", "many"])):
        with bench.workflow(on_exit="report") as workflow:
            bench.program("report", f"write('failures-{n}', sys.argv[1])", arguments=["{{workflow.failures}}"])
            program = say(bench)
            with DAG(name="main", fail_fast=False):
                Task(name=n, template=program, arguments={"n": n})
                Task(name="many", template=program, with_items=["a", n], arguments={"n": "{{item}}"})
        bench.run(workflow)
        failures = json.loads(json.loads(bench.lines(f"failures-{n}")[0]))
        if expected is None:
            assert failures is None
        else:
            assert {each["displayName"] for each in failures} == set(expected)
            assert {each["templateName"] for each in failures} == {"say"}
            assert {each["phase"] for each in failures} == {"Failed"}
            assert failures[0].keys() == {"displayName", "message", "templateName", "phase", "podName", "finishedAt"}


def test_parallelism_of_an_inner_dag_counts_its_own_tasks_only(bench: Bench) -> None:
    """checkParallelism: the children of one node of the template, not those of another."""
    alone = """
os.close(os.open(os.path.join(store, sys.argv[1]), os.O_CREAT | os.O_EXCL))  # fails if another one is inside
write(sys.argv[1] + "-came"); wait_for("a-came", "b-came")
os.unlink(os.path.join(store, sys.argv[1]))
"""
    with bench.workflow() as workflow:
        program = bench.program("say", alone, inputs=["n"], arguments=["{{inputs.parameters.n}}"])
        with DAG(name="inner", inputs=[Parameter(name="n")], parallelism=1):
            Task(name="many", template=program, with_items=[1, 2, 3], arguments={"n": "{{inputs.parameters.n}}"})
        with DAG(name="main"):
            for n in ("a", "b"):
                Task(name=n, template="inner", arguments={"n": n})
    assert bench.run(workflow).phase == "Succeeded"
