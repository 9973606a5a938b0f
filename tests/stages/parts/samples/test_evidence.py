"""The evidence and the gates that follow from samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoring.choice import judge
from scoring.constraints import Constraints
from scoring.criteria import Criteria, Values
from stages.parts.samples.evidence import Measured, answer_growths, evidence_of, gates_of, losses_of, recoveries, speeds
from stages.parts.samples.lines import LoadRun, LoadSamples, PerplexityItem, Samples, TimedRequest
from tests.samples import TASK, answer, held_out

CRITERIA = Criteria()
ITEMS = 2000


def block(number: int, *times_ms: float, tokens_per_s: float = 100.0) -> LoadSamples:
    """A block with one round, whose requests take these times."""
    at: dict[str, Any] = {"restart": number, "phase": "round", "number": number}
    requests = tuple(
        TimedRequest(
            **at,
            start_s=0.0,
            ttft_ms=time / 2,
            tpot_ms=1.0,
            e2el_ms=time,
            itl_ms=(1.0,),
            prompt_tokens=8,
            output_tokens=8,
        )
        for time in times_ms
    )
    duration_s = 8 * len(times_ms) / tokens_per_s
    return LoadSamples(LoadRun(**at, concurrency=2, duration_s=duration_s), requests)


def samples(*rounds: LoadSamples, right: int = 1600, items: int = ITEMS, likeliest: float = 0.7) -> Samples:
    answers = tuple(answer(item, correct=item < right) for item in range(items))
    texts = tuple(held_out(document, likeliest) for document in range(4))
    return Samples(rounds=rounds, items=answers, held_out=texts)


def measured(given: Samples, memory_bytes: float = 100.0, **others: Any) -> Measured:
    return Measured(given, memory_bytes, **others)


def test_the_speed_of_a_start_is_the_mean_over_the_requests_that_all_variants_answered() -> None:
    ours = samples(block(0, 100.0, 400.0, 7.0), block(1, 100.0, 100.0, tokens_per_s=50.0))
    theirs = samples(block(0, 50.0, 200.0), block(1, 50.0, 50.0, tokens_per_s=100.0))
    found = speeds([ours, theirs])
    assert np.exp(found[0, :, 0]) == pytest.approx([200.0, 100.0])
    assert np.exp(found[1, :, 0]) == pytest.approx([100.0, 50.0])
    assert np.exp(found[1, :, 1]) == pytest.approx([50.0, 100.0])


def test_where_rates_were_tried_the_throughput_of_a_start_is_its_capacity() -> None:
    at: dict[str, Any] = {"restart": 0, "phase": "trial", "concurrency": 1, "targets_ms": (100.0, 10.0)}
    held = LoadRun(**at, number=0, rate_per_s=20.0, duration_s=1.0, held=True)
    early = LoadRun(**at, number=1, rate_per_s=40.0, duration_s=1.0, held=False)
    trials = LoadSamples(held, block(0, 200.0).requests), LoadSamples(early, ())
    found = speeds([replace(samples(block(0, 100.0)), trials=trials), samples(block(0, 100.0))])
    assert np.exp(found[0, :, 1]) == pytest.approx([20 * 8, 100.0])


def test_a_server_on_half_of_the_gpus_counts_twice_and_is_sent_half_of_the_requests() -> None:
    whole = samples(block(0, 100.0))
    halved = replace(whole, gpu_share=0.5)
    assert np.exp(speeds([whole, halved])[0, :, 1]) == pytest.approx([100.0, 200.0])
    (load,) = whole.rounds
    sent = replace(whole, rounds=(replace(load, run=load.run.model_copy(update={"rate_per_s": 8.0})),))
    assert [half.run.rate_per_s for half in sent.on(0.5).rounds] == [4.0]
    assert [twice.run.rate_per_s for twice in replace(sent, gpu_share=0.5).on(1.0).rounds] == [16.0]
    assert whole.on(0.5).rounds == whole.rounds  # as many in flight as the workload says


def test_a_variant_that_is_not_measured_any_more_has_no_speed_in_further_blocks() -> None:
    found = speeds([samples(block(0, 10.0), block(1, 10.0)), samples(block(0, 20.0))])
    assert np.isnan(found[1, 1]).all()
    assert np.isfinite(found[[0, 0, 1], [0, 1, 0]]).all()


def test_what_was_measured_leads_to_a_choice() -> None:
    """int8 is twice as fast with half the memory, as good, and measured in four blocks."""

    def at(speed: float, noise: float) -> Samples:
        times = [[1000 / speed * (1 + noise * sign)] * 3 for sign in (1, -1, 1, -1)]
        return samples(*(block(place, *each, tokens_per_s=1000 * speed) for place, each in enumerate(times)))

    evidence = evidence_of({"fp16": measured(at(1.0, 0.0), 100.0), "int8": measured(at(2.0, 0.01), 50.0)})
    verdict = judge(evidence, CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("decided", "int8")
    assert evidence.speed.degrees == 3
    # As good: 0.5; twice as fast: about 1; half the memory: 0.75.
    assert verdict.scores["int8"] == pytest.approx(0.5 * 0.5 + 0.4 + 0.1 * 0.75, abs=0.01)
    assert verdict.scores["fp16"] == pytest.approx(0.5)


def test_a_variant_that_was_never_loaded_beside_the_others_is_no_evidence() -> None:
    loaded = {"fp16": measured(samples(block(0, 1.0), block(1, 1.0))), "int8": measured(samples(block(1, 1.0)))}
    apart = {"awq": measured(samples()), "gptq": measured(samples(block(7, 1.0)))}
    evidence = evidence_of(loaded | apart, "fp16")
    assert evidence.variants == ("fp16", "int8")
    assert evidence.speed.blocks == 2


def test_before_any_load_a_variant_is_judged_by_its_losses_its_divergence_and_its_size() -> None:
    limits = Constraints.model_validate(
        {"kl_divergence": {"max": 0.1}, "memory_gib": {"max": 1}, "ttft_p95_ms": {"max": 1}}
    )
    found = gates_of(
        {
            "fp16": measured(samples()),
            "sound": measured(samples(right=1600 - 8)),
            "lossy": measured(samples(right=1600 - 90)),
            "close": measured(samples(right=1600 - 45)),
            "apart": measured(samples(likeliest=0.2)),
            "large": measured(samples(), memory_bytes=3 << 30),
        },
        CRITERIA,
        limits,
    )
    verdicts = {name: each.verdict for name, each in found.items()}
    assert verdicts == {
        "fp16": "pass",
        "sound": "pass",
        "lossy": "fail",
        "close": "unclear",
        "apart": "fail",
        "large": "fail",
    }
    assert found["sound"].reasons == ()
    assert found["lossy"].reasons == ("loses 5.6% of arc (at least 4.7%), more than the 3% that may be lost",)
    assert found["close"].reasons == (
        "may lose more than 3% of arc: 2.8% by these items, up to 3.5% by chance; 14 times as many items would tell",
    )
    assert 13 < found["close"].more_items <= 14
    assert found["apart"].reasons[0].startswith("kl_divergence 0.62")
    assert found["large"].reasons == ("memory_gib 3 is above the maximum of 1",)


def test_a_variant_that_loses_with_an_adapter_alone_fails() -> None:
    def asked(right: int) -> Samples:
        with_adapter = (item.model_copy(update={"task": "arc@sql"}) for item in samples(right=right).items)
        base = samples()
        return replace(base, items=(*base.items, *with_adapter))

    found = gates_of({"fp16": measured(asked(1600)), "int8": measured(asked(1500))}, CRITERIA, Constraints())
    assert found["int8"].verdict == "fail"
    assert found["int8"].reasons == ("loses 6.3% of arc@sql (at least 5.2%), more than the 3% that may be lost",)


def test_after_the_load_constraints_on_speed_hold_too() -> None:
    limits = Constraints.model_validate({"ttft_p95_ms": {"max": 100}})
    given = {"fp16": measured(samples()), "slow": measured(samples(), load={"ttft_p95_ms": 120.0})}
    found = gates_of(given, CRITERIA, limits)
    assert found["fp16"].verdict == "pass"
    assert found["slow"].reasons == ("ttft_p95_ms 120 is above the maximum of 100",)


def test_a_server_that_does_not_generate_what_it_finds_likely_fails() -> None:
    given = {"fp16": measured(samples(), agreement=1.0), "broken": measured(samples(), agreement=0.6)}
    found = gates_of(given, CRITERIA, Constraints())
    assert found["fp16"].verdict == "pass"
    assert found["broken"].reasons == ("its answers agree with its own probabilities by only 0.60, below 0.9",)


def test_answers_that_are_much_longer_than_the_reference_s_fail() -> None:
    """Each of them costs more, however fast its tokens are."""
    lengths = np.random.default_rng(0).integers(20, 400, ITEMS)

    def answering(times: float, counted: int = ITEMS, seed: int = 1) -> Samples:
        spread = np.random.default_rng(seed).uniform(0.5, 1.5, ITEMS)
        tokens = [max(1, round(length * times * by)) for length, by in zip(lengths, spread, strict=True)]
        given = samples()
        items = [
            item.model_copy(update={"tokens": tokens[place]}) if place < counted else item
            for place, item in enumerate(given.items)
        ]
        return replace(given, items=tuple(items))

    given = {
        "fp16": answering(1.0),
        "alike": answering(1.0, seed=2),
        "longer": answering(1.15, seed=3),
        "rambling": answering(2.0, seed=4),
        "hardly counted": answering(1.4, counted=3, seed=5),
        "not counted": answering(2.0, counted=0),
    }
    found = gates_of({name: measured(each) for name, each in given.items()}, CRITERIA, Constraints())
    assert {name for name, gate in found.items() if gate.verdict != "pass"} == {"rambling"}
    (why,) = found["rambling"].reasons
    assert why == "its answers are 102% longer than those of fp16 (98% to 106%), beyond 20%"
    growths = answer_growths(given, "fp16")
    assert growths["longer"].value == pytest.approx(0.15, abs=0.03)
    assert "not counted" not in growths


def test_a_loss_on_one_of_two_tasks_is_enough() -> None:
    def with_texts(nats: float) -> Samples:
        texts = tuple(
            PerplexityItem(restart=0, task="text", doc_id=place, loglikelihood=nats * (100 + place), bytes=100 + place)
            for place in range(40)
        )
        given = samples()
        return replace(given, items=given.items + texts)

    given = {"fp16": with_texts(-0.5), "worse": with_texts(-0.56)}
    losses = losses_of(given, "fp16", 0.03)["worse"]
    assert losses[TASK].verdict == "pass"
    assert losses["text"].value == pytest.approx(1 - math.exp(-0.06))
    assert gates_of({name: measured(each) for name, each in given.items()}, CRITERIA, Constraints())[
        "worse"
    ].verdict == ("fail")


def test_a_task_of_which_the_reference_can_do_nothing_shows_nothing() -> None:
    given = {"fp16": samples(right=0), "int8": samples(right=0)}
    assert losses_of(given, "fp16", 0.03) == {"int8": {}}


def test_fixed_values_stand_in_for_a_reference() -> None:
    criteria = Criteria(reference=Values(quality=0.9, latency=1.0, throughput=1.0, memory=1.0))
    given = {"int8": samples(right=1620)}
    (recovered,) = recoveries(given, criteria).items()
    assert (recovered[0], math.exp(recovered[1].value)) == ("int8", pytest.approx(0.9))
    limits = Constraints.model_validate({"quality_recovery": {"min": 0.95}})
    assert gates_of({"int8": measured(given["int8"])}, criteria, limits)["int8"].reasons == (
        "quality_recovery 0.9 is below the minimum of 0.95",
    )
