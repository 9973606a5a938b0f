"""A client of vLLM's HTTP API: whether it is healthy, whether it answers, its answers and their probabilities.

What asks for these raises ServerFailed if the server refuses or its reply is not a valid answer, and TransientError if
it does not answer at the moment.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.base.program import without_secrets

LOOPBACK: Final = "127.0.0.1"
HEALTH_TIMEOUT_S: Final = 5.0
SOCKET: Final = ".sock"
"""How the name of a Unix socket ends."""
SOCKET_EXTENSION: Final = "slipway.socket"
"""The Unix socket's path, of a request that was sent to one."""
A_TOOL: Final = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
A_PICTURE: Final = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAT0lEQVR42u3PQQkAAAgEsIty/dMYyQi+hcEKLNO+FgEBAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQGBywI6LQEAwyG+sAAAAABJRU5ErkJggg=="
)
"""A red square of 64 × 64 pixels."""
NO_CONNECTION_KEPT: Final = httpx.Limits(max_keepalive_connections=0)
TIMEOUT_S: Final = 120.0
PASSING: Final = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of a gateway before it, that may pass."""
GREEDY: Final = {"temperature": 0, "repetition_penalty": 1.0}
"""Otherwise a model's own generation_config.json would change its answers."""
Distribution = Mapping[str, Mapping[str, float]]
"""For each token id: ``logprob`` (natural) and ``rank`` (1 is the likeliest)."""
RELEASE_HEADER: Final = "x-slipway-release"
"""The header that names the release which answered, if the answer came through the endpoint of one machine."""
VOCABULARY: Final = range(100, 1000)
"""Token ids that every tokenizer has. Prompts are drawn of them, so that no cache answers for the model."""
REQUEST_TIMEOUT_S: Final = 300.0
DATA: Final = "data: "
DONE: Final = "[DONE]"


def http(certificate: str | None = None) -> httpx.Client:
    """Return this process's client for our own servers, ``trusting`` the *certificate*: no proxy, and a new connection
    for each request, since a server that was restarted does not know an old connection. It knows ``unix:`` URLs."""
    return _client(certificate)


@functools.cache  # whose key tells an argument that is left out from its default
def _client(certificate: str | None) -> httpx.Client:
    return httpx.Client(
        trust_env=False, limits=NO_CONNECTION_KEPT, mounts={"unix://": _UnixSockets()}, verify=trusting(certificate)
    )


def trusting(certificate: str | None) -> ssl.SSLContext:
    """Say what a server must show: the certificate in this file, whatever name it is for, since our own server is
    asked by its address; None: one that is generally trusted, for its name."""
    if certificate is None:
        return _generally_trusting()
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be signed by itself
    context.check_hostname = False
    return context


@functools.cache
def _generally_trusting() -> ssl.SSLContext:
    """For all clients: it takes longer to read whom to trust than to send a request."""
    return httpx.create_ssl_context()


class _UnixSockets(httpx.BaseTransport):
    """``unix://localhost/run/vllm.sock/health``: the path is the socket's up to ``SOCKET``, and then its server's."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        socket, _, path = request.url.raw_path.decode().partition(f"{SOCKET}/")
        request.url = httpx.URL(f"http://localhost/{path}")
        request.extensions[SOCKET_EXTENSION] = f"{socket}{SOCKET}"
        return _at_socket(f"{socket}{SOCKET}").handle_request(request)


@functools.lru_cache
def _at_socket(path: str) -> httpx.HTTPTransport:
    return httpx.HTTPTransport(uds=path, verify=False, limits=NO_CONNECTION_KEPT)


def socket_of(url: str) -> str:
    """Return the socket's path of a ``unix:`` URL."""
    return urlsplit(url).path


