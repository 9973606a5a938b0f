from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.settings.config import NAMED, RunConfig, load, names
from pipeline.settings.platform import Platform
from scoring.criteria import DEFAULT
from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import CONFIGS, read_yaml


def test_the_defaults_file_says_what_the_code_says() -> None:
    config, written = load(), read_yaml(CONFIGS / "defaults.yaml")
    assert config == RunConfig(profile=config.profile, workload=config.workload, platform=config.platform)
    assert {**config.model_dump(mode="json"), **dict.fromkeys(NAMED)}.keys() == written.keys()
    for owner in ("optimize", "serving", "rollout", "kserve"):
        assert fields(config.model_dump(mode="json")[owner]) == fields(written[owner]), owner


def fields(settings: Any) -> Any:
    """The names of fields, whatever their values; a mapping that is empty by default counts as a value."""
    return {name: fields(value) for name, value in settings.items()} if isinstance(settings, dict) else None


def test_a_protocol_sets_the_profiles_error_rate_unless_the_profile_does():
    assert load().profile.error_rate == 0.05
    assert load(assignments=["workload.protocol=thorough"]).profile.error_rate == 0.02
    own = ["workload.protocol=thorough", "profile.error_rate=0.1"]
    assert load(assignments=own).profile.error_rate == 0.1


def test_the_default_weights_are_those_of_the_promise():
    assert load().profile.weights == DEFAULT
    assert DEFAULT.model_dump() == {"quality": 0.5, "latency": 0.2, "throughput": 0.2, "memory": 0.1}


@pytest.mark.parametrize("kind", ["profile", "workload", "platform"])
def test_everything_in_configs_loads_by_its_name(kind):
    assert names(kind)
    for name in names(kind):
        assert getattr(load(chosen={kind: name}), kind).name == name


def test_a_flag_beats_the_file_and_the_file_beats_the_defaults(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("profile: chatbot\nserving: {max_model_len: 4096, port: 9000}\n")
    config = load(file, assignments=["serving.port=9001"])
    assert (config.profile.name, config.serving.max_model_len, config.serving.port) == ("chatbot", 4096, 9001)
    assert config.serving.dtype == "auto"
    assert load(file, chosen={"profile": "batch"}).profile.name == "batch"
    assert load(file, chosen={"profile": None}).profile.name == "chatbot"


def test_one_field_of_a_named_profile_can_be_changed():
    weights = load(chosen={"profile": "chatbot"}, assignments=["profile.weights.latency=0.7"]).profile.weights
    assert (weights.latency, weights.quality) == (0.7, 0.4)


def test_paths_in_a_file_are_relative_to_it(tmp_path, monkeypatch):
    folder = tmp_path / "deep"
    (folder / "tasks").mkdir(parents=True)
    workload = {
        "trace": "own.jsonl", "concurrency": 1,
        "quality_tasks": ["mine"], "tasks_path": "tasks", "divergence_text": "mine.txt",
    }  # fmt: skip
    (folder / "load.yaml").write_text(yaml.safe_dump(workload))
    (folder / "own.yaml").write_text("workload: load.yaml\n")
    monkeypatch.chdir(tmp_path)
    config = load(Path("deep/own.yaml"))
    assert config.workload.name == "load"
    assert config.workload.tasks_path == str(folder / "tasks")
    assert config.workload.trace == str(folder / "own.jsonl")
    assert config.workload.divergence_text == str(folder / "mine.txt")
    assert load(chosen={"workload": "deep/load.yaml"}).workload == config.workload


def test_a_trace_with_wrong_lines_is_found_before_any_work(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "Hi", "output_tokens": 1}\n{"prompt": "Hi"}\n[]\n')
    workload = {"trace": "own.jsonl", "concurrency": 1, "quality_tasks": ["mine"]}
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(workload))
    with pytest.raises(ConfigError, match=r"2 mistakes in the trace") as caught:
        load(chosen={"workload": str(tmp_path / "load.yaml")})
    assert "line 2: " in str(caught.value)
    assert "line 3: " in str(caught.value)


