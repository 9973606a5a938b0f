from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scoring.profile import Profile
from stages.parts.base.errors import MissingRun, NoWinner
from stages.parts.base.files import write_json
from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Capacity, Evaluation
from stages.parts.records.production import RULES, Price
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.capacity import RULE
from stages.parts.samples.lines import read_samples
from stages.report.page import collect
from stages.select.selection import select
from stages.select.verify import Verification, check_evaluation, verify
from tests.adapters import acquired
from tests.samples import evaluation, measured_store, outcome, variant

RUN = "20260102-030405-6a1b"
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    store = measured_store(tmp_path, RUN)
    _, decision, _ = select(store, Profile(name="balanced"), VARIANTS, price=Price(per_hour=2.0))
    outcome(store, RUN, "select", "", "done", key=decision.key, why=decision.reason)
    collect(store, RUN, "Succeeded").write(store.run(RUN) / "report.json")
    return store


def found(store: ModelStore) -> list[str]:
    return verify(store.run(RUN)).findings


def change(path: Path, *keys: str | int, to: Any) -> None:
    """In place of the file, as an editor does it: what is linked to it elsewhere stays."""
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    write_json(path, document)


def test_a_decision_follows_from_its_samples_again_and_again(store):
    first, second = verify(store.run(RUN)), verify(store.run(RUN))
    assert first == second
    assert (first.winner, first.findings, first.not_recomputed) == ("awq", [], [])
    assert {"production_metrics.json", "optimized/awq", "evaluations/awq.samples.jsonl"} <= set(first.compared)


def test_a_changed_sample_is_named_with_every_number_that_it_moves(store):
    kept = store.run(RUN) / "measurements" / f"gptq{SAMPLES_SUFFIX}"
    kept.write_text(kept.read_text().replace('"e2el_ms":9.0', '"e2el_ms":1.0', 1))
    findings = found(store)
    assert any(
        each.startswith(f"samples were changed: runs/{RUN}/measurements/gptq.samples.jsonl") for each in findings
    )
    assert any(
        each.startswith("evaluation of gptq: load.e2el_ms.mean is 9.0, the samples give 8.6") for each in findings
    )
    assert not any("evaluation of fp16" in each for each in findings)


def test_samples_that_were_replaced_in_the_store_alone_are_found_too(store):
    samples = store.evaluation("awq").with_suffix(SAMPLES_SUFFIX)
    text = samples.read_text()
    samples.unlink()
    samples.write_text(text.replace('"correct":1.0', '"correct":0.0', 1))
    (finding,) = found(store)
    assert finding.startswith("samples were changed: evaluations/awq.samples.jsonl")


def test_a_changed_weight_is_named_by_its_file(store):
    weights = store.optimized("awq") / "model.safetensors"
    weights.write_text(weights.read_text()[::-1])
    findings = found(store)
    assert [each.partition(" was changed")[0] for each in findings] == [
        "optimized/awq/model.safetensors",
        "releases/0001-awq-"
        + json.loads((store.optimized("awq") / VARIANT).read_text())["digest"][:12]
        + "/model.safetensors",
    ]


def test_a_changed_digest_is_found(store):
    change(store.optimized("gptq") / VARIANT, "digest", to="0" * 64)
    (finding,) = found(store)
    assert finding.startswith("optimized/gptq/variant.json belongs to another variant than the one that was measured")


