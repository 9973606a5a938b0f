"""DAGs run for real: order, parallelism, conditions, outputs, and what a failure does to the rest."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from hera.workflows import Env, Parameter, Resources, SecretEnv, Task

from pipeline.local.resources import MachineResources
from pipeline.runs.state import RunState
from stages.parts.base.errors import ConfigError
from tests.pipeline.local.local_bench import Bench, dag, retries

ONE_AT_A_TIME = """
busy = os.open(os.path.join(store, "busy"), os.O_CREAT | os.O_EXCL)  # fails if another task is inside
add("order", sys.argv[1])
time.sleep(0.05)
os.unlink(os.path.join(store, "busy"))
"""
MEET = """
write("here-" + sys.argv[1], os.environ.get("CUDA_VISIBLE_DEVICES"))
wait_for(*("here-" + name for name in sys.argv[2].split(",")))
"""


def phases(state: RunState) -> dict[str, str]:
    return {node.name: node.phase for node in state.nodes}


def test_a_task_starts_after_what_it_depends_on(bench: Bench) -> None:
    with bench.workflow() as workflow:
        program = bench.program("say", "add('order', sys.argv[1])", inputs=["n"], arguments=["{{inputs.parameters.n}}"])
        with dag(name="main"):
            last = Task(name="last", template=program, arguments={"n": "last"})
            left, right = (Task(name=n, template=program, arguments={"n": n}) for n in ("left", "right"))
            first = Task(name="first", template=program, arguments={"n": "first"})
            first >> [left, right] >> last
    state = bench.run(workflow)
    assert state.phase == "Succeeded"
    order = bench.lines("order")
    assert order[0] == "first"
    assert set(order[1:3]) == {"left", "right"}
    assert order[3] == "last"
    assert [node.name for node in state.nodes] == ["first", "left", "right", "last"]


def many(bench: Bench, code: str, names: tuple[str, ...], **settings: Any) -> RunState:
    """Independent tasks of one program, which gets its name and all names."""
    with bench.workflow(**settings.pop("workflow", {})) as workflow:
        program = bench.program(
            "work", code, inputs=["n"], arguments=["{{inputs.parameters.n}}", ",".join(names)], **settings
        )
        with dag(name="main"):
            for name in names:
                Task(name=name, template=program, arguments={"n": name})
    return bench.run(workflow)


def test_tasks_that_fit_run_side_by_side(bench: Bench) -> None:
    bench.capacity = MachineResources(cores=2, memory_bytes=4 << 30)
    state = many(bench, MEET, ("a", "b"), resources=Resources(cpu_request=1, memory_request="2Gi"))
    assert phases(state) == {"a": "Succeeded", "b": "Succeeded"}


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        (Resources(cpu_request="1500m"), "waiting for 1.5 of 2 cores"),
        (Resources(memory_request="3Gi"), "waiting for 3.0 of 4.0 GiB of memory"),
        (Resources(cpu_request=64, memory_request="1Ti"), "waiting for 2 of 2 cores"),
        (Resources(gpus=1), "waiting for 1 of 1 GPUs"),
    ],
)
def test_a_task_that_does_not_fit_waits_and_says_for_what(bench: Bench, resources: Resources, reason: str) -> None:
    bench.capacity = MachineResources(cores=2, memory_bytes=4 << 30, gpus=("0",))
    state = many(bench, ONE_AT_A_TIME, ("a", "b", "c"), resources=resources)
    assert state.phase == "Succeeded"
    assert bench.lines("order") == ["a", "b", "c"]
    assert reason in bench.progress.getvalue()


def test_tasks_that_ask_for_nothing_are_not_held_back(bench: Bench) -> None:
    bench.capacity = MachineResources(cores=1, memory_bytes=1 << 30)
    assert many(bench, MEET, ("a", "b", "c", "d")).phase == "Succeeded"


def test_each_gpu_task_sees_its_own_gpus_and_others_see_none(bench: Bench) -> None:
    bench.capacity = MachineResources(cores=4, memory_bytes=8 << 30, gpus=("0", "1", "5"))
    with bench.workflow() as workflow:
        ask = [
            bench.program(f"gpus-{n}", MEET, arguments=[str(n), "0,1,2"], resources=Resources(gpus=n or None))
            for n in (0, 1, 2)
        ]
        with dag(name="main"):
            for each in ask:
                Task(name=each.name, template=each)
    assert bench.run(workflow).phase == "Succeeded"
    seen = {n: bench.lines(f"here-{n}") for n in (0, 1, 2)}
    assert seen[0] == []
    assert sorted(",".join([*seen[1], *seen[2]]).split(",")) == ["0", "1", "5"]


def test_threads_follow_the_cores_unless_the_template_says_otherwise(bench: Bench) -> None:
    say = "write(sys.argv[1], os.environ.get('OMP_NUM_THREADS', 'unset'))"
    asks = {"half": "500m", "three": "3", "all": "64"}
    with bench.workflow() as workflow:
        made = [
            bench.program(name, say, arguments=[name], resources=Resources(cpu_request=cpu))
            for name, cpu in asks.items()
        ]
        own = [Env(name="OMP_NUM_THREADS", value="7")]
        made.append(bench.program("own", say, arguments=["own"], resources=Resources(cpu_request=2), env=own))
        made.append(bench.program("none", say, arguments=["none"]))
        with dag(name="main"):
            for each in made:
                Task(name=each.name, template=each)
    assert bench.run(workflow, environment={"PATH": "/usr/bin:/bin"}).phase == "Succeeded"
    got = {name: bench.lines(name)[0] for name in (*asks, "own", "none")}
    assert got == {"half": "1", "three": "3", "all": "4", "own": "7", "none": "unset"}


SUCCEED, FAIL, SKIP, BREAK, LEAVE_OUT = "succeed", "fail", "skip", "break", "leave-out"
ENDS = {SUCCEED: "Succeeded", FAIL: "Failed", SKIP: "Skipped", BREAK: "Error", LEAVE_OUT: "Omitted"}


def one_after(bench: Bench, end: str, **how: Any) -> RunState:
    """Task ``a`` ends as told; task ``b`` follows on a condition."""
    with bench.workflow() as workflow:
        good = bench.program("good")
        bad = bench.program("bad", "sys.exit('error: told to')")
        broken = bench.program("broken", outputs=["promised"])
        template = {FAIL: bad, BREAK: broken}.get(end, good)
        with dag(name="main"):
            if end == LEAVE_OUT:
                Task(name="before", template=bad)
            Task(
                name="a",
                template=template,
                when="1 == 2" if end == SKIP else None,
                depends="before" if end == LEAVE_OUT else None,
            )
            Task(name="b", template=good, **how)
    return bench.run(workflow)


@pytest.mark.parametrize(
    ("depends", "runs_after"),
    [
        ("a", {SUCCEED, SKIP}),
        ("a.Succeeded", {SUCCEED}),
        ("a.Failed", {FAIL}),
        ("a.Errored", {BREAK}),
        ("a.Skipped", {SKIP}),
        ("a.Omitted", {LEAVE_OUT}),
        ("a.Failed || a.Errored", {FAIL, BREAK}),
        ("(a.Failed || a.Errored) && (a.Failed || a.Skipped)", {FAIL}),
    ],
)
@pytest.mark.parametrize("end", list(ENDS))
def test_depends_decides_by_how_a_task_ended(bench: Bench, depends: str, runs_after: set[str], end: str) -> None:
    state = one_after(bench, end, depends=depends)
    assert state.node("a").phase == ENDS[end]
    assert state.node("b").phase == ("Succeeded" if end in runs_after else "Omitted")


def test_a_skipped_task_says_why(bench: Bench) -> None:
    with bench.workflow(arguments=[Parameter(name="serve", value="true")]) as workflow:
        good = bench.program("good", "write('ran')")
        with dag(name="main"):
            Task(name="serve", template=good, when="{{workflow.parameters.serve}} == true")
    state = bench.run(workflow, {"serve": "false"})
    assert (state.phase, state.node("serve").phase) == ("Succeeded", "Skipped")
    assert state.node("serve").message == "when 'false == true' is false"
    assert not (bench.store / "ran").exists()
    assert bench.run(workflow).node("serve").phase == "Succeeded"


def test_an_omitted_task_says_which_tasks_kept_it_from_starting(bench: Bench) -> None:
    assert one_after(bench, FAIL, depends="a.Succeeded").node("b").message == "not started, because a failed"
    assert one_after(bench, SUCCEED, depends="a.Failed").node("b").message == "not started, because a succeeded"


def test_after_a_failure_other_branches_go_on(bench: Bench) -> None:
    with bench.workflow() as workflow:
        bad = bench.program("bad", "wait_for('right-runs'); fail(1, 'told to')")
        slow = bench.program("slow", f"write('right-runs'){bench.until_failed('left')}")
        good = bench.program("good", "write('right-went-on')")
        with dag(name="main"):
            Task(name="left", template=bad)
            Task(name="right", template=slow) >> Task(name="right-2", template=good)
    state = bench.run(workflow)
    assert phases(state) == {"left": "Failed", "right": "Succeeded", "right-2": "Succeeded"}
    assert (state.phase, state.culprit, state.message) == ("Failed", "left", "left: told to")


@pytest.mark.parametrize("failing", [[], ["evaluate-awq"], ["optimize-awq"], ["evaluate-fp16"], ["optimize-fp16"]])
def test_a_failure_that_depends_tolerates_does_not_fail_the_run(bench: Bench, failing: list[str]) -> None:
    with bench.workflow() as workflow:
        program = bench.program(
            "work",
            f"sys.exit(7) if sys.argv[1] in {failing} else None",
            inputs=["n"],
            arguments=["{{inputs.parameters.n}}"],
        )
        awq = " || ".join(f"evaluate-awq.{result}" for result in ("Succeeded", "Failed", "Errored", "Omitted"))
        edges = {
            "optimize-fp16": None,
            "optimize-awq": None,
            "evaluate-fp16": "optimize-fp16",
            "evaluate-awq": "optimize-awq",
            "select": f"({awq}) && evaluate-fp16.Succeeded",
        }
        with dag(name="main"):
            for name, depends in edges.items():
                Task(name=name, template=program, depends=depends, arguments={"n": name})
    state = bench.run(workflow)
    required = [name for name in failing if name.endswith("fp16")]
    assert state.phase == ("Failed" if required else "Succeeded")
    assert state.culprit == (required[0] if required else None)
    assert state.node("select").phase == ("Omitted" if required else "Succeeded")


def test_outputs_reach_the_tasks_that_name_them(bench: Bench) -> None:
    with bench.workflow() as workflow:
        make = bench.program("make", "output('digest', 'sha256:1 2\\n')", outputs=["digest"])
        use = bench.program("use", "write('got', repr(sys.argv[1:]))", inputs=["digest"])
        use.args += ["{{inputs.parameters.digest}}"]
        with dag(name="main"):
            a = Task(name="make-it", template=make)
            b = Task(name="between", template=make)
            c = Task(
                name="use-it",
                template=use,
                arguments={"digest": a.get_parameter("digest")},
                when="'{{tasks.make-it.outputs.parameters.digest}}' != ''",
            )
            a >> b >> c
    state = bench.run(workflow)
    assert bench.lines("got") == [repr(["sha256:1 2"])]
    assert state.node("make-it").outputs == {"digest": "sha256:1 2"}


def test_an_output_that_was_promised_and_not_written_is_an_error(bench: Bench) -> None:
    state = one_after(bench, BREAK)
    assert (state.phase, state.culprit) == ("Error", "a")
    assert "it succeeded, but wrote no output 'promised'" in state.node("a").message


def test_a_task_that_needs_the_output_of_a_skipped_task_is_an_error(bench: Bench) -> None:
    with bench.workflow() as workflow:
        make = bench.program("make", outputs=["digest"])
        use = bench.program("use", inputs=["digest"], arguments=["{{inputs.parameters.digest}}"])
        with dag(name="main"):
            a = Task(name="a", template=make, when="1 == 2")
            b = Task(name="b", template=use, arguments={"digest": "{{tasks.a.outputs.parameters.digest}}"})
            a >> b
    state = bench.run(workflow)
    assert (state.phase, state.node("b").phase) == ("Error", "Error")
    assert state.node("b").message == "{{tasks.a.outputs.parameters.digest}} has no value: a is Skipped"


def test_paths_on_volumes_become_local_folders_and_each_attempt_has_fresh_ones(bench: Bench) -> None:
    code = """
