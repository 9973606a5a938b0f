"""DAGs within DAGs: what they take, what they give, how they fail, and what is remembered of them."""

from __future__ import annotations

from typing import Any

from hera.workflows import Parameter, Task, WorkflowTemplate, models

from pipeline.runs.state import RunState
from tests.pipeline.local.local_bench import Bench, dag

SAY = "add('order', sys.argv[1]); output('digest', sys.argv[1] + '!'); sys.exit('bad' in sys.argv[1])"


def say(bench: Bench) -> Any:
    return bench.program("say", SAY, inputs=["n"], arguments=["{{inputs.parameters.n}}"], outputs=["digest"])


def gives(name: str, reference: str) -> Parameter:
    return Parameter(name=name, value_from=models.ValueFrom(parameter=f"{{{{{reference}}}}}"))


def nested(bench: Bench, n: str) -> RunState:
    """main: before → an inner dag (with one more level) beside a task → after."""
    with bench.workflow() as workflow:
        program = say(bench)
        with dag(name="deep", inputs=[Parameter(name="n")], outputs=[gives("d", "tasks.x.outputs.parameters.digest")]):
            Task(name="x", template=program, arguments={"n": "deep-{{inputs.parameters.n}}"})
        outputs = [
            gives("left", "tasks.left.outputs.parameters.digest"),
            gives("deep", "tasks.deep.outputs.parameters.d"),
        ]
        with dag(name="pair", inputs=[Parameter(name="n")], outputs=outputs):
            left = Task(name="left", template=program, arguments={"n": "{{inputs.parameters.n}}"})
            left >> Task(name="deep", template="deep", arguments={"n": "{{tasks.left.outputs.parameters.digest}}"})
        with dag(name="main"):
            before = Task(name="before", template=program, arguments={"n": "0"})
            inner = Task(name="inner", template="pair", arguments={"n": n})
            other = Task(name="other", template=program, arguments={"n": "other"})
            given = " ".join(f"{{{{tasks.inner.outputs.parameters.{x}}}}}" for x in ("left", "deep"))
            before >> [inner, other] >> Task(name="after", template=program, arguments={"n": given})
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
    assert bench.lines("order")[-1] == "1! deep-1!!"
    assert state.node("inner").outputs == {"left": "1!", "deep": "deep-1!!"}


def test_a_failure_deep_inside_is_named_and_fails_what_holds_it(bench: Bench) -> None:
    state = nested(bench, "bad")
    assert (state.phase, state.culprit) == ("Failed", "inner.left")
    assert state.node("inner").message == "inner.left: exit code 1"
    assert (state.node("inner.deep").phase, state.node("after").phase) == ("Omitted", "Omitted")
    assert state.node("inner").outputs == {}


def test_a_dag_whose_output_has_no_value_is_an_error(bench: Bench) -> None:
    with bench.workflow() as workflow:
        program = say(bench)
        with dag(name="inner", outputs=[gives("a", "tasks.x.outputs.parameters.digest")]):
            Task(name="x", template=program, arguments={"n": "1"}, when="1 == 2")
        with dag(name="main"):
            Task(name="inner", template="inner")
    state = bench.run(workflow)
    assert (state.phase, state.culprit) == ("Error", "inner")
    assert state.node("inner").message == "{{tasks.x.outputs.parameters.digest}} has no value: x is Skipped"


def remembered(bench: Bench, n: str) -> WorkflowTemplate:
    """A memoized dag that holds one task, and one after it that takes its output."""
    memoize = models.Memoize(
        key="{{inputs.parameters.n}}",
        max_age="24h",
        cache=models.Cache(config_map=models.LocalObjectReference(name="commits")),
    )
    with bench.workflow() as workflow:
        program = say(bench)
        outputs = [gives("d", "tasks.x.outputs.parameters.digest")]
        with dag(name="inner", inputs=[Parameter(name="n")], outputs=outputs) as inner:
            Task(name="x", template=program, arguments={"n": "{{inputs.parameters.n}}"})
        inner.memoize = memoize
        with dag(name="main"):
            first = Task(name="inner", template="inner", arguments={"n": n})
            given = {"n": "{{tasks.inner.outputs.parameters.d}}"}
            first >> Task(name="after", template=program, arguments=given)
    return workflow


def test_a_memoized_dag_is_run_once_and_what_follows_it_runs_each_time(bench: Bench) -> None:
    first, second = (bench.run(remembered(bench, "1")) for _ in range(2))
    assert [state.phase for state in (first, second)] == ["Succeeded", "Succeeded"]
    assert [state.node("inner").cached for state in (first, second)] == [False, True]
    assert second.node("inner").outputs == {"d": "1!"}
    assert [node.name for node in second.nodes] == ["inner", "after"]
    assert bench.lines("order") == ["1", "1!", "1!"]


def test_a_dag_that_failed_is_not_remembered(bench: Bench) -> None:
    assert [bench.run(remembered(bench, "bad")).phase for _ in range(2)] == ["Failed", "Failed"]
    assert bench.lines("order") == ["bad", "bad"]