@pytest.mark.parametrize("name", ["awq", "gptq"], ids=["the winner", "another"])
def test_a_variant_that_was_made_again_later_is_noted_and_its_release_is_checked(store, name):
    shutil.rmtree(store.optimized(name))
    base = Acquired.read(store.base / ACQUIRED)
    assert base is not None
    variant(store, name, base, content="weights by another group size")
    verdict = verify(store.run(RUN))
    assert verdict.findings == []
    (note,) = verdict.notes
    assert note.startswith(
        f"the weights that were measured are no longer in optimized/{name}: the variant was made again on "
    )
    assert f"optimized/{name}" not in verdict.compared
    released = [each for each in verdict.compared if each.startswith("releases/0001-awq-")]
    assert ("checked in releases/0001-awq-" in note) == (name == "awq")
    (store.path / released[0] / "config.json").unlink()
    (store.path / released[0] / "config.json").write_text("[]")
    (finding,) = found(store)
    assert finding.startswith(f"{released[0]}/config.json was changed")


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("candidates", 0, "score"), 0.99, "candidates.awq.score is 0.99, recomputed 0.567"),
        (("candidates", 0, "cost", "value"), 0.5, "candidates.awq.cost.value is 0.5"),
        (("winner",), "gptq", 'winner is "gptq", recomputed "awq"'),
        (("comparisons", 0, "lead"), 0.5, "comparisons.0.lead is 0.5"),
        (("reason",), "because", 'reason is "because"'),
        (("release",), "0001-gptq-000000000000", "release is 0001-gptq-000000000000, not one of awq"),
        (("candidates", 1, "evaluation_digest"), "0" * 64, "candidates.gptq.evaluation_digest"),
    ],
)
def test_a_changed_number_is_named_with_its_place(store, keys, value, named):
    places = ["production_metrics.json", f"runs/{RUN}/decision.json"]
    for where in places:
        change(store.path / where, *keys, to=value)
    findings = found(store)
    for where in places:
        assert any(each.startswith(f"{where}: {named}") for each in findings), findings
    assert all(each.split(": ")[0] in places for each in findings)


def reword(store: ModelStore, **changed: Any) -> None:
    """Every document of the decision as another version would have worded it."""
    told = json.loads(store.production_metrics.read_text())
    told["candidates"][-1] |= {"excluded": changed.pop("excluded", told["candidates"][-1]["excluded"])}
    told |= {"wording": 1, "reason": "It is the best.", "notes": ["Mind the machine."]} | changed
    released = store.releases / told["release"] / store.production_metrics.name
    for path in (store.production_metrics, released, store.run(RUN) / "decision.json"):
        write_json(path, told)
    report = store.run(RUN) / "report.json"
    write_json(report, json.loads(report.read_text()) | {"decision": told})


def test_a_decision_that_another_version_worded_is_compared_by_its_figures(store):
    reword(store)
    assert found(store) == []
    reword(store, outcome="unresolved")
    assert all(each.endswith('outcome is "unresolved", recomputed "decided"') for each in found(store))
    assert len(found(store)) == 4


def test_whether_a_candidate_is_excluded_is_compared_whatever_the_wording(store):
    reword(store, excluded="It is slow.")
    assert all("candidates.fp16.excluded is true, recomputed false" in each for each in found(store))
    assert len(found(store)) == 4


def test_a_changed_report_is_found(store):
    report = store.run(RUN) / "report.json"
    change(report, "decision", "outcome", to="equivalent")
    change(report, "evaluations", 0, "load", "output_tokens_per_s", to=1e6)
    findings = found(store)
    assert f'runs/{RUN}/report.json: outcome is "equivalent", recomputed "decided"' in findings
    assert any("load.output_tokens_per_s is 1000000.0" in each for each in findings)


def test_a_changed_figure_of_an_evaluation_is_found_by_the_samples_and_by_its_digest(store):
    kept = store.run(RUN) / "measurements" / "awq.json"
    change(kept, "load", "ttft_ms", "p50", to=1.0)
    change(kept, "memory", "peak_resident_bytes", to=1)
    findings = found(store)
    assert "evaluation of awq: load.ttft_ms.p50 is 1.0, the samples give 8.0" in findings
    assert any("candidates.awq.evaluation_digest" in each for each in findings)


def test_all_changes_are_named_at_once(store):
    (store.optimized("fp16") / "config.json").write_text("[]")
    change(store.production_metrics, "winner", to="fp16")
    kept = store.run(RUN) / "measurements" / f"gptq{SAMPLES_SUFFIX}"
    kept.write_text(kept.read_text().replace('"ttft_ms":9.0', '"ttft_ms":8.0', 1))
    findings = found(store)
    for part in ("optimized/fp16/config.json was changed", 'winner is "fp16"', "samples were changed", "ttft_ms.mean"):
        assert any(part in each for each in findings), part


def test_missing_or_invalid_samples_are_findings(store):
    (store.run(RUN) / "measurements" / f"awq{SAMPLES_SUFFIX}").unlink()
    kept = store.run(RUN) / "measurements" / f"gptq{SAMPLES_SUFFIX}"
    kept.write_text(kept.read_text().replace('"duration_s"', '"duration"'))
    findings = found(store)
    assert any("awq.samples.jsonl cannot be read" in each for each in findings)
    assert any("gptq.samples.jsonl cannot be read: line 2: load.duration_s Field required" in each for each in findings)


