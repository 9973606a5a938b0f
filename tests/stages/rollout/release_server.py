"""Answers like a vLLM server of one release; ``behaviour.json`` in the release says how well.

    python release_server.py RELEASE STATE [FINGERPRINT]

Writes its port and pid to STATE once it listens. A whole answer comes in an instant, and its latencies are told, not
slept: what a rollout reads of a server is what the server says of itself. Only a stream, which clients watch, takes as
long. SIGTERM lets what has begun end. Standard library only: it starts in a tenth of a second.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, float("inf"))
PROMPT_TOKENS = 20
SURE = -0.1
UNSURE = -3.0
"""Log-probabilities of the tokens of a sound model, and of the same tokens in a broken model."""


class Server(ThreadingHTTPServer):
    daemon_threads = False  # the end waits for them
    request_queue_size = 64

    def __init__(self, behaviour: dict[str, Any], fingerprint: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.fingerprint = behaviour, fingerprint
        self.lock = threading.Lock()
        self.asked = self.failed = self.refused = self.running = 0
        self.tokens: list[int] = []
        self.started_s = time.monotonic()
        self.waiting = self.cached = 0
        """Requests, and tokens in its KV cache."""
        self.slots = threading.Semaphore(behaviour.get("slots", 10_000))
        self.computing = threading.Lock()

    @property
    def loaded(self) -> bool:
        loads_s = self.behaviour.get("loads_s", 0)
        return not self.behaviour.get("never_ready") and time.monotonic() >= self.started_s + loads_s

    @property
    def first_s(self) -> float:
        return float(self.behaviour.get("first_s", 0.004))

    @property
    def token_s(self) -> float:
        return float(self.behaviour.get("token_s", 0.003))


class Handler(BaseHTTPRequestHandler):
    server: Server
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self.reply(200, metrics(self.server).encode())
        if self.path == "/v1/models":
            model = {"id": "org/name", "max_model_len": self.server.behaviour.get("context", 4096)}
            return self.reply(200, json.dumps({"data": [model]}).encode())
        return self.reply(200 if self.server.loaded else 503, b"{}")

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.running += 1
        try:
            self.answer()
        finally:
            with self.server.lock:
                self.server.running -= 1

    def answer(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("model") in self.server.behaviour.get("refuses_models", ()):
            return self.reply(404, b"{}")
        tokens = asked.get("max_tokens", 1)
        with self.server.lock:
            self.server.asked += 1
            every = self.server.behaviour.get("fails_every", 0)
            fails = (
                self.server.asked > 3 and every and self.server.asked % every == 0
            )  # the questions at the start succeed
            self.server.failed += bool(fails)
        if self.server.asked > 3 and self.server.behaviour.get("hangs"):
            threading.Event().wait()
        if fails:
            return self.reply(500, b'{"error": {"message": "out of luck"}}')
        if "messages" in asked and self.server.behaviour.get("refuses_chats"):
            with self.server.lock:
                self.server.refused += 1
            return self.reply(400, b'{"error": {"message": "no chat template"}}')
        if "tools" in asked and self.server.behaviour.get("refuses_tools"):
            return self.reply(400, json.dumps({"error": {"message": '"auto" tool choice requires a parser'}}).encode())
        if "image_url" in str(asked.get("messages")) and self.server.behaviour.get("refuses_pictures"):
            return self.reply(400, json.dumps({"error": {"message": "At most 0 image(s) may be provided"}}).encode())
        if asked.get("stream"):
            return self.scheduled(asked, tokens)
        self.count(tokens)
        logprob = UNSURE if self.server.behaviour.get("garbage") else SURE + self.server.behaviour.get("shift", 0.0)
        prompt = asked.get("prompt", "a chat")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        choices = [choice(number, prompt, tokens, logprob) for number, prompt in enumerate(prompts)]
        said = {"system_fingerprint": self.server.fingerprint, "usage": {"completion_tokens": tokens}}
        return self.reply(200, json.dumps(said | {"choices": choices}).encode())

    def scheduled(self, asked: dict[str, Any], tokens: int) -> None:
        """Stream once there is a slot. At most ``waits`` requests wait for one; more get a 503 or what ``beyond`` says.
        The KV cache has ``kv_tokens``; what does not fit waits, or gets a 500 if ``kv_fails``. Each request that
        waits makes others take ``thrashes_s`` longer."""
        server, told = self.server, self.server.behaviour
        length = len(asked.get("prompt", "")) + tokens
        if length > told.get("refuses_beyond_tokens", 1e9):
            return self.reply(400, b'{"error": {"message": "too long"}}')
        if server.waiting >= told.get("waits", 10_000):
            time.sleep(told.get("refuses_after_s", 0))
            if told.get("refuses_in_streams"):
                error = {"error": {"message": "too much to do", "code": told["refuses_in_streams"]}}
                return self.reply(200, f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode())
            return self.reply(told.get("beyond", 503), b'{"error": {"message": "too much to do"}}')
        with server.lock:
            if told.get("kv_fails") and server.cached + length > told["kv_tokens"]:
                return self.reply(500, b'{"error": {"message": "out of memory"}}')
            server.waiting += 1
        with server.slots:
            while told.get("kv_tokens") and server.cached + length > told["kv_tokens"]:
                time.sleep(0.01)
            with server.lock:
                server.waiting -= 1
                server.cached += length
            time.sleep(server.waiting * told.get("thrashes_s", 0))
            try:
                self.stream(asked, tokens)
            except OSError:
                if told.get("leaks"):
                    with server.lock:
                        server.waiting += 1
            finally:
                with server.lock:
                    server.cached -= length
        return None

    def stream(self, asked: dict[str, Any], tokens: int) -> None:
        """Token by token; the last event has the fingerprint, and the usage if it was requested. A prompt of more than
        256 tokens takes ``long_s`` more, in which nothing else is computed if it ``blocks``. Events may be ``padded``
        by many bytes, for which the system has little room."""
        if padding := self.server.behaviour.get("padded"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        if len(asked.get("prompt", "")) > 256 and "long_s" in self.server.behaviour:
            with self.server.computing if self.server.behaviour.get("blocks") else contextlib.nullcontext():
                time.sleep(self.server.behaviour["long_s"])
        chat, usage = "messages" in asked, asked.get("stream_options", {}).get("include_usage", False)
        last = {"system_fingerprint": self.server.fingerprint}
        for number in range(tokens):
            with self.server.computing if self.server.behaviour.get("blocks") else contextlib.nullcontext():
                time.sleep(self.server.token_s if number else self.server.first_s)
            if not number:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.end_headers()
            reason = "length" if number + 1 == tokens else None
            said: dict[str, Any] = {"delta": {"content": "!"}} if chat else {"text": "!" * (padding or 1)}
            event = {"model": asked["model"], "choices": [said | {"index": 0, "finish_reason": reason}]}
            self.event(event | (last if reason and not usage else {}))
        self.count(tokens)
        if usage:
            self.event({"model": asked["model"], "choices": [], "usage": {"completion_tokens": tokens}} | last)
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

    def count(self, tokens: int) -> None:
        """Count a request that was answered."""
        with self.server.lock:
            self.server.tokens.append(tokens)

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def choice(number: int, prompt: str | list[int], tokens: int, logprob: float) -> dict[str, Any]:
    ids = [ord(each) for each in prompt] if isinstance(prompt, str) else prompt
    read = [None, *({str(each): {"logprob": logprob}, "0": {"logprob": SURE}} for each in ids[1:])]
    words = ["!"] * tokens
    return {
        "index": number,
        "text": "".join(words),
        "prompt_token_ids": ids,
        "token_ids": [33] * tokens,
        "logprobs": {"tokens": words, "token_logprobs": [logprob] * tokens},
        "prompt_logprobs": read,
    }


def probes() -> list[dict[str, Any]]:
    """What a sound server answered when it was measured."""
    found = []
    for prompt in ("The capital of France is", "Once upon a time"):
        said = choice(0, prompt, 8, SURE)
        found.append(
            {
                "prompt": prompt,
                "prompt_ids": said["prompt_token_ids"],
                "tokens": said["logprobs"]["tokens"],
                "token_ids": said["token_ids"],
                "logprobs": said["logprobs"]["token_logprobs"],
            }
        )
    return found


def metrics(server: Server) -> str:
    """The metrics that a rollout reads, as vLLM reports them."""
    with server.lock:
        tokens, failed, refused, running = list(server.tokens), server.failed, server.refused, server.running
    path = 'handler="/v1/completions",method="POST"'
    busy_s = sum(server.first_s + (each - 1) * server.token_s for each in tokens)
    lines = [f'http_requests_total{{{path},status="2xx"}} {len(tokens)}']
    lines += [f'http_requests_total{{{path},status="5xx"}} {failed}']
    lines += [f'http_requests_total{{{path},status="4xx"}} {refused}']
    lines += [f"vllm:request_generation_tokens_sum {sum(tokens)}", f"vllm:e2e_request_latency_seconds_sum {busy_s}"]
    lines += [f"vllm:request_prompt_tokens_sum {PROMPT_TOKENS * len(tokens)}"]
    lines += [f"vllm:request_prompt_tokens_count {len(tokens)}"]
    running = 0 if server.behaviour.get("tells_late") else running  # as one does whose short requests come together
    lines += [f"vllm:num_requests_running {running}", f"vllm:num_requests_waiting {server.waiting}"]
    lines += [f"vllm:kv_cache_usage_perc {server.cached / server.behaviour.get('kv_tokens', 1e9)}"]
    many = [each for each in tokens if each > 1]
    for name, value, count in (
        ("vllm:time_to_first_token_seconds", server.first_s, len(tokens)),
        ("vllm:request_time_per_output_token_seconds", server.token_s, len(many)),
    ):
        lines.append(f"# TYPE {name} histogram")
        for bound in BOUNDS:
            le = "+Inf" if bound == BOUNDS[-1] else bound
            lines.append(f'{name}_bucket{{le="{le}"}} {count if value <= bound else 0}')
        lines.append(f"{name}_sum {value * count}")
    return "\n".join(lines) + "\n"


def main() -> None:
    release, state, fingerprint = Path(sys.argv[1]), Path(sys.argv[2]), (*sys.argv[3:], "vllm-0.32.0")[0]
    with Server(json.loads((release / "behaviour.json").read_text()), fingerprint) as server:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        beside = state.with_suffix(".new")
        beside.write_text(json.dumps({"pid": os.getpid(), "port": server.server_address[1]}))
        beside.replace(state)
        server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
