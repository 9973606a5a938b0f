"""The command line as a user meets it: real processes, exit codes, what stands on stdout and stderr."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from pipeline.local.doctor import describe
from stages.parts.machine.hardware import Processor, processor

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "kubernetes", "hera", "pandas", "huggingface_hub")


def slipway(*arguments: str, store: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment | ({"SLIPWAY_STORE": str(store)} if store else {})
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command", ["run", "apply", "models", "plan", "serve", "runs", "show", "logs", "render", "doctor"]
)
def test_every_command_has_help_with_an_example(command):
    ended = slipway(command, "--help")
    assert ended.returncode == 0
    assert f"Example: slipway {command}" in " ".join(ended.stdout.split())


def test_the_command_line_starts_without_heavy_imports():
    code = "import sys, pipeline.cli; print([name for name in sys.argv[1:] if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [(), ("run",), ("rollout", "start")])
def test_help_needs_neither_rich_nor_pydantic_whose_imports_take_longer_than_the_rest(command):
    code = (
        "import atexit, sys; from pipeline.cli import main;"
        "atexit.register(lambda: print([name for name in ('rich', 'pydantic') if name in sys.modules])); main()"
    )
    ended = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=True)
    assert "Example: slipway" in ended.stdout
    assert ended.stdout.endswith("[]\n")


def test_the_commands_are_told_in_whole_sentences_on_a_narrow_terminal():
    listed = slipway("--help", COLUMNS="80").stdout
    assert "..." not in listed.partition("Commands:")[2]


def test_the_version_is_one_line_and_as_json_names_vllm_and_the_processor_too():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert slipway("--version").stdout == f"slipway {project['version']}\n"
    told = json.loads(slipway("--version", "--json").stdout)
    assert told["slipway"] == project["version"]
    assert told["vllm"].startswith("0.")
    assert told["hardware"]["cpu"] in Path("/proc/cpuinfo").read_text()
    found = processor()
    assert told["hardware"].get("processor") == (found.model_dump() if found else None)


def test_what_asks_for_nothing_is_a_mistake():
    for arguments, said in (
        (("--debug",), "Missing command"),
        (("--json", "runs"), "--json belongs after the command"),
    ):
        ended = slipway(*arguments)
        assert ended.returncode == 2
        assert said in ended.stderr


def test_a_mistyped_command_gets_a_suggestion():
    ended = slipway("rnu", "org/name")
    assert ended.returncode == 2
    assert "Did you mean 'run'" in ended.stderr


def test_a_mistyped_profile_gets_a_suggestion_and_starts_nothing(tmp_path):
    ended = slipway("run", "org/name", "--profile", "chatbt", store=tmp_path / "store")
    assert ended.returncode == 2
    assert "did you mean 'chatbot'?" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["a/b/c", "org/..", "org/--x"])
def test_a_name_that_is_no_models_name_starts_nothing(tmp_path, name):
    ended = slipway("run", name, store=tmp_path / "store")
    assert ended.returncode == 2
    assert "is not a model's name" in ended.stderr
    assert "hint: use 'org/name'" in ended.stderr
    assert not (tmp_path / "store").exists()


def test_errors_are_json_too_when_asked(tmp_path):
    ended = slipway("run", "a/b/c", "--json", store=tmp_path)
    document = json.loads(ended.stdout)
    assert document["exit_code"] == ended.returncode == 2
    assert "a/b/c" in document["error"]
    assert document["hint"]


def test_a_store_that_cannot_be_created_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    ended = slipway("run", "org/name", store=tmp_path / "file" / "store")
    assert ended.returncode == 2
    assert "cannot use" in ended.stderr
    assert "--store" in ended.stderr


def test_a_port_in_use_is_found_before_any_work(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = slipway("run", "org/name", "--set", f"serving.port={port}", store=tmp_path / "store")
    assert ended.returncode == 32
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert not (tmp_path / "store").exists()


def test_a_missing_config_file_is_a_clear_error(tmp_path):
    ended = slipway("run", "org/name", "--config", str(tmp_path / "none.yaml"), store=tmp_path)
    assert ended.returncode == 2
    assert "there is no file" in ended.stderr


def test_render_prints_the_workflow_that_run_would_execute():
    rendered = yaml.safe_load(slipway("render", "workflow").stdout)
    assert rendered["kind"] == "WorkflowTemplate"
    names = [each["name"] for each in rendered["spec"]["templates"]]
    stages = [
        "resolve",
        "acquire",
        "check",
        "candidates",
        "optimize",
        "optimize-rewrite",
        "evaluate",
        "select",
        "serve",
        "ending",
    ]
    assert names == [*stages, "resolve-daily", "pipeline"]


def test_render_config_shows_the_settings_that_apply():
    rendered = yaml.safe_load(slipway("render", "config", "--set", "serving.port=9").stdout)
    assert rendered["serving"]["port"] == 9


def test_render_of_something_else_names_the_known_documents():
    ended = slipway("render", "workflw")
    assert ended.returncode == 2
    assert "did you mean 'workflow'?" in ended.stderr


def test_an_empty_store_has_no_runs_and_says_how_to_start_one(tmp_path):
    assert "slipway run MODEL" in slipway("runs", store=tmp_path).stdout
    assert json.loads(slipway("runs", "--json", store=tmp_path).stdout) == []


@pytest.mark.parametrize("command", ["show", "logs"])
def test_a_run_that_is_not_there_is_a_clear_error(tmp_path, command):
    ended = slipway(command, "20200101-000000-0000", store=tmp_path)
    assert ended.returncode == 51
    assert "is not a run" in ended.stderr


def test_serving_what_was_never_published_is_a_clear_error(tmp_path):
    ended = slipway("serve", "org/name", store=tmp_path)
    assert ended.returncode == 33
    assert "slipway run org/name" in ended.stderr


def test_a_model_that_does_not_exist_fails_with_its_own_exit_code_and_leaves_a_report(tmp_path, hub):
    ended = slipway("run", "org/nothing", store=tmp_path, HF_ENDPOINT=hub.url)
    assert ended.returncode == 10
    assert "error: resolve.commit:" in ended.stderr
    assert "org/nothing" in ended.stderr.splitlines()[-2]
    shown = slipway("show", store=tmp_path)
    assert shown.returncode == 0
    assert "Failed" in shown.stdout
    (report,) = tmp_path.glob("org--nothing/runs/*/report.html")
    assert "No variant was chosen" in report.read_text()
    logs = slipway("logs", "latest", "resolve", store=tmp_path)
    assert "org/nothing" in logs.stdout
    assert slipway("logs", "latest", "reslove", store=tmp_path).returncode == 2


@pytest.mark.slow
def test_no_network_is_tried_again_and_then_said(tmp_path):
    quick = ["--set", "platform.retries.limit=1", "--set", "platform.retries.backoff_s=1"]
    ended = slipway("run", "org/name", *quick, store=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.returncode == 75
    assert "127.0.0.1:9" in ended.stderr


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            Processor(avx2=True, avx512=False, bf16=False, amx=False),
            "AVX2 without AVX-512: float32 arithmetic; vLLM's CPU build serves int8, w8a8; experts in 16 bit only, "
            "without AMX",
        ),
        (
            Processor(avx2=True, avx512=True, bf16=False, amx=False),
            "AVX-512 without bf16: float32 arithmetic; vLLM's CPU build serves int8, gptq, awq, w4a16, w8a8; experts "
            "in 16 bit only, without AMX",
        ),
        (
            Processor(avx2=True, avx512=True, bf16=True, amx=True),
            "AMX: bfloat16 arithmetic; vLLM's CPU build serves int8, gptq, fp8-block, awq, w4a16, w8a8",
        ),
        (Processor(avx2=False, avx512=False, bf16=False, amx=False), "no AVX2"),
        (None, platform.machine()),
    ],
)
def test_the_doctor_says_what_follows_from_the_processor(found, told):
    check = describe(found)
    assert check.found == told
    assert (check.state, bool(check.hint)) == (("warning", True) if told == "no AVX2" else ("ok", False))


def test_the_doctor_names_what_is_there_and_what_is_not(tmp_path):
    ended = slipway("doctor", "--json", store=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    checks = {each["what"]: each for each in json.loads(ended.stdout)}
    assert checks["Python"]["state"] == "ok"
    assert checks["vllm"]["state"] == "ok"
    assert checks["processor"]["found"] == describe(processor()).found
    assert checks["hub"]["state"] == "warning"
    assert "HF_ENDPOINT" in checks["hub"]["hint"]
    assert ended.returncode == 0


def test_the_doctor_names_the_gpus(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H200, 143771 MiB"\n')
    program.chmod(0o755)
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = slipway("doctor", "--json", store=tmp_path, CUDA_VISIBLE_DEVICES="0", **variables)
    assert {"NVIDIA H200, 143771 MiB"} == {each["found"] for each in json.loads(ended.stdout) if each["what"] == "GPUs"}
