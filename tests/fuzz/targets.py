"""The parsers of what comes from outside: for each, how its input is made, and what reads it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from pipeline.events.push import PROVIDERS
from pipeline.events.receiver import Malformed, parsed
from pipeline.local.runs import LocalRun
from pipeline.planning.fleet import read_fleet
from pipeline.settings.config import load
from pipeline.upkeep.checking import Digests
from pipeline.upkeep.checking import check as check_store
from scoring.capacity.architecture import NotSizeable
from scoring.capacity.families import read_architecture
from stages.evaluate.trace import read_trace
from stages.parts.base.files import safe_relative
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import CONFIGS, parse_json
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint import access_log, database
from stages.parts.endpoint.clients import FILE as CLIENTS
from stages.parts.endpoint.clients import Client, Clients, hash_of, read_clients
from stages.parts.endpoint.door import CLIENT_HEADER, MODEL_HEADER, Door, _Service
from stages.parts.endpoint.routing import OFFERED
from stages.parts.endpoint.usage import take_in
from stages.parts.model.adapter import Adapter, read_adapter, refuse_misfit
from stages.parts.model.candidates import compare
from stages.parts.model.checkpoint import INDEX, card_license, check, check_configuration, weight_files
from stages.parts.model.description import Description, describe_directory
from stages.parts.model.safetensors import find_not_finite, main_dtype, read_header
from stages.parts.releases.listing import catalogue as releases
from stages.parts.releases.listing import summarized_moves
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import decisions, numbered, probes
from stages.parts.vllm.parsers import chat_model, chosen_parsers
from stages.select.verify import verify
from tests.fuzz.altering import ODD, damaged, some, text
from tests.hub.models import tiny_model, write_model
from tests.pipeline.events.receiving import WEBHOOKS
from tests.samples import MODEL
from tests.serving import REPOSITORY

Files = dict[str, bytes]
"""By path in the folder of the target."""
Parser = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """What reads a kind of input."""

    make: Callable[[Random], Files]
    parsers: tuple[Parser, ...]
    """Each is asked, whatever the others say."""
    prepare: Callable[[Path], object] = lambda _: None
    """Puts into the folder what is not altered."""
    names_files: bool = False
    """Whether the input is the user's own, who may name any file to be read."""
    refusals: tuple[type[Exception], ...] = ()
    """Besides our errors."""
    inputs: int = 60
    """Of those that a test tries."""


# Models

HEADER: Final = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "model.layers.0.mlp.up_proj.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [32, 40]},
    "model.layers.0.mlp.up_proj.weight_scale": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [40, 44]},
    "model.layers.0.mlp.up_proj.weight_packed": {"dtype": "I32", "shape": [1], "data_offsets": [44, 48]},
}
QUANTIZATIONS: Final[tuple[dict[str, Any], ...]] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "mxfp4"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None},
                "input_activations": {"num_bits": 8, "type": "int"},
            }
        },
    },
)
TEMPLATE: Final = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<think>"
)
TOKENIZER: Final = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<think>", "special": True}, {"id": 4, "content": "</think>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
TOKENIZER_CONFIG: Final = {"chat_template": TEMPLATE + " tools", "tokenizer_class": "PreTrainedTokenizerFast"}
ADAPTER: Final = {
    "peft_type": "LORA",
    "r": 8,
    "rank_pattern": {"q_proj": 16},
    "fan_in_fan_out": False,
    "base_model_name_or_path": "org/base",
}
LORA: Final = {
    "base_model.model.model.layers.0.q_proj.lora_A.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "base_model.model.model.layers.0.q_proj.lora_B.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [32, 64]},
    "base_model.model.lm_head.base_layer.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [64, 80]},
}
BASE: Final = {"model.layers.0.q_proj.weight": (4, 4), "model.embed_tokens.weight": (2, 2), "lm_head.weight": (2, 2)}
CARD: Final = {"license": "other", "license_name": "mine", "tags": ["a", "b"], "date": "2026-01-02"}


@cache
def configs() -> list[dict[str, Any]]:
    """The configurations of many families."""
    published = yaml.safe_load((REPOSITORY / "tests/scoring/published_models.yaml").read_text(encoding="utf-8"))
    own = json.loads((REPOSITORY / "tests/demo/model/config.json").read_bytes())
    plain = [own, *({"architectures": ["LlamaForCausalLM"]} | each["config"] for each in published.values())]
    return [*plain, *(own | {"quantization_config": each} for each in QUANTIZATIONS)]


