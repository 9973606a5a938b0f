"""withParam: names, values, conditions and results of a task that is run once for each item of a list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hera.workflows import Parameter, Task

from pipeline.local import names
from pipeline.local.runs import Run, read_logs
from pipeline.runs.state import RunState
from tests.pipeline.local.local_bench import Bench, dag

SAY = "print('said', sys.argv[1]); add('got', sys.argv[1]); sys.exit(3) if 'bad' in sys.argv[1] else None"


def phases(state: RunState) -> dict[str, str]:
    return {node.name: node.phase for node in state.nodes}


def fanned(bench: Bench, items: Any, depends: str | None = None, **how: Any) -> RunState:
    """Task ``many`` is fanned out over a parameter; ``after`` depends on it."""
    with bench.workflow(arguments=[Parameter(name="list")]) as workflow:
        say = bench.program("say", SAY, inputs=["n"], arguments=["{{inputs.parameters.n}}"])
        good = bench.program("good")
        with dag(name="main"):
            how = {"arguments": {"n": "{{item}}"}, "with_param": "{{workflow.parameters.list}}", **how}
            Task(name="many", template=say, **how)
            if depends is not None:
                Task(name="after", template=good, depends=depends)
    return bench.run(workflow, {"list": items if isinstance(items, str) else json.dumps(items)})


def test_each_item_is_a_task_of_its_own(bench: Bench) -> None:
    state = fanned(bench, ["one", "a/b", 3, True], "many")
    assert phases(state) == {
        "many": "Succeeded",
        "many(0:one)": "Succeeded",
        "many(1:a/b)": "Succeeded",
        "many(2:3)": "Succeeded",
        "many(3:true)": "Succeeded",
        "after": "Succeeded",
    }
    assert [node.parent for node in state.nodes] == ["", "many", "many", "many", "many", ""]
    assert sorted(bench.lines("got")) == ["3", "a/b", "one", "true"]
    run = Run(bench.run_dir, state)
    assert list(read_logs(run, "many(1:a/b)", follow=False)) == ["said a/b\n"]
    assert "many(2:3): said 3\n" in list(read_logs(run, None, follow=False))


def test_the_values_of_a_map_have_names_and_its_node_shows_them(bench: Bench) -> None:
    items = [{"variant": "awq", "bits": 4}, {"variant": "gptq", "bits": 8}]
    state = fanned(bench, items, arguments={"n": "{{item.variant}}-{{item.bits}} {{item}}"})
    assert [node.name for node in state.nodes][1:] == ["many(0:bits:4,variant:awq)", "many(1:bits:8,variant:gptq)"]
    assert sorted(bench.lines("got")) == [
        'awq-4 {"bits":4,"variant":"awq"}',
        'gptq-8 {"bits":8,"variant":"gptq"}',
    ]


def test_a_nested_dag_is_run_for_each_item_of_a_list_that_a_task_made(bench: Bench) -> None:
    with bench.workflow() as workflow:
        make = bench.program("make", """output('list', '["p", "q"]')""", outputs=["list"])
        say = bench.program("say", SAY, inputs=["n"], arguments=["{{inputs.parameters.n}}"])
        with dag(name="each", inputs=[Parameter(name="n")]):
            one = Task(name="one", template=say, arguments={"n": "1{{inputs.parameters.n}}"})
            one >> Task(name="two", template=say, arguments={"n": "2{{inputs.parameters.n}}"})
        with dag(name="main"):
            first = Task(name="make", template=make)
            first >> Task(
                name="many", template="each", with_param=first.get_parameter("list"), arguments={"n": "{{item}}"}
            )
    state = bench.run(workflow)
    assert state.phase == "Succeeded"
    assert sorted(bench.lines("got")) == ["1p", "1q", "2p", "2q"]
    assert [node.name for node in state.nodes][2:5] == ["many(0:p)", "many(0:p).one", "many(0:p).two"]


def test_a_condition_is_asked_for_each_item(bench: Bench) -> None:
    """A group whose items were all skipped has succeeded (argo-workflows issue 3378)."""
    state = fanned(bench, ["p", "q"], "many.Succeeded", when="{{item}} == q")
    assert phases(state) == {
        "many": "Succeeded",
        "many(0:p)": "Skipped",
        "many(1:q)": "Succeeded",
        "after": "Succeeded",
    }
    assert bench.lines("got") == ["q"]


@pytest.mark.parametrize(("depends", "phase"), [("many.Failed", "Succeeded"), ("many", "Omitted")])
def test_a_failed_item_fails_its_group_and_is_named(bench: Bench, depends: str, phase: str) -> None:
    state = fanned(bench, ["a", "bad", "b"], depends)
    assert state.node("many").phase == "Failed"
    assert state.node("many").message == "1 of 3 failed: many(1:bad): exit code 3: said bad"
    assert state.node("after").phase == phase
    assert sorted(bench.lines("got")) == ["a", "b", "bad"]
    if phase == "Omitted":
        assert (state.phase, state.culprit) == ("Failed", "many(1:bad)")
        assert state.message == "many(1:bad): exit code 3: said bad"
    else:
        assert state.phase == "Succeeded"


def test_a_task_without_items_is_skipped(bench: Bench) -> None:
    state = fanned(bench, [], "many.Skipped")
    assert (state.node("many").phase, state.node("many").message) == ("Skipped", "there are no items")
    assert state.node("after").phase == "Succeeded"


@pytest.mark.parametrize("text", ["nonsense", '{"a": 1}'])
def test_a_value_that_is_not_a_list_is_an_error(bench: Bench, text: str) -> None:
    state = fanned(bench, text)
    assert (state.phase, state.message) == ("Error", f"many: withParam is not a JSON list: {text}")


def test_a_key_that_an_item_lacks_is_an_error(bench: Bench) -> None:
    state = fanned(bench, [{"a": 1}], arguments={"n": "{{item.b}}"})
    assert state.message == "many(0:a:1): {{item.b}} has no value: the item has no such key"


def test_log_files_have_safe_names_that_differ() -> None:
    nodes = [
        "evaluate-awq",
        "a(0:b/c)",
        "a(0:b%2Fc)",
        "a(1:" + "x" * 500 + ")",
        "a(1:" + "x" * 501 + ")",
        "a(2:../../e)",
    ]
    files = [names.log_file(node) for node in nodes]
    assert len(set(files)) == len(files)
    assert files[0] == "evaluate-awq.log"
    assert all("/" not in file and len(file.encode()) < 200 for file in files)
