"""withItems, withParam, withSequence: names, values, conditions and aggregated outputs as Argo documents them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hera.workflows import DAG, Parameter, Task, models
from local_bench import Bench

from pipeline.local import fanout, names
from pipeline.local.manifest import Task as OneTask
from pipeline.local.state import RunState
from pipeline.runs import Run, read_logs
from stages.parts.base.errors import ConfigError

SAY = "print('said', sys.argv[1]); output('digest', sys.argv[1]); sys.exit(3) if 'bad' in sys.argv[1] else None"


def phases(state: RunState) -> dict[str, str]:
    return {node.name: node.phase for node in state.nodes}


def fanned(bench: Bench, after: dict[str, Any] | None = None, **how: Any) -> RunState:
    """Task ``many`` is fanned out; ``after`` gets its outputs."""
    with bench.workflow(arguments=[Parameter(name="list", value='["p", "q"]')]) as workflow:
        say = bench.program("say", SAY, inputs=["n"], arguments=["{{inputs.parameters.n}}"], outputs=["digest"])
        got = bench.program("got", "write('got', sys.argv[1])", inputs=[Parameter(name="x", default="spare")])
        got.args += ["{{inputs.parameters.x}}"]
        with DAG(name="main"):
            Task(name="many", template=say, **{"arguments": {"n": "{{item}}"}, **how})
            if after is not None:
                Task(name="after", template=got, **{"depends": "many", **after})
    return bench.run(workflow)


def test_each_item_is_a_task_of_its_own_and_their_outputs_are_one_list(bench: Bench) -> None:
    """docs/walk-through/loops.md, "Accessing the aggregate results of a loop"."""
    given = {"arguments": {"x": "{{tasks.many.outputs.parameters.digest}} {{tasks.many.outputs.parameters}}"}}
    state = fanned(bench, given, with_items=["one", "a/b", 3, True])
    assert phases(state) == {
        "many": "Succeeded",
        "many(0:one)": "Succeeded",
        "many(1:a/b)": "Succeeded",
        "many(2:3)": "Succeeded",
        "many(3:true)": "Succeeded",
        "after": "Succeeded",
    }
    assert [node.parent for node in state.nodes] == ["", "many", "many", "many", "many", ""]
    values = ["one", "a/b", "3", "true"]
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(bench.lines("got")[0])
    assert first == values
    assert json.loads(bench.lines("got")[0][end:]) == [{"digest": value} for value in values]
    run = Run(bench.run_dir, state)
    assert list(read_logs(run, "many(1:a/b)", follow=False)) == ["said a/b\n"]
    assert "many(2:3): said 3\n" in list(read_logs(run, None, follow=False))


def test_the_values_of_a_map_have_names_and_its_node_shows_them(bench: Bench) -> None:
    items = [{"variant": "awq", "bits": 4}, {"variant": "gptq", "bits": 8}]
    given = {"arguments": {"x": "{{tasks.many.outputs.parameters.digest}}"}}
    state = fanned(bench, given, with_items=items, arguments={"n": "{{item.variant}}-{{item.bits}} {{item}}"})
    assert [node.name for node in state.nodes][1:3] == ["many(0:bits:4,variant:awq)", "many(1:bits:8,variant:gptq)"]
    assert json.loads(bench.lines("got")[0]) == [
        'awq-4 {"bits":4,"variant":"awq"}',
        'gptq-8 {"bits":8,"variant":"gptq"}',
    ]


def test_a_list_of_another_task_is_fanned_out_and_json_stays_json(bench: Bench) -> None:
    """Values that are all JSON lists or maps are not quoted again (aggregatedJSONValueList)."""
    with bench.workflow() as workflow:
        make = bench.program("make", "output('list', '[[1, 2], [3]]')", outputs=["list"])
        say = bench.program("say", SAY, inputs=["n"], arguments=["{{inputs.parameters.n}}"], outputs=["digest"])
        with DAG(name="main"):
            first = Task(name="make", template=make)
            many = Task(name="many", template=say, with_param=first.get_parameter("list"), arguments={"n": "{{item}}"})
            first >> many
    state = bench.run(workflow)
    assert state.node("many").outputs == {"digest": "[[1,2],[3]]"}
    assert [node.name for node in state.nodes][2:] == ["many(0:[1 2])", "many(1:[3])"]


def test_a_condition_is_asked_for_each_item_and_skipped_items_give_no_output(bench: Bench) -> None:
    """A group whose items were all skipped has succeeded (argo-workflows issue 3378)."""
    given = {"arguments": {"x": "{{tasks.many.outputs.parameters.digest}}"}, "depends": "many.AnySucceeded"}
    state = fanned(bench, given, with_param="{{workflow.parameters.list}}", when="{{item}} == q")
    assert phases(state) == {
        "many": "Succeeded",
        "many(0:p)": "Skipped",
        "many(1:q)": "Succeeded",
        "after": "Succeeded",
    }
    assert bench.lines("got") == ['["q"]']
    state = fanned(bench, {"depends": "many.AnySucceeded"}, with_items=["p"], when="1 == 2")
    assert phases(state) == {"many": "Succeeded", "many(0:p)": "Skipped", "after": "Omitted"}


@pytest.mark.parametrize(
    ("items", "depends", "phase"),
    [
        (["a", "bad"], "many.AnySucceeded", "Succeeded"),
        (["a", "bad"], "many.AllFailed", "Omitted"),
        (["bad", "bad2"], "many.AllFailed", "Succeeded"),
        (["bad", "bad2"], "many.AnySucceeded", "Omitted"),
        (["a"], "many.AllFailed || many.Failed", "Omitted"),
    ],
)
def test_depends_can_ask_for_any_or_all_items(bench: Bench, items: list[str], depends: str, phase: str) -> None:
    """docs/enhanced-depends-logic.md."""
    state = fanned(bench, {"depends": depends}, with_items=items)
    assert state.node("after").phase == phase
    assert state.node("many").phase == ("Failed" if "bad" in "".join(items) else "Succeeded")


def test_a_failed_item_fails_its_group_and_is_named(bench: Bench) -> None:
    state = fanned(bench, {}, with_items=["a", "bad", "b"])
    assert (state.phase, state.culprit) == ("Failed", "many(1:bad)")
    assert state.message == "many(1:bad): exit code 3: said bad"
    assert state.node("many").message == "1 of 3 failed: many(1:bad): exit code 3: said bad"
    assert json.loads(state.node("many").outputs["digest"]) == ["a", "b"]
    assert state.node("after").phase == "Omitted"


def test_no_items_are_a_skipped_task_whose_outputs_need_a_default(bench: Bench) -> None:
    given = {"arguments": {"x": "{{tasks.many.outputs.parameters.digest}}"}}
    state = fanned(bench, given, with_param="[]")
    assert (state.node("many").phase, state.node("many").message) == ("Skipped", "there are no items")
    assert bench.lines("got") == ["spare"]
    mixed = {"arguments": {"x": "all: {{tasks.many.outputs.parameters.digest}}"}}
    assert fanned(bench, mixed, with_param="[]").node("after").phase == "Error"  # more than the reference: no default


def test_what_is_no_list_fails_the_task_unless_it_is_skipped_anyway(bench: Bench) -> None:
    state = fanned(bench, with_param="nonsense")
    assert (state.phase, state.message) == ("Error", "many: withParam is no JSON list: nonsense")
    assert fanned(bench, with_param="nonsense", when="1 == 2").node("many").phase == "Skipped"
    state = fanned(bench, with_items=[{"a": 1}], arguments={"n": "{{item.b}}"})
    assert state.message == "many(0:a:1): {{item.b}} has no value: the item has no such key"


def test_parallelism_limits_items_and_fail_fast_stops_the_rest(bench: Bench) -> None:
    """A template's failFast counts beside parallelism (checkParallelism)."""
    with bench.workflow() as workflow:
        say = bench.program("say", "add('ran', sys.argv[1]); sys.exit(sys.argv[1] == 'bad')", inputs=["n"])
        say.args += ["{{inputs.parameters.n}}"]
        with DAG(name="main", parallelism=1, fail_fast=False):
            Task(name="many", template=say, with_items=["a", "bad", "c"], arguments={"n": "{{item}}"})
    made = workflow.to_dict()
    made["spec"]["templates"][1]["failFast"] = True
    state = bench.run(made)
    assert bench.lines("ran") == ["a", "bad"]
    assert (state.phase, state.node("many(2:c)").phase) == ("Failed", "Omitted")
    assert "waiting: as many tasks run as parallelism allows" in bench.progress.getvalue()


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ({"count": 3}, ["0", "1", "2"]),
        ({"count": "0"}, []),
        ({"start": 5, "count": 2}, ["5", "6"]),
        ({"start": "2", "end": "4"}, ["2", "3", "4"]),
        ({"start": 2, "end": 0, "format": "gpu-%02d"}, ["gpu-02", "gpu-01", "gpu-00"]),
        ({"end": "{{n}}"}, ["0", "1"]),
        ({"end": "many"}, "withSequence.end is no whole number: 'many'"),
        ({"start": 1}, "withSequence needs end or count"),
        ({"count": 1, "format": "%s%d"}, "has not one place for a number"),
    ],
)
def test_sequences_count_as_in_argo(sequence: dict[str, Any], expected: list[str] | str) -> None:
    task = OneTask.model_validate({"name": "a", "template": "b", "withSequence": sequence})
    if isinstance(expected, list):
        assert fanout.items(task, {"n": "1"}.__getitem__) == expected
    else:
        with pytest.raises(ConfigError) as caught:
            fanout.items(task, str)
        assert expected in str(caught.value)


def test_references_within_items_are_filled_in(bench: Bench) -> None:
    item = {"model": "{{workflow.parameters.list}}", "also": ["{{workflow.name}}", 1]}
    state = fanned(bench, with_items=[item], arguments={"n": "{{item}}"})
    value = json.loads(state.node("many").outputs["digest"])
    assert value == [{"model": '["p", "q"]', "also": ["run-1", 1]}]


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


def test_a_fanned_out_task_that_may_fail_does_not_fail_the_dag(bench: Bench) -> None:
    state = fanned(bench, with_items=["bad"], continue_on=models.ContinueOn(failed=True))
    assert (state.phase, state.node("many").phase) == ("Succeeded", "Failed")
