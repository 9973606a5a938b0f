"""The Envoy at the address that all models share, before the Envoy of an endpoint with adapters, and before none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from stages.parts.base.serving_settings import AskedServing
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.envoy import SHARED_SOCKET, proxying
from stages.parts.endpoint.routing import Backend, Routing
from stages.parts.endpoint.tls import Tls
from stages.parts.vllm.client import credentials, http
from stages.parts.vllm.server import reserved_port
from tests.stages.parts.endpoint.test_clients import MODEL, Front, error_of, serving
from tests.stages.parts.endpoint.test_tls import Made, made

__all__ = ["made"]
ADAPTERS = ("sql", "support")
GONE = "org/gone"


@dataclass(frozen=True)
class Shared:
    url: str
    front: Front
    certificate: str | None

    def ask(self, key: str, model: str) -> httpx.Response:
        body, url = {"model": model, "prompt": "x"}, f"{self.url}/v1/completions"
        return http(self.certificate).post(url, json=body, headers=credentials(key))

    def names(self, key: str) -> list[str]:
        reply = http(self.certificate).get(f"{self.url}/v1/models", headers=credentials(key))
        return [model["id"] for model in reply.json()["data"]]


@contextlib.contextmanager
def sharing(folder: Path, tls: Tls | None = None) -> Iterator[Shared]:
    """One model with adapters, and one whose endpoint does not answer at the moment."""
    with serving(folder, adapters=ADAPTERS) as front, reserved_port("127.0.0.1", 0) as port:
        models = {MODEL: MODEL, GONE: GONE} | dict.fromkeys(ADAPTERS, MODEL)
        sockets = {MODEL: str(front.files / SHARED_SOCKET), GONE: str(folder / "gone.sock")}
        orders = {model: ((Backend(model, socket),),) for model, socket in sockets.items()}
        door = Door(folder, "", "")
        door.shared = models
        routing, place = Routing(orders, {}, models=models), folder / "shared"
        with proxying(("localhost", port), routing, door, folder=place, log=folder / "shared.log", tls=tls) as proxy:
            yield Shared(
                f"{'https' if tls else 'http'}://127.0.0.1:{port}", front, str(tls.certificate) if tls else None
            )
            proxy.check_alive()


def test_adapters_are_models_of_their_own_which_a_client_has_or_has_not(tmp_path: Path) -> None:
    with sharing(tmp_path) as shared:
        keys = {
            models: shared.front.add(f"c{number}", models=models)
            for number, models in enumerate([(), (MODEL,), ("support",), ("org/other",)])
        }
        everything = [MODEL, GONE, *ADAPTERS]
        assert {models: shared.names(key) for models, key in keys.items()} == {
            (): everything,
            (MODEL,): [MODEL],
            ("support",): ["support"],
            ("org/other",): [],
        }
        for models, key in keys.items():
            statuses = [shared.ask(key, model).status_code for model in (MODEL, *ADAPTERS)]
            assert statuses == [200 if not models or model in models else 404 for model in (MODEL, *ADAPTERS)]
        hidden, unknown = (shared.ask(keys["support",], model) for model in ("sql", "org/unknown"))
        assert error_of(hidden) == error_of(unknown)


def test_an_endpoint_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    with sharing(tmp_path) as shared:
        reply = shared.ask("", GONE)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "unavailable")
        assert reply.headers["retry-after"]


def test_the_address_has_a_certificate_and_the_endpoint_behind_it_needs_none(tmp_path: Path, made: Made) -> None:
    with sharing(tmp_path, made("first")) as shared:
        assert shared.ask("", MODEL).status_code == 200
        assert shared.names("") == [MODEL, GONE, *ADAPTERS]
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(shared.url.replace("https", "http"))
        assert [line.client for line in shared.front.logged(1)] == ["anybody"]


@pytest.mark.parametrize("address", ["127.0.0.1:9400", "localhost:1", "[::1]:9400", "metrics.example.com:64999"])
def test_the_address_of_the_metrics_is_a_host_and_a_port(address: str) -> None:
    assert AskedServing(metrics_address=address).metrics_address == address
    for wrong in (
        address.rpartition(":")[0],
        address.rpartition(":")[2],
        f"{address}/metrics",
        f"http://{address}",
        "::1:99999",
        "a:65536",
    ):
        with pytest.raises(ValidationError, match="metrics_address"):
            AskedServing(metrics_address=wrong)