def safetensors(header: dict[str, Any], random: Random) -> bytes:
    """A file of weights with an altered header."""
    written = text(header, random)
    length = len(written) if random.random() < 0.9 else random.choice((0, 7, 2**24, 2**63, len(written) + 1))
    end = max((each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"), default=0)
    data = random.randbytes(random.choice((end, end, end, 0, end - 1, end + 9)))
    return length.to_bytes(8, "little") + written + data


def prepare_model(folder: Path) -> None:
    import transformers.models.auto.configuration_auto  # noqa: F401 - which takes seconds

    write_model(folder, tiny_model() | {"tokenizer.json": json.dumps(TOKENIZER).encode()})


def sized(folder: Path) -> None:
    with contextlib.suppress(NotSizeable):
        read_architecture(describe_directory(folder, "./model").config)


def described(folder: Path, template: str = "") -> Description:
    return Description("org/name", None, {"model_type": "llama", "text_config": template}, None, directory=folder)


def compared(folder: Path) -> object:
    return compare(described(folder / "own"), described(folder))


def prepare_two(folder: Path) -> None:
    prepare_model(folder)
    (folder / "own").mkdir()
    prepare_model(folder / "own")


def index(random: Random) -> Files:
    shards = {name: f"model-{number:05}-of-00003.safetensors" for number, name in enumerate(HEADER, 1)}
    return {INDEX: text({"metadata": {"total_size": 48}, "weight_map": shards}, random)}


def shards_of(folder: Path) -> None:
    paths = ["config.json", INDEX, *(f"model-{number:05}-of-00003.safetensors" for number in range(6))]
    for path in weight_files(paths, folder):
        assert "/" not in str(safe_relative(path))


def fits(folder: Path) -> None:
    adapter = read_adapter(folder, "./adapter")
    refuse_misfit(adapter, BASE, "org/base")
    refuse_misfit(Adapter("a", adapter.config, dict.fromkeys(adapter.shapes, ())), BASE, "org/base")


def card(random: Random) -> Files:
    front = "\n".join(f"{name}: {json.dumps(value)}" for name, value in CARD.items())
    return {"README.md": f"---\n{yaml_of(front, random)}\n---\n# Model\n".encode(errors="replace")}


# Settings

SNIPPETS: Final = (
    *("&a [1, 2]", "*a", "&a [*a]", "<<: {a: 1}", "!!python/object/apply:os.system ['true']", "!!binary aGk=", "? [1]"),
    *("2024-13-45", "2024-02-30 25:00:00", "0b_", "!!int x", "!!float x", "!!timestamp x", "1:99", "~", "- -", "\t"),
    *("'", "|", ">", "{", "}", "[" * 3_000, "{a: " * 3_000, "!", "%", "@", "!!set {a}", "!!omap [a: 1]", "0o9", ".inf"),
)


def yaml_of(written: str, random: Random) -> str:
    """Put what only YAML knows in place of something in a text."""
    if random.random() < 0.5:
        start = random.randrange(len(written) + 1)
        written = written[:start] + random.choice(SNIPPETS) + written[start + random.randrange(12) :]
    return written


def document(value: Any, random: Random) -> bytes:
    return yaml_of(text(value, random).decode(errors="replace"), random).encode(errors="replace")


def yaml_file(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


@cache
def defaults() -> Any:
    return yaml_file("defaults.yaml")


@cache
def workloads() -> list[Any]:
    return [yaml_file(f"workloads/{path.name}") for path in sorted((CONFIGS / "workloads").glob("*.yaml"))]


FLEET: Final = {
    "defaults": {"profile": "chatbot", "optimize": {"variants": ["fp16"], "group_size": 64}, "owner": "platform"},
    "models": [
        {"model": "org/chat", "schedule": "nightly", "serving": {"port": 8001, "recipes": ["mtp"]}},
        {"model": "./code", "profile": "quality", "revision": "v1", "serving": {"port": 8002}, "platform": "local"},
        {"model": "org/search", "workload": {"extends": "chat", "trace": "t.jsonl"}, "rollout": {"approval": True}},
    ],
}
ASSIGNMENTS: Final = ("serving.port=8001", "workload.name=mine", "profile=quality", "optimize.variants=[fp16, int8]")


def assignments(random: Random) -> Files:
    return {"assignment": yaml_of(random.choice(ASSIGNMENTS), random).encode(errors="replace")}


def assigned(folder: Path) -> object:
    return load(assignments=[(folder / "assignment").read_text(errors="replace")])


def names(random: Random) -> Files:
    kind = random.choice(("profile", "workload", "platform"))
    return {"name": json.dumps({kind: some(random.choice(("chat", "./chat.yaml", *ODD)), random)}).encode()}


def named(folder: Path) -> object:
    given = json.loads((folder / "name").read_bytes())
    return load(chosen={kind: name if isinstance(name, str) else None for kind, name in given.items()}), load(
        folder / "name", given=given
    )


TRACE: Final = ({"prompt": "What is a slipway?", "output_tokens": 20}, {"prompt_tokens": 100, "output_tokens": 7})


def lines(documents: tuple[Any, ...], random: Random) -> bytes:
    return b"\n".join(text(each, random) for each in random.sample(documents, len(documents)))


# What a store holds

OLD_STORE: Final = REPOSITORY / "tests/pipeline/store_of_0_2_0"
RUNS: Final = ("20260102-030405-6a1b", "20260103-030405-6a1b")


@cache
def records() -> dict[str, bytes]:
    paths = (path for path in sorted(OLD_STORE.rglob("*.json*")) if path.stat().st_size < 100_000)
    return {str(path.relative_to(OLD_STORE)): path.read_bytes() for path in paths}


def record(random: Random) -> Files:
    name = random.choice(sorted(records()))
    content = records()[name]
    if name.endswith(".jsonl"):
        return {name: lines(tuple(json.loads(line) for line in content.splitlines()[:20]), random)}
    return {name: text(json.loads(content), random)}


def prepare_store(folder: Path) -> None:
    shutil.copytree(OLD_STORE, folder, dirs_exist_ok=True)
    store = stored(folder)
    release = max(path.name for path in store.releases.iterdir())
    store.production.symlink_to(Path("releases", release))


def stored(folder: Path) -> ModelStore:
    return ModelStore(folder, MODEL)


def serving_of_releases(folder: Path) -> None:
    for release in numbered(stored(folder)).values():
        pinned(stored(folder), AskedServing(), release)


def probes_of_releases(folder: Path) -> None:
    for release in numbered(stored(folder)).values():
        probes(stored(folder), release)


def reported(folder: Path) -> None:
    for run in RUNS:
        _ = LocalRun(stored(folder).run(run), state=None).outcome  # type: ignore[arg-type]


# What clients and registries send

CHAT: Final = {
    "model": "org/name",
    "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text"}]}],
    "stream": True,
}
KEY: Final = "sk-slipway-" + "x" * 43
LOG: Final = f"log/{access_log.NAME}"
LOGGED: Final = (
    {"id": "1", "at": 1.5, "client": "ours", "path": "/v1/completions", "status": 200, "prompt_tokens": 7},
    {"id": "2", "at": 2.5, "client": None, "status": 0, "flags": "DC", "duration_ms": 3.5, "output_tokens": 2},
    {"server": "s", "at": 3.5, "model": MODEL, "release": "r", "prompt_tokens": 9, "output_tokens": 3},
)


