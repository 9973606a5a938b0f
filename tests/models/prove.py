"""Find out on this machine what works with each family of models, and record it in proven.json.

``python -m tests.models.prove make`` makes the small models, compares their parameters with the plan's, and makes each
variant with the real quantizers; ``… serve`` serves what was made with the real vLLM, over HTTP, and asks for a
completion, a chat with a tool to call, and one with a picture. Families can be named; those that are recorded already
are left out otherwise. Other than in a run, the libraries are imported once, and each step is a fork of that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from stages.optimize import job
from stages.optimize.base_model import read_base
from stages.optimize.language_part import language_part
from stages.parts.base import formats
from stages.parts.base.errors import SlipwayError
from stages.parts.base.files import write_text
from stages.parts.base.formats import FORMATS
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.model.checkpoint import why_not_quantized
from tests.models.servable import KINDS, publish
from tests.stages.optimize.tiny import acquire, words

VARIANTS: Final = ("fp16", "awq", "gptq", "int8")
"""The variants that are proven with every family, unless others are named."""
RECORD: Final = Path(__file__).with_name("proven.json")
FOLDER: Final = Path(os.environ.get("SLIPWAY_PROOFS", "/tmp/slipway-proofs"))
LONGEST_S: Final = 240
SERVING: Final = Serving(max_model_len=512, kv_cache_mib=256, enforce_eager=True)
Found = dict[str, Any]
Task = tuple[str, str]
BUILD: Final = "build"


def read() -> dict[str, Found]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def note(kind: str, **found: Any) -> None:
    with (FOLDER / "lock").open("a") as lock:  # both steps may run at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = read()
        record[kind] = record.get(kind, {}) | found
        ordered = {name: record[name] for name in KINDS if name in record}
        write_text(RECORD, json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def store_of(kind: str) -> ModelStore:
    return ModelStore(FOLDER / kind, "test/tiny")


def in_turn(tasks: Sequence[Task], perform: Callable[[Task], Any]) -> Iterator[tuple[Task, Any]]:
    """What *perform* returns for each task, or one sentence that says why it did not. All run in one process, which
    imports libraries once; where that ends, another one goes on with the next task."""
    left = list(tasks)
    while left:
        reads, writes = os.pipe()
        if not (child := os.fork()):
            os.close(reads)
            for task in left:
                signal.alarm(LONGEST_S)
                with (FOLDER / "-".join(task)).with_suffix(".log").open("wb") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                os.write(writes, json.dumps(tried(perform, task)).encode() + b"\n")
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as results:
            for line in results:
                yield left.pop(0), json.loads(line)
        _, status = os.waitpid(child, 0)
        if left:
            ending = f"its process {f'was ended by {signal.Signals(status & 127).name}' if status & 127 else 'ended'}"
            lines = (FOLDER / "-".join(left[0])).with_suffix(".log").read_text(errors="replace").splitlines()
            raised = [f"{match[1]}: {match[2]}" for match in map(job.EXCEPTION.match, lines) if match]
            yield left.pop(0), raised[-1] if raised else ending


def tried(perform: Callable[[Task], Any], task: Task) -> Any:
    try:
        return perform(task)
    except SlipwayError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]


def make(kinds: Sequence[str], formats: Sequence[str]) -> None:
    """Make what is not recorded yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    known, tasks = read(), []
    for kind in kinds:
        missing = [name for name in formats if name not in known.get(kind, {}).get("made", {})]
        tasks += [(kind, BUILD)] if missing and not store_of(kind).path.exists() else []
        tasks += [(kind, name) for name in missing]
    for (kind, step), result in in_turn(tasks, lambda task: build(task[0]) if task[1] == BUILD else quantize(*task)):
        if step != BUILD:
            note(kind, made=read().get(kind, {}).get("made", {}) | {step: result})
        elif isinstance(result, dict):
            note(kind, **result)
        print(kind, step, result, flush=True)


def build(kind: str) -> Found:
    folder = FOLDER / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    published = folder / "published"
    publish(kind, published)
    acquire(published, folder)
    base = read_base(store_of(kind))
    part = language_part(base)
    tensors = part.alone(base.tensors) if part else base.tensors
    return {
        "parameters": sum(tensor.count for tensor in tensors.values()),
        "fused_experts": why_not_quantized(base.tensors),
    }


