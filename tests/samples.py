"""A store as the stages before select leave it: true files and records, with chosen measurements."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from scoring.names import variant_of
from stages.parts.base.files import sha256_of, write_json
from stages.parts.base.program import Outcome
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import Hardware
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest
from stages.parts.records.answers import QUESTIONS, KeptAnswers, answers_key, answers_paths
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Engine, Evaluation, Memory, TaskScore
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.figures import load_of, pooled_load, task_score
from stages.parts.samples.lines import (
    AccuracyItem,
    HeldOutDocument,
    LoadRun,
    LoadSamples,
    Samples,
    TimedRequest,
    read_samples,
    write_samples,
)

MODEL = "org/name"
TASK = "arc"
ROUNDS = 3
REQUESTS = 8
ITEMS = 4000
DOCUMENTS = 4
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def base(store: ModelStore) -> Acquired:
    """``base/`` with one small weights file."""
    store.base.mkdir(parents=True)
    (store.base / "model.safetensors").write_bytes(b"base weights")
    files = (_file(store.base, "model.safetensors"),)
    record = Acquired(
        model=store.model,
        source="http://hub.example",
        revision="main",
        commit="c" * 40,
        license="apache-2.0",
        architecture="LlamaForCausalLM",
        parameters=12,
        files=files,
        digest=files_digest(files),
        acquired_at=NOW,
    )
    record.write(store.base / ACQUIRED)
    return record


def variant(store: ModelStore, name: str, base: Acquired, content: str = "") -> Variant:
    """``optimized/<name>`` with two files."""
    folder = store.optimized(name)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content or f"weights of {name}")
    (folder / "config.json").write_text("{}")
    files = tuple(_file(folder, each) for each in ("config.json", "model.safetensors"))
    record = Variant(
        variant=name,
        method=name,
        parameters={},
        base_digest=base.digest,
        calibration_digest=None,
        tool_versions={"torch": "2.13.0"},
        key=f"key of {name}",
        files=files,
        digest=files_digest(files),
        weights_bytes=100,
        bits=16 if name == "fp16" else 4,
        dtype="float16",
        seconds=1.0,
        peak_memory_bytes=1,
        peak_gpu_memory_bytes=None,
        created_at=NOW,
    )
    record.write(folder / VARIANT)
    return record


class Details(NamedTuple):
    candidate: str = ""
    """The variant with its recipe, if it has one."""
    noise: float = 0.0
    """The standard deviation of a start, as a share of its times."""
    looks: int = 0
    """The starts that were looked at one by one; 0 if all of them at once."""
    answer_tokens: int | None = None
    """Of each answer to a question."""
    likeliest: float = 0.7
    """The probability of one token everywhere in the held-out text."""


def evaluation(
    store: ModelStore,
    variant: Variant,
    *,
    quality: float,
    latency_ms: float,
    throughput: float,
    weights_bytes: int,
    details: Details | None = None,
) -> Evaluation:
    """``evaluations/<variant>.json`` with the four metrics as chosen, by default the same in every request."""
    details = details or Details()
    name = details.candidate or variant.variant
    draws = [random.Random(f"{name} {number}").gauss(0, 1) for number in range(details.looks or ROUNDS)]
    factors = [1 + details.noise * draw for draw in draws]
    samples = Samples(
        rounds=tuple(load_round(n, latency_ms * factor, throughput / factor) for n, factor in enumerate(factors)),
        items=tuple(
            answer(item, correct=item < round(quality * ITEMS), tokens=details.answer_tokens) for item in range(ITEMS)
        ),
        held_out=tuple(held_out(document, details.likeliest) for document in range(DOCUMENTS)),
    )
    key = f"evaluation of {name}"
    record = Evaluation(
        variant=name,
        variant_digest=variant.digest,
        base_digest=variant.base_digest,
        workload={"name": "chat", "concurrency": 4, "quality_tasks": [TASK]},
        engine=engine(None if variant.bits == 16 else variant.method),
        hardware=Hardware(cpu="a cpu", cores=2, memory_bytes=8 << 30, gpus=()),
        key=key,
        samples_sha256=write_samples(samples_path(store, name), key, samples),
        tool_versions={"vllm": "0.32.0"},
        quality=(accuracy(samples),),
        load=pooled_load(samples.rounds),
        rounds=tuple(map(load_of, samples.rounds)),
        memory=Memory(
            weights_bytes=weights_bytes, peak_resident_bytes=3 << 30, peak_gpu_bytes=None, kv_cache_tokens=4096
        ),
        looks=tuple((number + 1) / ROUNDS for number in range(details.looks)),
        beside=(),
        started_at=NOW,
        seconds=60.0,
    )
    record.write(store.evaluation(name))
    return record


def answers(store: ModelStore, evaluation: Evaluation, commit: str = "c" * 40) -> KeptAnswers:
    """Keep the answers of an evaluation as those of the reference."""
    samples = read_samples(samples_path(store, evaluation.variant), evaluation)
    key = answers_key(evaluation.base_digest, evaluation.variant, evaluation.workload)
    record, path = answers_paths(store, key)
    kept = KeptAnswers(
        model=store.model,
        commit=commit,
        base_digest=evaluation.base_digest,
        variant=evaluation.variant,
        questions={name: evaluation.workload.get(name) for name in QUESTIONS},
        quality=evaluation.quality,
        not_asked={},
        engine=evaluation.engine,
        hardware=Hardware(cpu="a larger cpu", cores=64, memory_bytes=512 << 30, gpus=("an H200",)),
        tool_versions=evaluation.tool_versions,
        samples_sha256=write_samples(path, key, Samples(items=samples.items, held_out=samples.held_out)),
        asked_at=NOW,
    )
    kept.write(record)
    return kept


def accuracy(samples: Samples) -> TaskScore:
    reported = TaskScore(task=TASK, kind="accuracy", value=0, low=0, high=0, score=0, items=0, metrics={})
    score = task_score(reported, samples)
    assert score is not None
    return score


def engine(quantization: str | None) -> Engine:
    return Engine(
        name="vllm",
        version="0.32.0",
        arguments=("serve",),
        dtype="bfloat16",
        quantization=quantization,
        kernel=None,
        ready_s=20.0,
    )


def samples_path(store: ModelStore, variant: str) -> Path:
    return store.evaluation(variant).with_suffix(SAMPLES_SUFFIX)


def load_round(number: int, latency_ms: float, throughput: float) -> LoadSamples:
    """A round of a start of its own, whose requests all take the same time."""
    tokens = 8
    one = TimedRequest(
        restart=number,
        phase="round",
        number=number,
        start_s=0.0,
        ttft_ms=latency_ms,
        tpot_ms=latency_ms,
        e2el_ms=latency_ms,
        itl_ms=(latency_ms,),
        prompt_tokens=8,
        output_tokens=tokens,
    )
    duration_s = REQUESTS * tokens / throughput
    run = LoadRun(restart=number, phase="round", number=number, concurrency=4, duration_s=duration_s)
    return LoadSamples(run, (one,) * REQUESTS)


def answer(item: int, *, correct: bool, restart: int = 0, tokens: int | None = None) -> AccuracyItem:
    return AccuracyItem(restart=restart, task=TASK, doc_id=item, correct=float(correct), tokens=tokens)


def held_out(document: int, likeliest: float) -> HeldOutDocument:
    """Two places of a held-out text: token 2 has the probability *likeliest*, token 3 all of 0.9 that is left."""
    by_token = sorted({2: likeliest, 3: 0.9 - likeliest}.items(), key=lambda each: -each[1])
    listed, logprobs = tuple(token for token, _ in by_token), tuple(math.log(each) for _, each in by_token)
    return HeldOutDocument(document=document, tokens=(1, 2, 3), listed=(listed,) * 2, logprobs=(logprobs,) * 2)


def outcome(
    store: ModelStore, run: str, stage: str, variant: str, result: str, *, key: str = "", why: str = ""
) -> None:
    """What a stage of *run* left in the run's folder."""
    record = Outcome.model_validate(
        {
            "stage": stage,
            "variant": variant,
            "result": result,
            "reason": why,
            "key": key,
            "started_at": NOW,
            "seconds": 1.0,
        }
    )
    write_json(store.run(run) / "outcomes" / f"{stage}-{variant}.json", record)