def test_every_mistake_is_shown_at_once():
    wrong = [
        "serving.max_model_length=3",
        "optimize.group_size=7",
        "profile.weights.quality=-1",
        "serving.port=99999",
        "optimize.variants=[awg]",
        "nonsense",
    ]
    with pytest.raises(ConfigError) as caught:
        load(chosen={"workload": "chatt"}, assignments=wrong)
    text = caught.value.render()
    assert "7 mistakes in the configuration" in text
    for line in (
        "unknown workload 'chatt' (did you mean 'chat'?",
        "serving.max_model_length: unknown field, did you mean 'max_model_len'?",
        "optimize.group_size: Input should be 32, 64 or 128 (got '7')",
        "profile.weights.quality: Input should be greater than or equal to 0 (got '-1')",
        "serving.port: Input should be less than or equal to 65535",
        "optimize.variants: unknown variant 'awg'",
        "--set nonsense: not of the form path.to.field=value",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("profile: [", "is not valid YAML"),
        ("- a\n- b\n", "must hold fields with values, not a list"),
        ("\x00", "is not valid YAML"),
        ("profiel: chatbot\n", "profiel: unknown field, did you mean 'profile'?"),
        ("profile: {name: zero, weights: {quality: 0, latency: 0, throughput: 0, memory: 0}}", "all weights are zero"),
    ],
)
def test_a_wrong_file_is_a_clear_error(tmp_path, content, problem):
    file = tmp_path / "own.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")) as caught:
        load(file)
    assert "own.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "instead"),
    [
        ("replicas=2", "kserve.scaling.minimum"),
        ("affinity=client", "kserve.llm.scheduler"),
        ("request_timeout_s=60", "kserve.timeout_s"),
        ("host=0.0.0.0", "the listeners of the Gateway"),
        ("port=9000", "the listeners of the Gateway"),
        ("plain_http=true", "the listeners of the Gateway"),
        ("shared_port=8000", "kserve.shared_host"),
        ("metrics_address=127.0.0.1:9400", "manifests/monitoring"),
    ],
)
def test_a_setting_of_the_endpoint_on_one_machine_is_refused_on_a_cluster(assignment: str, instead: str) -> None:
    field = assignment.partition("=")[0]
    load(assignments=[f"serving.{assignment}"])
    with pytest.raises(ConfigError, match=f"serving.{field} is for one machine; on gke: {instead}"):
        load(chosen={"platform": "gke"}, assignments=[f"serving.{assignment}"])


def test_a_certificate_of_one_machine_is_refused_on_a_cluster() -> None:
    files = ["serving.tls_certificate=/a.pem", "serving.tls_key=/b.pem"]
    load(assignments=files)
    with pytest.raises(ConfigError, match=r"serving.tls_certificate is for one .*; serving.tls_key is for one machine"):
        load(chosen={"platform": "gke"}, assignments=files)


@pytest.mark.parametrize(
    "field", ["workload.trace", "workload.tasks_path", "workload.divergence_text", "optimize.calibration.text"]
)
def test_a_file_that_pods_could_not_read_is_refused_before_a_run_on_a_cluster(field: str, tmp_path: Path) -> None:
    lengths = ["workload.prompt_tokens=null", "workload.output_tokens=null"]
    lengths += ["workload.prompt_spread=0", "workload.output_spread=0"]
    others = lengths if field == "workload.trace" else []

    def chosen(path: str, platform: str) -> None:
        load(chosen={"platform": platform}, assignments=[*others, f"{field}={path}"])

    chosen(f"{tmp_path}/mine.jsonl", "local")
    with pytest.raises(ConfigError, match=rf"{field} names .*mine.jsonl.* gke can't read: .*/mnt/models/"):
        chosen(f"{tmp_path}/mine.jsonl", "gke")
    chosen("/mnt/models/own/mine.jsonl", "gke")


def test_a_run_makes_what_it_compares_with() -> None:
    values = "{quality: 0.62, latency: 900, throughput: 400, memory: 16.0e+9}"
    for reference in ("fp16", "int8", values):
        load(assignments=[f"profile.reference={reference}"])
    for reference in ("int8", values):
        load(assignments=[f"profile.reference={reference}", "optimize.variants=[int8, gptq]"])
    with pytest.raises(ConfigError) as caught:
        load(assignments=["optimize.variants=[int8, gptq]"])
    assert str(caught.value).splitlines()[1] == (
        "    optimize.variants: fp16, with which the others are compared, is not among them: add it, or name another "
        "one, or fixed values, in profile.reference"
    )


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "own.yaml").write_text("# nothing yet\n")
    assert load(tmp_path / "own.yaml") == load()


def test_all_and_any_become_what_the_machine_has():
    platform = load().platform
    without = platform.on(cores=6, gpus=0).stages
    assert (without.evaluate.cpu, without.evaluate.gpus, without.optimize.gpus) == ("6", 0, 0)
    four = platform.on(cores=6, gpus=4).stages
    assert (four.evaluate.gpus, four.optimize.gpus) == (4, 1)


def test_a_wrong_quantity_is_refused():
    data = read_yaml(CONFIGS / "platforms" / "local.yaml")
    data["stages"]["select"]["memory"] = "4 gigs"
    with pytest.raises(ValueError, match=r"4 gigs.*is not a Kubernetes quantity"):
        Platform.model_validate({"name": "own"} | data)