def quantize(kind: str, name: str) -> str:
    from stages.optimize.ensure import ensure

    def run(asked: job.QuantizationJob, python: str) -> tuple[int, str]:
        if python != sys.executable:
            return run_apart(asked, python)
        os.chdir(FOLDER)  # GPTQModel writes logs to the working directory
        job.result_of(asked).write(asked.folder / job.RESULT)
        return 0, ""

    run_apart = job.run
    setattr(job, "run", run)  # noqa: B010
    setattr(formats, "failures", dict)  # noqa: B010 (what failed is tried again)
    text = FOLDER / "lines.txt"
    text.write_text("\f".join(words(60, seed) for seed in range(40)))
    calibration = {"text": str(text), "samples": 8, "sequence_length": 64}
    ensure(store_of(kind), name, Optimize.model_validate({"calibration": calibration}))
    return "made"


def serve(kind: str) -> None:
    """Serve what was made and is not recorded yet."""
    from stages.parts.vllm.support import missing_kernel

    found = read().get(kind, {})
    served = found.get("served", {})
    waiting = [name for name, result in found.get("made", {}).items() if result == "made" and name not in served]
    if not waiting:
        return
    config = read_base(store_of(kind)).config
    for name in waiting:
        stated = FORMATS[name].configuration
        made = {**config, "quantization_config": stated(Optimize().group_size)} if stated else config
        missing = missing_kernel(made, lora=False, allow_fallback=False)
        served[name] = {"left_out": missing} if missing else serve_variant(kind, name)
        note(kind, served=served)
        print(kind, name, served[name], flush=True)


def serve_variant(kind: str, name: str) -> Found | str:
    """What a server of the variant answers, or why it does not start."""
    from stages.parts.vllm.arguments import IN_ONE_PROCESS, engine_arguments, takes_pictures
    from stages.parts.vllm.client import answer, answers_chat, healthy
    from stages.parts.vllm.parsers import PARSES_CALLS
    from stages.parts.vllm.server_log import error_in, last_line

    directory, log = store_of(kind).optimized(name), FOLDER / kind / f"serve-{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/vllm.sock"
        arguments = engine_arguments(SERVING, directory)
        command = ["serve", str(directory), "--served-model-name", kind, "--uds", socket, *IN_ONE_PROCESS, *arguments]
        if not (server := os.fork()):
            os.setsid()
            with log.open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.argv = ["vllm", *command]
            from vllm.entrypoints.cli.main import main

            try:
                main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        url, deadline = f"unix://localhost{socket}", time.monotonic() + LONGEST_S
        try:
            while not healthy(url):
                if os.waitpid(server, os.WNOHANG)[0] or time.monotonic() > deadline:
                    text = log.read_text(errors="replace")
                    return error_in(text) or last_line(text)
                time.sleep(0.2)
            answer(url, kind, timeout_s=LONGEST_S)
            found: Found = {"answers": True}
            if PARSES_CALLS in arguments:
                found["tools"] = arguments[arguments.index("--tool-call-parser") + 1]
                found["calls"] = answers_chat(url, kind, tools=True)
            if takes_pictures(SERVING, directory):
                found["picture"] = answers_chat(url, kind, picture=True) or error_in(log.read_text(errors="replace"))
            return found
        except SlipwayError as error:
            died = "EngineCore" in str(error) and error_in(log.read_text(errors="replace"))
            return died or str(error).replace(url, "the server")
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(server, signal.SIGKILL)


def prepare_serving() -> None:
    """Import what every server needs, so that it is a fork of this process."""
    from stages.parts.vllm.arguments import ONE_THREAD, environment

    os.environ |= environment(binding=ONE_THREAD)
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda work: work()
    fork = multiprocessing.get_context("fork")
    setattr(multiprocessing, "get_context", lambda method=None: fork)  # noqa: B010


def main(step: str, *named: str) -> None:
    os.environ |= job.environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    kinds = [name for name in named if name in KINDS]
    if step == "make":
        make(kinds or list(KINDS), [name for name in named if name in FORMATS] or list(VARIANTS))
        return
    prepare_serving()
    for kind in kinds or KINDS:
        serve(kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
