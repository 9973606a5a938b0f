"""Whether a finished DAG failed: Argo's rule, restated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.runs.graph import Graph
from pipeline.runs.state import FINISHED, Phase

DID_NOT_RUN = {"Skipped", "Omitted"}


@st.composite
def finished(draw: st.DrawFn) -> tuple[dict[str, set[str]], dict[str, Phase]]:
    """The parents of each task, and how it ended."""
    count = draw(st.integers(1, 8))
    names = [f"t{n}" for n in range(count)]
    parents = {name: draw(st.sets(st.sampled_from(names[:n]))) if n else set() for n, name in enumerate(names)}
    return parents, {name: draw(st.sampled_from(sorted(FINISHED))) for name in names}


@given(finished())
def test_a_dag_fails_if_a_failure_reaches_a_leaf_through_tasks_that_did_not_run(
    given_dag: tuple[dict[str, set[str]], dict[str, Phase]],
) -> None:
    """workflow/controller/dag.go, assessDAGPhase: an omitted task inherits its parents' phase, failures first."""
    parents, phases = given_dag

    def reached(name: str) -> set[str]:
        if phases[name] not in DID_NOT_RUN:
            return {name} if phases[name] in ("Failed", "Error") else set()
        return {found for parent in parents[name] for found in reached(parent)}

    leaves = parents.keys() - {parent for each in parents.values() for parent in each}
    expected = {found for leaf in leaves for found in reached(leaf)}
    culprit = Graph.of({name: " && ".join(sorted(parents[name])) for name in parents}).culprit(phases)
    assert (culprit in expected) if expected else culprit is None


def test_a_task_that_is_not_started_names_the_tasks_that_keep_it() -> None:
    depends = "check && fp16 && (awq.Succeeded || awq.Failed || gptq.Succeeded)"
    graph = Graph.of({"check": "", "fp16": "", "awq": "", "gptq": "", "evaluate": depends})
    phases: dict[str, Phase] = {"check": "Succeeded", "fp16": "Failed", "awq": "Failed", "gptq": "Skipped"}
    assert graph.why_not("evaluate", phases) == "not started, because fp16 failed"
    phases |= {"fp16": "Succeeded", "awq": "Omitted"}
    assert graph.why_not("evaluate", phases) == "not started, because awq was not started and gptq was skipped"