def webhook(random: Random) -> Files:
    return {"body": text(WEBHOOKS[random.choice(sorted(WEBHOOKS))], random)}


def received(provider: str, folder: Path) -> object:
    return PROVIDERS[provider].push(parsed((folder / "body").read_bytes())).document()


def request(random: Random) -> Files:
    odd = [each for each in ODD if isinstance(each, str)]
    path = random.choice((*OFFERED, f"/{MODEL_HEADER}/v1/chat/completions", "/x-slipway-under-way", *odd))
    headers = {
        "authorization": random.choice((f"Bearer {KEY}", f"bearer  {KEY}", "Bearer ", "Basic x", *odd)),
        "x-request-id": random.choice(("1", *odd)),
        "x-session-id": random.choice(("", "", "s", *odd)),
        CLIENT_HEADER: random.choice(("ours", *odd)),
    }
    body = text(CHAT, random)
    body = body[: random.randrange(len(body) + 1)] if random.random() < 0.2 else body
    head = {"method": random.choice(("GET", "POST", "")), "path": path, "headers": headers}
    return {"head": json.dumps(head).encode(), "body": body}


def ask(folder: Path, *, shared: bool) -> None:
    """Ask the door as Envoy does, which answers by a status that Envoy understands."""
    head, body = json.loads((folder / "head").read_bytes()), (folder / "body").read_bytes()
    door = Door(folder, MODEL, "")
    door.adapters = frozenset({"adapter"})
    door.shared = (MODEL, "org/other") if shared else None
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in head["headers"].items()]
    scope = {"type": "http", "method": head["method"], "headers": headers, "path": head["path"], "query_string": b""}
    scope["raw_path"] = head["path"].encode("latin-1", "replace")
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    loop().run_until_complete(_Service(door, folder / access_log.NAME)(scope, receive, send))
    assert sent[0]["status"] in (200, 400, 401, 403, 404, 429)


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def prepare_door(folder: Path) -> None:
    ours = Client(name="ours", key_sha256=hash_of(KEY), models=(MODEL, "adapter"), requests_per_minute=10**6)
    Clients(clients=(ours,)).write(folder / CLIENTS)