def test_a_decision_stays_verifiable_after_the_variants_were_measured_again(store):
    for name in VARIANTS:
        path = store.evaluation(name)
        document = json.loads(path.read_text())
        write_json(path, document | {"key": "another"})
        path.with_suffix(SAMPLES_SUFFIX).unlink()
    assert found(store) == []


@pytest.mark.parametrize(
    "later", [{"started_at": "2026-02-03T04:05:06Z"}, {"seconds": 1e6}], ids=["begun anew", "continued"]
)
def test_a_decision_stays_verifiable_after_further_measuring_under_the_same_conditions(store, later):
    made = Variant.read(store.optimized("awq") / VARIANT)
    assert made is not None
    store.evaluation("awq").with_suffix(SAMPLES_SUFFIX).unlink()  # else the run's own would be written over
    evaluation(store, made, quality=0.7, latency_ms=20.0, throughput=50.0, weights_bytes=400)
    for name, value in later.items():
        change(store.evaluation("awq"), name, to=value)
    assert found(store) == []


def test_a_run_in_which_no_variant_could_be_chosen_is_verified_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    store = measured_store(tmp_path, RUN)
    impossible = Profile.model_validate({"name": "strict", "constraints": {"ttft_p95_ms": {"max": 0.001}}})
    with pytest.raises(NoWinner):
        select(store, impossible, VARIANTS)
    verdict = verify(store.run(RUN))
    assert (verdict.winner, verdict.findings) == (None, [])
    assert verdict.nobody
    assert "ttft_p95_ms" in verdict.nobody


def test_a_decision_by_other_rules_names_the_version_that_replays_it(store):
    change(store.run(RUN) / "measurements" / "basis.json", "rules", to=RULES + 1)
    change(store.run(RUN) / "measurements" / "basis.json", "slipway", to="0.3.0")
    verdict = verify(store.run(RUN))
    assert (verdict.replayed_by, verdict.winner, verdict.findings) == ("0.3.0", "awq", [])
    change(store.production_metrics, "candidates", 0, "score", to=0.99)
    assert any(each.startswith("production_metrics.json: candidates.awq.score is 0.99") for each in found(store))


def test_a_capacity_that_follows_by_an_earlier_rule_is_noted_and_not_recomputed(store):
    before = Evaluation.read(store.evaluation("awq"))
    assert before is not None
    samples = read_samples(store.evaluation("awq").with_suffix(SAMPLES_SUFFIX), before)
    capacity = Capacity(
        ttft_ms=500,
        tpot_ms=50,
        requests_per_s=9,
        output_tokens_per_s=72,
        low=None,
        high=None,
        starts=(72,),
        trials=(),
    )
    for rule, findings in ((RULE - 1, 0), (RULE, 1)):
        verdict = Verification()
        given = before.model_copy(update={"capacity": capacity.model_copy(update={"rule": rule})})
        check_evaluation(given, samples, verdict)
        assert (len(verdict.findings), len(verdict.notes)) == (findings, 1 - findings)


def test_a_run_without_a_decision_cannot_be_verified(tmp_path):
    with pytest.raises(MissingRun, match="has no measurements"):
        verify(tmp_path / "org--name" / "runs" / RUN)


def test_the_adapters_of_a_release_are_verified_by_their_files(store: ModelStore) -> None:
    adapter = acquired(store, "sql")
    for name in VARIANTS:
        record = Evaluation.read(store.evaluation(name))
        assert record
        workload = record.workload | {"adapters": {"sql": adapter.digest}}
        record.model_copy(update={"workload": workload}).write(store.evaluation(name))
    decision = select(store, Profile(name="balanced"), VARIANTS, price=Price(per_hour=2.0)).decision
    collect(store, RUN, "Succeeded").write(store.run(RUN) / "report.json")
    verified = verify(store.run(RUN))
    where = f"releases/{decision.release}/adapters/sql"
    assert verified.findings == []
    assert where in verified.compared
    weights = store.releases / decision.release / "adapters" / "sql" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-1] + b"x")
    assert found(store) == [f"{where}/adapter_model.safetensors was changed"]
    shutil.rmtree(weights.parent)
    assert found(store) == [f"{where} is not the adapter that was measured"]
