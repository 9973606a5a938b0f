"""A program that can be started in vLLM's place and fails as a test wants it to, in a fraction of a second.

``behaviour.json`` in the model's directory says how; its ``engine`` is a shell command that is run as vLLM's engine.
Tests of what vLLM itself does start the real one.
"""

import argparse
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.bench import behaviour_of, bench, note

LOG = """\
(EngineCore pid=1) INFO 01-02 03:04:05 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
dtype=torch.bfloat16, quantization=None, device_config=cpu
(EngineCore pid=1) INFO 01-02 03:04:05 [default_loader.py:501] Loading weights took 0.25 seconds
(EngineCore pid=1) INFO 01-02 03:04:05 [kv_cache_utils.py:2327] CPU KV cache size: 1,024 tokens, Maximum
(EngineCore pid=1) INFO 01-02 03:04:06 [core.py:396] init engine (profile, create kv cache, warmup model) took 0.60 s \
(compilation: 0.50 s)
(APIServer pid=1) INFO 01-02 03:04:06 [entry.py:140] Starting vLLM server on http://127.0.0.1:1
"""


MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 3
"""Whatever the prompt is."""
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, float("inf"))


class Server(ThreadingHTTPServer):
    """Behaves as told: ``token_s`` (seconds per token), ``fails_every`` (each so many-th request gets a 500),
    ``refuses`` (with a 500, after it ``says`` something in its log), ``refuses_chats`` (with a 400),
    ``ends_when_checked`` (for its health, once it has answered; or only its ``"engine"`` ends)."""

    daemon_threads = True
    name: str
    behaviour: dict[str, object]
    engine: subprocess.Popen[bytes] | None = None
    answers = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.Lock()
        self.statuses: dict[str, int] = {}
        self.first_s: list[float] = []
        self.token_s: list[float] = []
        self.requests_s: list[float] = []
        self.tokens = 0
        self.prompts = self.generated = 0
        """Tokens of prompts, and of answers while they are generated."""


class SocketServer(Server):
    """Listens on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/health":
            if (ends := self.server.behaviour.get("ends_when_checked")) and self.server.answers:
                if ends == "engine" and self.server.engine:
                    self.server.engine.kill()
                else:
                    self.end()
            hung = self.server.behaviour.get("unhealthy") and self.server.answers
            return self.reply(503 if hung else 200, {})
        if self.path == "/metrics":
            return self.send(200, metrics(self.server).encode())
        return self.reply(200, {"data": [{"id": self.server.name, "max_model_len": MAX_MODEL_LEN}]})

    def do_POST(self) -> None:
        if self.path == "/kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.respond()
        if "ends_after_s" in self.server.behaviour:
            threading.Timer(float(str(self.server.behaviour["ends_after_s"])), self.end).start()

    def respond(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if error := self.server.behaviour.get("refuses"):
            print(self.server.behaviour.get("says", ""), flush=True)
            return self.reply(500, {"error": {"message": error}})
        with self.server.lock:
            self.server.answers += 1
            every = int(str(self.server.behaviour.get("fails_every", 0)))
            fails = self.server.answers > 1 and every and self.server.answers % every == 0  # the first is the start's
        if "messages" in asked and self.server.behaviour.get("refuses_chats"):
            return self.reply(400, {"error": {"message": "no chat template"}})
        if fails:
            return self.reply(500, {"error": {"message": "out of luck"}})
        if "prompt_logprobs" in asked:
            return self.reply(200, {"choices": [read(number, each) for number, each in enumerate(asked["prompt"])]})
        if asked.get("return_token_ids"):
            count = len(asked["prompt"]) if "prompt" in asked else 1
            return self.reply(200, {"choices": [told(number) for number in range(count)]})
        return self.complete(int(asked.get("max_tokens") or 1), bool(asked.get("stream")))

    def complete(self, tokens: int, stream: bool) -> None:
        token_s = float(str(self.server.behaviour.get("token_s", 0)))
        started = time.monotonic()
        with self.server.lock:
            self.server.prompts += PROMPT_TOKENS
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        first_s = 0.0
        for number in range(tokens):
            time.sleep(token_s)
            first_s = first_s or time.monotonic() - started
            with self.server.lock:
                self.server.generated += 1
            if stream:
                self.event(json.dumps({"choices": [{"text": f"{number} ", "index": 0}], "usage": used(number + 1)}))
        took_s = time.monotonic() - started
        with self.server.lock:
            self.server.tokens += tokens
            self.server.first_s.append(first_s)
            self.server.token_s.append((took_s - first_s) / max(1, tokens - 1))
            self.server.requests_s.append(took_s)
        if stream:
            self.count(200)
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
            return None
        return self.reply(200, {"usage": used(tokens), "choices": [{"text": "!" * tokens}]})

    def event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def end(self) -> None:
        print("(EngineCore pid=1) ERROR 01-02 03:04:05 [core.py:1] RuntimeError: out of luck", flush=True)
        os._exit(1)

    def reply(self, status: int, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        key = os.environ.get("VLLM_API_KEY")
        if key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
            status, content = 401, b"{}"
        self.count(status)
        self.send(status, content)

    def count(self, status: int) -> None:
        if self.command == "POST":
            with self.server.lock:
                kind = f"{status // 100}xx"
                self.server.statuses[kind] = self.server.statuses.get(kind, 0) + 1

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if self.path == "/metrics" else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class SocketHandler(Handler):
    disable_nagle_algorithm = False  # a Unix socket has none


def used(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}


def told(number: int) -> dict[str, object]:
    """An answer of one token to the prompt of that number, with what there is to know of it."""
    logprobs = {"tokens": ["!"], "token_logprobs": [-0.5]}
    return {"index": number, "text": "!", "token_ids": [1], "prompt_token_ids": [2, 3], "logprobs": logprobs}


def read(number: int, tokens: list[int]) -> dict[str, object]:
    """What it says of the tokens of the prompt of that number: each is as likely as when it answers."""
    places = [None, *({str(token): {"logprob": -0.5, "rank": 1}} for token in tokens[1:])]
    return {"index": number, "text": "!", "prompt_logprobs": places}


def metrics(server: Server) -> str:
    """The few metrics that a rollout reads, in vLLM's format."""
    with server.lock:
        lines = [
            f'http_requests_total{{handler="/v1/completions",method="POST",status="{kind}"}} {count}'
            for kind, count in server.statuses.items()
        ]
        lines += ['http_requests_total{handler="/health",method="GET",status="2xx"} 1000']
        lines += [f'vllm:request_generation_tokens_sum{{engine="0"}} {server.tokens}']
        lines += [f'vllm:prompt_tokens_total{{engine="0"}} {server.prompts}']
        lines += [f'vllm:generation_tokens_total{{engine="0"}} {server.generated}']
        lines += [f'vllm:e2e_request_latency_seconds_sum{{engine="0"}} {sum(server.requests_s)}']
        lines += [f'vllm:request_prompt_tokens_sum{{engine="0"}} {server.prompts}']
        lines += [f'vllm:request_prompt_tokens_count{{engine="0"}} {server.prompts // PROMPT_TOKENS}']
        for name, values in (
            ("vllm:time_to_first_token_seconds", server.first_s),
            ("vllm:request_time_per_output_token_seconds", server.token_s),
        ):
            lines.append(f"# TYPE {name} histogram")
            for bound in BOUNDS:
                le = "+Inf" if bound == BOUNDS[-1] else bound
                lines.append(f'{name}_bucket{{engine="0",le="{le}"}} {sum(value <= bound for value in values)}')
            lines.append(f'{name}_sum{{engine="0"}} {sum(values)}')
    return "\n".join(lines) + "\n"