def counted(folder: Path) -> None:
    door = Door(folder, MODEL, "")
    for logged in access_log.LogReader(folder / LOG).requests():
        door.under_way[logged.id] = "anybody"
        door.decide("", logged.id, 1.0)
        door.note(logged, 1.0)


def taken_in(folder: Path) -> None:
    (folder / database.FILE).unlink(missing_ok=True)
    with database.opened(folder) as opened:
        take_in(opened, folder / "log")


def json_file(name: str, documents: Callable[[], list[Any]]) -> Callable[[Random], Files]:
    return lambda random: {name: text(random.choice(documents()), random)}


TARGETS: Final[dict[str, Target]] = {
    "safetensors": Target(
        lambda random: {"model.safetensors": safetensors(HEADER, random)},
        (
            lambda folder: main_dtype(read_header(folder / "model.safetensors").values()),
            lambda folder: find_not_finite(read_header(folder / "model.safetensors").values()),
            lambda folder: check(folder, ["model.safetensors"]),
        ),
        prepare_model,
    ),
    "index": Target(index, (shards_of,)),
    "config.json": Target(
        json_file("config.json", configs),
        (
            check_configuration,
            sized,
            lambda folder: check(folder, ["model.safetensors"]),
            lambda folder: chosen_parsers(AskedServing(), chat_model(folder)),
        ),
        prepare_model,
        inputs=15,
    ),
    "tokenizer": Target(
        lambda random: {
            "tokenizer.json": text(TOKENIZER, random),
            "tokenizer_config.json": text(TOKENIZER_CONFIG, random),
            "chat_template.jinja": damaged(TEMPLATE.encode(), random),
        },
        (check_configuration, compared, lambda folder: chosen_parsers(AskedServing(), chat_model(folder))),
        prepare_two,
    ),
    "model card": Target(card, (lambda folder: card_license(folder / "README.md"),)),
    "adapter": Target(
        lambda random: {
            "adapter_config.json": text(ADAPTER, random),
            "adapter_model.safetensors": safetensors(LORA, random),
        },
        (fits,),
    ),
    "records": Target(
        record,
        (
            lambda folder: check_store(stored(folder), Digests()),
            lambda folder: releases(stored(folder)),
            lambda folder: summarized_moves(stored(folder)),
            lambda folder: decisions(stored(folder)),
            serving_of_releases,
            probes_of_releases,
            reported,
        ),
        prepare_store,
        inputs=10,
    ),
    "decisions": Target(record, (lambda folder: verify(stored(folder).run(RUNS[0])),), prepare_store, inputs=5),
    "clients": Target(
        lambda random: {
            CLIENTS: text({"clients": [{"name": "a", "key_sha256": "0" * 64, "models": ["org/name"]}]}, random)
        },
        (read_clients,),
    ),
    "settings": Target(
        lambda random: {"mine.yaml": document(defaults(), random)},
        (lambda folder: load(folder / "mine.yaml"),),
        names_files=True,
        inputs=5,
    ),
    "assignments": Target(assignments, (assigned,), names_files=True, inputs=5),
    "names": Target(names, (named,), names_files=True, inputs=5),
    "fleet.yaml": Target(
        lambda random: {"fleet.yaml": document(FLEET, random)},
        (lambda folder: read_fleet(folder / "fleet.yaml", None, on_cluster=False),),
        names_files=True,
        inputs=5,
    ),
    "workloads": Target(
        lambda random: {"workload.json": text(random.choice(workloads()), random)},
        (lambda folder: parse_json(Workload, (folder / "workload.json").read_text(errors="replace"), "--workload"),),
    ),
    "traces": Target(
        lambda random: {"trace.jsonl": lines(TRACE, random)}, (lambda folder: read_trace(folder / "trace.jsonl"),)
    ),
    "webhooks": Target(
        webhook,
        tuple(partial(received, provider) for provider in PROVIDERS),
        refusals=(Malformed,),
    ),
    "access log": Target(
        lambda random: {LOG: lines(LOGGED, random)}, (counted, taken_in), lambda folder: (folder / "log").mkdir()
    ),
    "door": Target(
        request,
        (lambda folder: ask(folder, shared=False), lambda folder: ask(folder, shared=True)),
        prepare_door,
    ),
}