add("seen", os.listdir(outputs))
output("x", "1")
add("paths", os.environ["INSIDE"] + " " + os.environ["OUTSIDE"] + " " + outputs)
sys.exit(75 if len(open(os.path.join(store, "seen")).readlines()) == 1 else 0)
"""
    env = [Env(name="INSIDE", value="/mnt/store/a/b"), Env(name="OUTSIDE", value="/mnt/store-2")]
    with bench.workflow() as workflow:
        program = bench.program("say", code, env=env, retry_strategy=retries(limit=1))
        with dag(name="main"):
            Task(name="say", template=program)
    assert bench.run(workflow).phase == "Succeeded"
    assert bench.lines("seen") == ["[]", "[]"]
    paths = [line.split() for line in bench.lines("paths")]
    assert [path[:2] for path in paths] == [[f"{bench.store}/a/b", "/mnt/store-2"]] * 2
    assert paths[0][2] != paths[1][2]
    assert not list((bench.run_dir / "scratch").iterdir())


def test_a_task_finds_our_programs_whatever_lies_in_the_working_directory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.folder / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(bench.folder)
    with bench.workflow() as workflow:
        program = bench.program("say")
        program.command, program.args = (
            ["python"],
            ["-c", "import json, stages.parts.base.errors, os; print(os.getcwd())"],
        )
        with dag(name="main"):
            Task(name="say", template=program)
    assert bench.run(workflow).phase == "Succeeded"
    assert (bench.run_dir / "logs" / "say.log").read_text().strip() == str(bench.folder)


def test_a_command_that_does_not_exist_says_so(bench: Bench) -> None:
    with bench.workflow() as workflow:
        program = bench.program("say")
        program.command = ["no-such-program"]
        with dag(name="main"):
            Task(name="say", template=program)
    node = bench.run(workflow).node("say")
    assert (node.phase, node.exit_code) == ("Failed", 127)
    assert node.message == "exit code 127: error: cannot start no-such-program: No such file or directory"


def secret_workflow(bench: Bench, *, optional: bool) -> dict[str, object]:
    say = "import hashlib; write(sys.argv[1], hashlib.sha256(os.environ.get('HF_TOKEN', '').encode()).hexdigest())"
    with bench.workflow() as workflow:
        token = SecretEnv(name="HF_TOKEN", secret_name="hub", secret_key="token", optional=optional)
        with_it = bench.program("with-token", say, arguments=["with"], env=[token])
        without = bench.program("without", say, arguments=["without"])
        with dag(name="main"):
            Task(name="with-token", template=with_it)
            Task(name="without", template=without)
    made: dict[str, object] = workflow.to_dict()
    return made


def test_a_secret_reaches_only_the_task_that_names_it_and_no_file(bench: Bench) -> None:
    secret = "hf_not-for-any-file"
    made = secret_workflow(bench, optional=True)
    assert bench.run(made, environment={"HF_TOKEN": secret, "PATH": "/usr/bin:/bin"}).phase == "Succeeded"
    assert bench.lines("with") == [sha256(secret.encode()).hexdigest()]
    assert bench.lines("without") == [sha256(b"").hexdigest()]
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in bench.progress.getvalue()


def test_a_missing_secret_is_an_error_unless_it_is_optional(bench: Bench) -> None:
    assert bench.run(secret_workflow(bench, optional=True), environment={}).phase == "Succeeded"
    with pytest.raises(ConfigError, match="with-token needs a secret: set the environment variable HF_TOKEN"):
        bench.run(secret_workflow(bench, optional=False), environment={})


def test_the_executed_workflow_is_kept(bench: Bench) -> None:
    with bench.workflow(arguments=[Parameter(name="model", value="a")]) as workflow:
        program = bench.program("say")
        with dag(name="main"):
            Task(name="say", template=program)
    bench.run(workflow, {"model": "org/x"})
    kept = json.loads((bench.run_dir / "workflow.json").read_text())
    assert kept == {"name": "run-1", "arguments": {"model": "org/x"}, "manifest": workflow.to_dict()}