def serve(arguments: argparse.Namespace) -> None:
    behaviour = behaviour_of(Path(arguments.model), arguments.served_model_name)
    while "starts_after" in behaviour and not Path(behaviour["starts_after"]).exists():
        time.sleep(0.02)
    engine = None
    if "engine" in behaviour:
        engine = subprocess.Popen(["sh", "-c", behaviour["engine"]])
        print(f"(EngineCore pid={engine.pid}) INFO 01-02 03:04:05 [core.py:133] starting", flush=True)
    if behaviour.get("never_ready"):
        print("still loading", flush=True)
        time.sleep(1000)
    if (arguments.max_model_len or 0) > MAX_MODEL_LEN:
        sys.exit(
            f"ValueError: User-specified max_model_len ({arguments.max_model_len}) is greater than {MAX_MODEL_LEN}"
        )
    if "STANDIN_GPU" in os.environ:
        take(arguments.gpu_memory_utilization, Path(f"{os.environ['STANDIN_GPU']}{os.environ['CUDA_VISIBLE_DEVICES']}"))
    print(LOG, flush=True)
    made = (
        SocketServer(arguments.uds, SocketHandler)
        if arguments.uds
        else Server((arguments.host, arguments.port), Handler)
    )
    with made as server:
        server.name, server.behaviour, server.engine = arguments.served_model_name, behaviour, engine
        if "STANDIN_JOURNAL" in os.environ:
            note("start", server.name, *filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        server.serve_forever()


def take(share: float, gpu: Path) -> None:
    """Take a share of a GPU's memory; the folder *gpu* says who has which. If it is not free, end as vLLM does."""
    gpu.mkdir(exist_ok=True)
    taken = sum(float(each.read_text()) for each in gpu.iterdir() if Path("/proc", each.name).exists())
    if taken + share > 1:
        sys.exit("ValueError: Free memory on device cuda:0 on startup is less than desired GPU memory utilization")
    (gpu / str(os.getpid())).write_text(str(share))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version="0.0.0")
    parser.add_argument("command", choices=["serve", "bench"])
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--dataset-path", type=Path)
    parser.add_argument("--result-dir", type=Path)
    parser.add_argument("--result-filename")
    parser.add_argument("--num-prompts", type=int)
    arguments, _ = parser.parse_known_args()
    if arguments.command == "bench":
        load(arguments)
    else:
        serve(arguments)


def load(arguments: argparse.Namespace) -> None:
    first = json.loads(arguments.dataset_path.read_text().splitlines()[0])
    if first.get("input_length") == 2:  # a load that never ends
        time.sleep(1000)
    elif first.get("input_length") == 3:
        sys.exit("RuntimeError: no tokenizer")
    elif first.get("input_length", 4) == 4:
        bench()
    else:
        failures = {
            "completed": 1,
            "failed": arguments.num_prompts - 1,
            "errors": ["", "Traceback:\nTimeoutError: slow"],
        }
        (arguments.result_dir / arguments.result_filename).write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
