from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.parts.base.errors import DamagedModel, ModelNotFound, UnusableModel
from stages.parts.model.description import describe_model
from tests.hub import HubServer
from tests.hub.models import CONFIG, big_weights, sharded_model, tiny_model, write_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def config(**changed: object) -> dict[str, bytes]:
    return {"config.json": json.dumps(CONFIG | changed).encode()}


def index(**metadata: object) -> dict[str, bytes]:
    whole = json.loads(sharded_model()[INDEX])
    return {INDEX: json.dumps(whole | {"metadata": metadata}).encode()}


def test_of_a_model_in_one_file_only_the_header_is_read(hub: HubServer) -> None:
    commit = hub.add_repo("org/tiny", tiny_model(**{"model.safetensors": big_weights(8)}))
    described = describe_model("org/tiny", "main")
    assert (described.model, described.commit, described.parameters) == ("org/tiny", commit, 8 * 256 * 1024)
    assert (described.config, described.tensors) == (CONFIG, {"big"})
    (header,) = hub.requests_for("*/model.safetensors")
    assert header.range == "bytes=0-100000"
    assert sum(each.sent for each in hub.requests) < 200_000


@pytest.mark.parametrize(
    ("metadata", "dtype", "count"),
    [
        ({"total_size": 4000}, "bfloat16", 2000),
        ({"total_size": 4000}, "float32", 1000),
        ({"total_size": 4000, "total_parameters": 1500}, "bfloat16", 1500),
        ({"total_size": 4000}, None, None),
        ({}, "bfloat16", None),
    ],
)
def test_of_a_model_in_shards_only_the_index_is_read(
    hub: HubServer, metadata: dict[str, object], dtype: str | None, count: int | None
) -> None:
    hub.add_repo("org/tiny", sharded_model(**index(**metadata), **config(dtype=dtype)))
    described = describe_model("org/tiny", "main")
    assert (described.parameters, described.tensors) == (count, {"embed", "head"})
    assert not hub.requests_for("*.safetensors")


def test_the_type_of_the_weights_may_be_the_text_models(hub: HubServer) -> None:
    sharded = sharded_model(**index(total_size=4000), **config(dtype=None, text_config={"dtype": "bfloat16"}))
    hub.add_repo("org/seeing", sharded)
    assert describe_model("org/seeing", "main").parameters == 2000


def test_a_local_model_is_counted_by_the_headers_of_its_files(tmp_path: Path) -> None:
    for files in (tiny_model(), sharded_model()):
        directory = write_model(tmp_path / str(len(files)), files)
        described = describe_model(str(directory), "main")
        assert (described.commit, described.parameters, described.tensors) == (None, 2 * 8 * 8, {"embed", "head"})


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        (tiny_model(**config(quantization_config={"quant_method": "bitsandbytes"})), UnusableModel, "by bitsandbytes"),
        (tiny_model(**{"config.json": b"[]"}), DamagedModel, "config.json is not a JSON object"),
        (tiny_model(**{"config.json": b"{"}), DamagedModel, "config.json is not JSON"),
        (tiny_model(**{"model.safetensors": b"x" * 100}), DamagedModel, "not a safetensors file"),
        (tiny_model(**{"model.safetensors": None, "pytorch_model.bin": b"x"}), UnusableModel, "only pickles"),
        (sharded_model(**{INDEX: b"{"}), DamagedModel, "index.json is not JSON"),
    ],
)
def test_what_a_run_would_refuse_is_refused_by_the_same_words(
    hub: HubServer, files: dict[str, bytes], error: type[Exception], said: str
) -> None:
    hub.add_repo("org/tiny", files)
    with pytest.raises(error, match=said):
        describe_model("org/tiny", "main")


def test_a_model_that_is_nowhere_is_not_found(hub: HubServer) -> None:
    with pytest.raises(ModelNotFound, match="has no model org/none"):
        describe_model("org/none", "main")
    with pytest.raises(ModelNotFound, match="there is no directory"):
        describe_model("./no-such-model", "main")
