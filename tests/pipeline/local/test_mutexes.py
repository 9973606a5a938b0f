"""Mutexes between tasks, and between engines in different processes."""

from __future__ import annotations

from hera.workflows import Parameter, Task, WorkflowTemplate, models

from tests.pipeline.local.local_bench import Bench, dag, eventually

ALONE = """
try:
    os.close(os.open(os.path.join(store, "inside"), os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit("error: somebody else is inside")
add("order", sys.argv[1])
time.sleep(0.1)
os.unlink(os.path.join(store, "inside"))
"""


def mutexes(*names: str) -> models.Synchronization:
    return models.Synchronization(mutexes=[models.Mutex(name=name) for name in names])


def test_tasks_with_one_mutex_run_one_after_the_other_and_say_what_they_wait_for(bench: Bench) -> None:
    with bench.workflow() as workflow:
        program = bench.program(
            "evaluate",
            ALONE,
            inputs=["n"],
            arguments=["{{inputs.parameters.n}}"],
            synchronization=mutexes("gpu", "port"),
        )
        with dag(name="main"):
            for name in ("a", "b", "c"):
                Task(name=name, template=program, arguments={"n": name})
    assert bench.run(workflow).phase == "Succeeded"
    assert sorted(bench.lines("order")) == ["a", "b", "c"]
    assert "waiting for mutex gpu" in bench.progress.getvalue()


def test_a_mutexs_name_can_depend_on_inputs(bench: Bench) -> None:
    meet = "write('here-' + sys.argv[1]); wait_for('here-a', 'here-b')"
    with bench.workflow() as workflow:
        program = bench.program(
            "evaluate",
            meet,
            inputs=["n"],
            arguments=["{{inputs.parameters.n}}"],
            synchronization=mutexes("{{inputs.parameters.n}}/x"),
        )
        with dag(name="main"):
            for name in ("a", "b"):
                Task(name=name, template=program, arguments={"n": name})
    assert bench.run(workflow).phase == "Succeeded"


def locked(bench: Bench, *, of_workflow: bool) -> WorkflowTemplate:
    mutex = mutexes("model-{{workflow.parameters.model}}")
    with bench.workflow(
        synchronization=mutex if of_workflow else None, arguments=[Parameter(name="model", value="org/x")]
    ) as workflow:
        program = bench.program("work", ALONE, arguments=["x"], synchronization=None if of_workflow else mutex)
        with dag(name="main"):
            Task(name="a", template=program) >> Task(name="b", template=program)
    return workflow


def test_two_engines_do_not_run_tasks_of_one_mutex_at_once(bench: Bench) -> None:
    workflow = locked(bench, of_workflow=False)
    engines = [bench.start(workflow) for _ in range(2)]
    said = [engine.communicate()[1] for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0], said
    assert len(bench.lines("order")) == 4


def test_two_runs_with_one_workflow_mutex_follow_each_other(bench: Bench) -> None:
    hold = "add('order', 'first'); write('first-runs'); wait_for('go-on'); add('order', 'first')"
    mutex = mutexes("model-org/x")
    with bench.workflow(synchronization=mutex) as first:
        program = bench.program("work", hold)
        with dag(name="main"):
            Task(name="a", template=program)
    with bench.workflow(synchronization=mutex) as second:
        program = bench.program("work", "add('order', 'second')")
        with dag(name="main"):
            Task(name="a", template=program)
    holder = bench.start(first)
    eventually(lambda: (bench.store / "first-runs").exists(), "the first run holds the mutex")
    waiter = bench.start(second)
    assert waiter.stderr is not None
    assert "Pending    waiting for mutex model-org/x" in waiter.stderr.readline()
    (bench.store / "go-on").touch()
    assert [holder.wait(), waiter.wait()] == [0, 0]
    assert bench.lines("order") == ["first", "first", "second"]
    for engine in (holder, waiter):
        engine.communicate()


def test_a_killed_engine_leaves_no_mutex_behind(bench: Bench) -> None:
    with bench.workflow(synchronization=mutexes("model")) as workflow:
        program = bench.program("work", "add('starts', 1); time.sleep(60 if len(sys.argv) == 1 else 0)")
        with dag(name="main"):
            Task(name="a", template=program)
    holder = bench.start(workflow)
    eventually(lambda: bench.lines("starts"), "the first run holds the mutex")
    holder.kill()
    holder.communicate()
    program.args.append("quick")
    assert bench.run(workflow).phase == "Succeeded"