def measured_store(root: Path, run: str = "run-1") -> ModelStore:
    """Three variants made and measured by *run*: under the balanced profile awq wins."""
    store = ModelStore(root, MODEL)
    acquired = base(store)
    figures = {"fp16": (0.80, 10.0, 100.0, 1000), "awq": (0.796, 8.0, 120.0, 400), "gptq": (0.794, 9.0, 110.0, 400)}
    for name, (quality, latency_ms, throughput, weights_bytes) in figures.items():
        made = variant(store, name, acquired)
        measured = evaluation(
            store, made, quality=quality, latency_ms=latency_ms, throughput=throughput, weights_bytes=weights_bytes
        )
        outcome(store, run, "optimize", name, "done", key=made.key)
        outcome(store, run, "evaluate", name, "done", key=measured.key)
    return store


TWELVE = {
    "fp16": (0.800, 912.0, 2_310.0, 15_200, 3),
    "fp16+ngram": (0.800, 861.0, 2_440.0, 15_200, 3),
    "int8": (0.794, 655.0, 3_420.0, 8_300, 3),
    "fp8": (0.798, 601.0, 3_690.0, 8_200, 3),
    "fp8-block": (0.7985, 612.0, 3_640.0, 8_300, 3),
    "fp8-block+kv-fp8": (0.7945, 585.0, 4_020.0, 8_300, 3),
    "fp8-block+ngram": (0.7985, 553.0, 3_905.0, 8_300, 3),
    "w4a16": (0.7945, 502.0, 4_710.0, 5_300, 3),
    "w4a16+ngram": (0.7945, 501.0, 4_720.0, 5_300, 3),
    "awq+small-batches": (0.7905, 1_410.0, 1_480.0, 5_400, 1),
    "gptq": (0.741, 560.0, 4_390.0, 5_300, 3),
}
"""Candidates by quality, latency in ms, tokens/s, bytes of weights and starts; with nvfp4a16, for which there is no
kernel, twelve. gptq loses too much, awq+small-batches was beaten after one start, and the two w4a16 are equivalent."""


def store_of_twelve(root: Path, run: str = "run-1") -> tuple[ModelStore, list[str]]:
    """A dozen candidates of which some are left out, as *run* left them; and their names."""
    store = ModelStore(root, MODEL)
    acquired, made = base(store), {}
    for name, (quality, latency_ms, throughput, weights_bytes, looks) in TWELVE.items():
        of = variant_of(name)
        if of not in made:
            made[of] = variant(store, of, acquired)
            outcome(store, run, "optimize", of, "done", key=made[of].key)
        measured = evaluation(
            store,
            made[of],
            quality=quality,
            latency_ms=latency_ms,
            throughput=throughput,
            weights_bytes=weights_bytes * 10**6,
            details=Details(name, noise=0.004, looks=looks, answer_tokens=212),
        )
        outcome(store, run, "evaluate", name, "done", key=measured.key)
    outcome(store, run, "check", "nvfp4a16", "left out", why="vLLM has no kernel for nvfp4a16 on an H100")
    return store, [*TWELVE, "nvfp4a16"]


def _file(folder: Path, name: str) -> File:
    path = folder / name
    return File(path=name, size_bytes=path.stat().st_size, sha256=sha256_of(path))
