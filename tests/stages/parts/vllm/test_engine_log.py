"""What is read from vLLM's log. The texts are excerpts from real logs of vLLM 0.32 on a CPU."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stages.parts.base.errors import MeasurementFailed
from stages.parts.records.evaluation import ColdStart
from stages.parts.vllm.server_log import ServerLog, cold_start, error_in, facts, fallbacks, last_line, signal_in
from stages.parts.vllm.sizing import LOAD_BYTES_PER_S, startup_s

DEATHS = Path(__file__).with_name("deaths")

QUANTIZED = """\
(APIServer pid=6424) INFO 11-21 03:28:38 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=6523) INFO 11-21 03:28:46 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=1024, quantization=auto_gptq, quantization_config=None
(EngineCore pid=6523) INFO 11-21 03:28:47 [ompmultiprocessing.py:185] \tlocal_world_size=1, reserve_cpu_num=1
(EngineCore pid=6523) INFO 11-21 03:28:47 [ompmultiprocessing.py:185] \tlocal_rank=0, core ids=[4, 5]
(Worker pid=6613) INFO 11-21 03:28:55 [__init__.py:923] Using CPUWNA16LinearKernel for mixed-precision linear
(Worker pid=6613) INFO 11-21 03:28:55 [auto_gptq.py:352] Using CPUWNA16LinearKernel for AutoGPTQLinearMethod
(EngineCore pid=6523) INFO 11-21 03:28:56 [kv_cache_utils.py:2327] CPU KV cache size: 131,072 tokens, Maximum \
concurrency for 1,024 tokens per request: 128.00x
"""
WORKER_FAILED = """\
(Worker pid=8510) ERROR 11-21 03:38:32 [multiproc_executor.py:953]   File "weight_utils.py", line 1, in load
(Worker pid=8510) ERROR 11-21 03:38:32 [multiproc_executor.py:953] RuntimeError: start (0) + length (512) exceeds \
dimension size (256).
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
CHAINED = """\
(APIServer pid=8257) ERROR 11-21 03:37:58 [repo_utils.py:124] Error parsing config for /m: Class validation error
Traceback (most recent call last):
    raise ValueError(
ValueError: The hidden size (128) is not a multiple of the number of attention heads (3).

The above exception was the direct cause of the following exception:

huggingface_hub.errors.StrictDataclassClassValidationError: Class validation error for validator:
    ValueError: The hidden size (128) is not a multiple of the number of attention heads (3).
"""
PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (1024). \
[type=value_error, input_value=ArgsKwargs((), {'model': 'm'}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
USAGE = """\
            {chat,complete,serve,launch,bench}
            ...
vllm: error: unrecognized arguments: --nonsense 3
"""
WELL = "(APIServer pid=1) WARNING 11-21 03:28:39 [cpu.py:224] Triton is not installed.\nINFO:     Startup complete.\n"


def test_dtype_quantization_kernel_cache_and_cores_are_read_from_the_log() -> None:
    found = facts(QUANTIZED)
    assert (found.version, found.dtype, found.quantization) == ("0.32.0", "bfloat16", "auto_gptq")
    assert (found.kernel, found.kv_cache_tokens, found.cores) == ("CPUWNA16LinearKernel", 131_072, (4, 5))


STARTED = """\
(APIServer pid=1476) INFO 12-31 23:59:12 [api_utils.py:347]   version 0.32.0
(EngineCore pid=1609) INFO 12-31 23:59:49 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(EngineCore pid=1609) INFO 12-31 23:59:51 [default_loader.py:501] Loading weights took 0.51 seconds
(EngineCore pid=1609) INFO 12-31 23:59:53 [model_runner.py:424] Model loading took 0.01 GiB memory and 2.398877 seconds
(EngineCore pid=1609) INFO 01-01 00:00:56 [core.py:396] init engine (profile, create kv cache, warmup model) took \
63.17 s (compilation: 41.50 s)
(APIServer pid=1476) INFO 01-01 00:00:57 [entry.py:140] Starting vLLM server on http://127.0.0.1:40673
"""


def test_the_parts_of_a_start_are_read_from_the_log_and_are_all_of_it() -> None:
    start = cold_start(STARTED, 110.5, 1.25)
    assert start
    assert (start.weights_s, start.compilation_s, start.first_answer_s) == (2.399, 41.5, 1.25)
    assert start.engine_s == pytest.approx(68 - 2.399 - 41.5)
    assert start.imports_s == pytest.approx(110.5 - 68 - 1.25)
    assert start.text.startswith("imports 41.2 s, weights 2.4 s, compilation 41.5 s, engine 24.1 s, first answer 1.2 s")


def test_of_several_starts_the_last_one_counts_and_without_compilation_or_times_there_is_none() -> None:
    eager = STARTED.replace(" (compilation: 41.50 s)", "").replace("2.398877", "7.5")
    start = cold_start(STARTED + eager, 100, 1)
    assert start
    assert (start.weights_s, start.compilation_s) == (7.5, 0)
    assert cold_start("", 100, 1) is None
    assert cold_start(STARTED.replace("Initializing", "Beginning"), 100, 1) is None
    assert cold_start(STARTED.replace("Starting", "Beginning"), 100, 1) is None


def test_a_quantization_whose_name_has_a_hyphen_is_read_whole() -> None:
    log = QUANTIZED.replace("quantization=auto_gptq", "quantization=compressed-tensors")
    assert facts(log).quantization == "compressed-tensors"


def test_unquantized_weights_have_no_quantization_and_no_kernel() -> None:
    plain = "\n".join(line for line in QUANTIZED.splitlines() if "Kernel" not in line)
    found = facts(plain.replace("quantization=auto_gptq", "quantization=None"))
    assert (found.quantization, found.kernel) == (None, None)


def test_what_the_log_lacks_is_named(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(QUANTIZED.replace("KV cache size", "cache"))
    with pytest.raises(MeasurementFailed, match="does not show its KV cache size") as raised:
        ServerLog(log).facts()
    assert str(log) in raised.value.hint


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (WORKER_FAILED, "RuntimeError: start (0) + length (512) exceeds dimension size (256)."),
        (CHAINED, "ValueError: The hidden size (128) is not a multiple of the number of attention heads (3)."),
        (PYDANTIC, "User-specified max_model_len (4096) is greater than the derived max_model_len (1024)."),
        (USAGE, "error: unrecognized arguments: --nonsense 3"),
        (WELL, None),
    ],
    ids=["in a worker", "chained", "pydantic", "usage", "no error"],
)
def test_the_root_cause_is_found_and_not_its_consequences(log: str, expected: str | None) -> None:
    assert error_in(log) == expected


@pytest.mark.parametrize(
    ("name", "cause", "ended_by"),
    [
        ("missing_kernel", "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'", None),
        ("no_kv_cache", "ValueError: No available memory for the cache blocks. Try increasing", None),
        ("worker_crashed", "!!!!!!! Segfault encountered !!!!!!!", signal.SIGSEGV),
        ("worker_killed", None, signal.SIGKILL),
        ("engine_killed", None, None),
        ("engine_killed_at_once", None, None),
    ],
)
def test_the_log_of_a_dead_server_tells_an_error_from_a_signal(
    name: str, cause: str | None, ended_by: signal.Signals | None
) -> None:
    log = (DEATHS / f"{name}.log").read_text()
    assert (error_in(log) or "").startswith(cause or "")
    assert (error_in(log) is None) == (cause is None)
    assert signal_in(log) == ended_by


def test_an_exception_counts_whatever_its_name_and_without_a_message() -> None:
    traceback = "Traceback (most recent call last):\n  File 'a.py', line 1, in load\n"
    assert error_in(traceback + "AssertionError\n") == "AssertionError"
    assert error_in(traceback + "triton.errors.OutOfResources: shared memory") == "OutOfResources: shared memory"
    assert error_in("OutOfResources: said without a traceback") is None


@pytest.mark.parametrize(
    ("said", "ended_by"),
    [
        ("Fatal Python error: Aborted\n", signal.SIGABRT),
        ("RuntimeError: … Failed core proc(s): {'EngineCore': -9}\n", signal.SIGKILL),
        ("(EngineCore pid=1) INFO [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM", signal.SIGTERM),
    ],
)
def test_a_signal_is_named_as_the_log_names_it(said: str, ended_by: signal.Signals) -> None:
    assert signal_in(said) is ended_by


def test_a_cause_is_short_however_long_the_line() -> None:
    assert len(error_in("ValueError: " + "x" * 5000) or "") == 300


def test_without_an_error_the_last_line_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(WELL)
    assert ServerLog(log).cause() == "INFO:     Startup complete."
    assert last_line("(Worker pid=1) INFO 11-21 03:28:39 [a.py:1] loading\n\n") == "loading"
    assert ServerLog(tmp_path / "none.log").cause() == "it printed nothing"


def test_the_output_of_an_earlier_server_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(WORKER_FAILED)
    later = ServerLog(log, log.stat().st_size)
    with log.open("a") as file:
        file.write(USAGE)
    assert later.cause() == "error: unrecognized arguments: --nonsense 3"


def test_each_fallback_is_reported_once_and_without_the_log_prefix():
    said = "Layer 'x' is not supported by Marlin. Falling back to unoptimized AWQ kernels."
    lines = [f"(Worker pid={number}) WARNING 11-21 03:28:55 [awq.py:327] {said}\n" for number in (6613, 6614)]
    text = QUANTIZED + "".join(lines)
    assert fallbacks(text) == (said,)
    assert facts(text).fallbacks == fallbacks(text)
    assert facts(QUANTIZED).fallbacks == ()


def test_a_start_that_was_measured_says_how_long_another_one_may_take() -> None:
    slow = ColdStart(imports_s=80, weights_s=10, compilation_s=200, engine_s=9, first_answer_s=1)
    quick = ColdStart(imports_s=20, weights_s=1, compilation_s=0, engine_s=3, first_answer_s=1)
    assert startup_s(0, 300, slow) == 3 * 290 + 3 * 10
    assert startup_s(1000 * LOAD_BYTES_PER_S, 300, slow) == 3 * 290 + 1000, "a slower volume"
    assert (startup_s(0, 25, quick), startup_s(0, 25)) == (600 + 3, 900)
