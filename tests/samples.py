"""A store as the stages before select leave it: true files and records, with chosen measurements."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path

from stages.parts.base.program import Outcome
from stages.parts.base.store import ModelStore, sha256_of, write_json
from stages.parts.machine.hardware import Hardware
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Engine, Evaluation, Memory, TaskScore
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.figures import point_load, task_score, whole_load

MODEL = "org/name"
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


def evaluation(
    store: ModelStore,
    variant: Variant,
    *,
    quality: float,
    latency_ms: float,
    throughput: float,
    weights_bytes: int,
    likeliest: float = 0.7,
) -> Evaluation:
    """``evaluations/<variant>.json`` with the four metrics as chosen and the same in every round and request.

    Args:
        likeliest: the probability of one token everywhere in the held-out text; the same for all by default.
    """
    tokens = 8
    request = {"ttft_ms": latency_ms, "tpot_ms": latency_ms, "e2el_ms": latency_ms, "itl_ms": [latency_ms]}
    request |= {"prompt_tokens": 8, "output_tokens": tokens}
    total = {"concurrency": 4, "duration_s": REQUESTS * tokens / throughput}
    points = [({"round": number} | total, [{"round": number} | request] * REQUESTS) for number in range(ROUNDS)]
    items = [{"task": "arc", "doc_id": item, "correct": float(item < round(quality * ITEMS))} for item in range(ITEMS)]
    told = TaskScore(task="arc", kind="accuracy", value=0, low=0, high=0, score=0, items=0, metrics={"acc": quality})
    quality_score = task_score(told, items)
    assert quality_score is not None
    record = Evaluation(
        variant=variant.variant,
        variant_digest=variant.digest,
        base_digest=variant.base_digest,
        workload={"name": "chat", "concurrency": 4},
        engine=Engine(
            name="vllm",
            version="0.32.0",
            arguments=("serve",),
            dtype="bfloat16",
            quantization=None if variant.bits == 16 else variant.method,
            kernel=None,
            ready_s=20.0,
        ),
        hardware=Hardware(cpu="a cpu", cores=2, memory_bytes=8 << 30, gpus=()),
        key=f"evaluation of {variant.variant}",
        samples_sha256="",
        tool_versions={"vllm": "0.32.0"},
        quality=(quality_score,),
        load=whole_load(points),
        rounds=tuple(point_load(each) for each in points),
        memory=Memory(
            weights_bytes=weights_bytes, peak_resident_bytes=3 << 30, peak_gpu_bytes=None, kv_cache_tokens=4096
        ),
        beside=(),
        started_at=NOW,
        seconds=60.0,
    )
    lines: list[dict[str, object]] = [{"evaluation": record.key}]
    lines += [line for total, requests in points for line in (total, *requests)]
    lines += items
    lines += [held_out(document, likeliest) for document in range(DOCUMENTS)]
    samples = store.evaluation(variant.variant).with_suffix(SAMPLES_SUFFIX)
    samples.parent.mkdir(exist_ok=True)
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = record.model_copy(update={"samples_sha256": sha256_of(samples)})
    record.write(store.evaluation(variant.variant))
    return record


def held_out(document: int, likeliest: float) -> dict[str, object]:
    """Two places of a held-out text: token 2 has the probability *likeliest*, token 3 all of 0.9 that is left."""
    by_token = sorted({2: likeliest, 3: 0.9 - likeliest}.items(), key=lambda each: -each[1])
    listed, logprobs = [token for token, _ in by_token], [math.log(each) for _, each in by_token]
    return {"document": document, "tokens": [1, 2, 3], "listed": [listed] * 2, "logprobs": [logprobs] * 2}


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
    figures = {"fp16": (0.80, 10.0, 100.0, 1000), "awq": (0.78, 8.0, 120.0, 400), "gptq": (0.76, 9.0, 110.0, 400)}
    for name, (quality, latency_ms, throughput, weights_bytes) in figures.items():
        made = variant(store, name, acquired)
        measured = evaluation(
            store, made, quality=quality, latency_ms=latency_ms, throughput=throughput, weights_bytes=weights_bytes
        )
        outcome(store, run, "optimize", name, "done", key=made.key)
        outcome(store, run, "evaluate", name, "done", key=measured.key)
    return store


def _file(folder: Path, name: str) -> File:
    path = folder / name
    return File(path=name, size_bytes=path.stat().st_size, sha256=sha256_of(path))