def credentials(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@dataclass(frozen=True)
class Access:
    """How clients reach a served model."""

    url: str
    """Base URL, without ``/v1``."""
    model: str
    api_key: str = ""
    via: str = ""
    """Base URL to send requests to instead, where the host name in *url* can't be resolved; it is sent as the Host
    header."""
    certificate: str | None = None
    """See ``trusting``."""

    def at(self, path: str) -> str:
        return f"{(self.via or self.url).rstrip('/')}{path}"

    @property
    def headers(self) -> dict[str, str]:
        return credentials(self.api_key) | ({"Host": urlsplit(self.url).netloc} if self.via else {})


def read_metrics(url: str, name: str) -> str:
    """Read the metrics of the server called *name* at a base URL."""
    try:
        return http().get(f"{url}/metrics", timeout=HEALTH_TIMEOUT_S).raise_for_status().text
    except httpx.HTTPError as error:
        raise TransientError(f"the metrics of {name} can't be read: {type(error).__name__}: {error}") from error


def healthy(url: str, certificate: str | None = None) -> bool:
    """Whether ``/health`` answers 200: the API answers and its engine is alive."""
    try:
        return http(certificate).get(f"{url}/health", timeout=HEALTH_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False


def answer(url: str, name: str, api_key: str = "", *, timeout_s: float = 60.0, certificate: str | None = None) -> str:
    """One token of a real completion, which only a complete, loaded model gives. Raise ServerFailed if there was no
    answer, or no valid one."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    try:
        headers = credentials(api_key)
        reply = http(certificate).post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout_s)
        if not reply.is_success:
            raise ServerFailed(f"{url} refused a completion: {_refusal(reply)}")
        completion: dict[str, Any] = reply.json()
        if completion["usage"]["completion_tokens"] != 1:
            raise ServerFailed(f"{url} answered with {completion['usage']['completion_tokens']} tokens, not one")
        return str(completion["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error


def answers_chat(
    url: str, name: str, api_key: str = "", *, tools: bool = False, picture: bool = False, timeout_s: float = 60.0
) -> bool:
    """Whether it completes a chat, in which it may call a tool if *tools*, and is shown a picture if *picture*; False:
    not at the moment. Raise ServerFailed if it refuses: its chat template is missing or broken, it has no parser, or it
    takes no pictures, which will not change."""
    text = "What time is it in Lisbon?" if tools else "Hello"
    shown = [{"type": "image_url", "image_url": {"url": A_PICTURE}}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": shown if picture else text}]
    body = {"model": name, "messages": messages, "max_tokens": 1, "temperature": 0}
    body |= {"tools": [A_TOOL], "tool_choice": "auto"} if tools else {}
    try:
        reply = http().post(f"{url}/v1/chat/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        if reply.status_code == httpx.codes.BAD_REQUEST:
            raise ServerFailed(
                f"{url} refused a chat completion{' with a picture' if picture else ''}: {_refusal(reply)}",
                hint="see its chat template, or "
                + ("serve its language part: serving.text_only=true" if picture else "serving.tool_parser"),
            )
        return reply.is_success and bool(reply.json()["choices"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False


def beside_server(variables: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a server's client on the same machine, which uses no proxy for it."""
    around = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy")), LOOPBACK, "localhost"]))
    return {**without_secrets(os.environ, "HF_"), "NO_PROXY": around, "no_proxy": around, **variables}


def _refusal(reply: httpx.Response) -> str:
    """vLLM's own message; without one, the status."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return f"{reply.status_code} {reply.json()['error']['message']}"
    return f"{reply.status_code} {reply.reason_phrase}"


def reachable(host: str) -> str:
    """Return the address at which a server bound to *host* is reached, as it is written in a URL."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else LOOPBACK)
    return f"[{address}]" if address.version == 6 else str(address)


def complete(access: Access, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
    """Ask for the answer to each prompt (text or token ids), greedy, in the prompts' order. *options* are those of the
    completions API."""
    body = {"prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]}
    reply = post(access, "/v1/completions", body | GREEDY | options)
    with usable(access.url):
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != len(prompts):
        raise ServerFailed(f"{access.url} answered {len(choices)} of {len(prompts)} prompts")
    return choices


def chat(access: Access, prompt: str, **options: Any) -> dict[str, Any]:
    """Ask for the greedy answer to a user's message."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    reply = post(access, "/v1/chat/completions", body | GREEDY | options)
    with usable(access.url):
        choice: dict[str, Any] = reply["choices"][0]
    return choice


def tokenize(access: Access, text: str) -> list[int]:
    """Turn *text* into token ids, including what the model puts at the start of a text."""
    reply = post(access, "/tokenize", {"prompt": text})
    with usable(access.url):
        return [int(token) for token in reply["tokens"]]


def longest_request(access: Access) -> int:
    """Read how many tokens of prompt and answer together a request may have."""
    url = access.at("/v1/models")
    with usable(url):
        models = http(access.certificate).get(url, headers=access.headers, timeout=HEALTH_TIMEOUT_S).json()["data"]
        return next(int(model["max_model_len"]) for model in models if model["id"] == access.model)


def engine_version(url: str) -> str:
    """Read the version of vLLM at a base URL."""
    with usable(url):
        return str(http().get(f"{url}/version", timeout=HEALTH_TIMEOUT_S).json()["version"])


def given(choice: Mapping[str, Any]) -> list[Distribution]:
    """Read the distribution at each position of the prompt after its first token, given the tokens before it.

    *choice* was requested with ``prompt_logprobs``: each distribution holds that many of the likeliest tokens, and the
    prompt's own token."""
    places: list[Distribution] = choice["prompt_logprobs"]
    return places[1:]


def post(access: Access, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> Any:
    url = access.at(path)
    with usable(url):
        try:
            client, document = http(access.certificate), {"model": access.model, **body}
            reply = client.post(url, json=document, headers=access.headers, timeout=timeout_s)
        except httpx.TransportError as error:
            raise TransientError(f"{url} did not answer: {type(error).__name__}: {error}") from error
        if not reply.is_success:
            kind = TransientError if reply.status_code in PASSING else ServerFailed
            raise kind(f"{url} refused: {reply.status_code} {reply.text[:200].strip()}")
        return reply.json()


@contextlib.contextmanager
def usable(url: str) -> Iterator[None]:
    """Read an answer of the server at *url*: what it lacks is the server's failure."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerFailed(f"{url} did not give a usable answer: {type(error).__name__}: {error}") from error


@dataclass
class Reply:
    """The outcome of one request. Times are from ``time.monotonic()``."""

    sent_s: float
    ended_s: float = 0.0
    first_token_s: float | None = None
    tokens: int = 0
    release: str = ""
    """The release that answered: from the proxy's header or, on a cluster, the answer's fingerprint."""
    error: str = "it was cut off"
    """Empty if the answer was complete."""

    @property
    def refused(self) -> bool:
        """Whether there was too much to do, so that it may be sent again. vLLM also says that in a stream."""
        return self.first_token_s is None and self.error.startswith(("429 ", "503 "))

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1000 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        if self.first_token_s is None or self.tokens < 2:
            return None
        return 1000 * (self.ended_s - self.first_token_s) / (self.tokens - 1)


def stream_completion(
    client: httpx.Client, access: Access, prompt: list[int], output_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S
) -> Reply:
    """Send a completion of token ids, and read its stream. Whatever is not complete within *timeout_s* is an error."""
    body = {"model": access.model, "prompt": prompt, "max_tokens": output_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    request = {"json": body, "headers": access.headers, "timeout": timeout_s}
    reply = Reply(sent_s=time.monotonic())
    try:
        with client.stream("POST", access.at("/v1/completions"), **request) as response:  # type: ignore[arg-type]
            _read(response, reply, reply.sent_s + timeout_s)
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    except ValueError as error:
        reply.error = f"an event is not JSON: {error}"
    reply.ended_s = time.monotonic()
    return reply


def _lines(response: httpx.Response) -> Iterator[str]:
    """httpx's own lines end at U+2028 and the like, too, which are part of an answer's text."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode().rstrip("\r") for line in lines)


def _read(response: httpx.Response, reply: Reply, deadline_s: float) -> None:
    reply.release = response.headers.get(RELEASE_HEADER, "")
    if not response.is_success:
        reply.error = f"{response.status_code} {response.read().decode(errors='replace')[:200]}"
        return
    reported = ""
    for data in (line.removeprefix(DATA) for line in _lines(response) if line.startswith(DATA)):
        if data == DONE:
            reply.error = reported
            continue
        if time.monotonic() > deadline_s:
            reply.error = "it took too long"
            return
        event: dict[str, Any] = json.loads(data)
        reply.release = reply.release or event.get("system_fingerprint") or ""
        error = event.get("error") or ""  # vLLM ends a failed stream with [DONE], too
        reported = reported or (
            f"{error.get('code')} {error.get('message')}" if isinstance(error, dict) else str(error)
        )
        if event.get("choices"):
            reply.first_token_s = reply.first_token_s or time.monotonic()
            reply.tokens += 1
