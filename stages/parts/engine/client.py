"""A client of vLLM's HTTP API: whether it is healthy, and whether it answers."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from stages.parts.base.errors import ServerFailed

LOOPBACK: Final = "127.0.0.1"
HEALTH_TIMEOUT_S: Final = 5.0


@functools.cache
def http() -> httpx.Client:
    """The client for our own servers: without a proxy, and with a new connection for each request, since a server that
    was restarted does not know an old connection."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def credentials(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def healthy(url: str) -> bool:
    """Whether ``/health`` answers 200: the API answers and its engine is alive."""
    try:
        return http().get(f"{url}/health", timeout=HEALTH_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False


def answer(url: str, name: str, api_key: str = "", *, timeout_s: float = 60.0) -> str:
    """One token of a real completion, which only a complete, loaded model gives.

    Raises:
        ServerFailed: there was no answer, or no valid one.
    """
    body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    try:
        reply = http().post(f"{url}/v1/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        if not reply.is_success:
            raise ServerFailed(f"{url} refused a completion: {_refusal(reply)}")
        completion: dict[str, Any] = reply.json()
        if completion["usage"]["completion_tokens"] != 1:
            raise ServerFailed(f"{url} answered with {completion['usage']['completion_tokens']} tokens, not one")
        return str(completion["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error


def answers_chat(url: str, name: str, api_key: str = "", *, timeout_s: float = 60.0) -> bool:
    """Whether it completes a chat; False: not at the moment.

    Raises:
        ServerFailed: it refuses: its chat template is missing or broken, which will not change.
    """
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    try:
        reply = http().post(f"{url}/v1/chat/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        if reply.status_code == httpx.codes.BAD_REQUEST:
            raise ServerFailed(f"{url} refused a chat completion: {_refusal(reply)}", hint="see its chat template")
        return reply.is_success and bool(reply.json()["choices"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer of the model in *directory* has a chat template."""
    if any((directory / each).is_file() for each in ("chat_template.jinja", "chat_template.json")):
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    return False


def beside_server(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server's client on the same machine, which uses no proxy for it."""
    around = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy")), LOOPBACK, "localhost"]))
    return {**os.environ, "NO_PROXY": around, "no_proxy": around, **variables}


def _refusal(reply: httpx.Response) -> str:
    """vLLM's own message; without one, the status."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return f"{reply.status_code} {reply.json()['error']['message']}"
    return f"{reply.status_code} {reply.reason_phrase}"


def reachable(host: str) -> str:
    """The address at which a server bound to *host* is reached, as it is written in a URL."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else LOOPBACK)
    return f"[{address}]" if address.version == 6 else str(address)
