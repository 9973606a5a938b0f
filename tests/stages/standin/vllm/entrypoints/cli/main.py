"""A program that can be started in vLLM's place and fails as a test wants it to, in a fraction of a second.

``behaviour.json`` in the model's directory says how. Tests of what vLLM itself does start the real one.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOG = """\
(EngineCore pid=1) INFO 01-02 03:04:05 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
dtype=torch.bfloat16, quantization=None, device_config=cpu
(EngineCore pid=1) INFO 01-02 03:04:05 [kv_cache_utils.py:2327] CPU KV cache size: 1,024 tokens, Maximum
"""


class Server(ThreadingHTTPServer):
    name: str
    behaviour: dict[str, object]
    answers = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            hung = self.server.behaviour.get("unhealthy") and self.server.answers
            return self.reply(503 if hung else 200, {})
        return self.reply(200, {"data": [{"id": self.server.name, "max_model_len": 1024}]})

    def do_POST(self) -> None:
        if error := self.server.behaviour.get("refuses"):
            return self.reply(500, {"error": {"message": error}})
        self.server.answers += 1
        if "ends_after_s" in self.server.behaviour:
            threading.Thread(target=self.end).start()
        return self.reply(200, {"usage": {"completion_tokens": 1}, "choices": [{"text": "!"}]})

    def end(self) -> None:
        time.sleep(float(str(self.server.behaviour["ends_after_s"])))
        print("(EngineCore pid=1) ERROR 01-02 03:04:05 [core.py:1] RuntimeError: out of luck", flush=True)
        os._exit(1)

    def reply(self, status: int, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        key = os.environ.get("VLLM_API_KEY")
        if key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
            status, content = 401, b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def serve(arguments: argparse.Namespace) -> None:
    path = Path(arguments.model) / "behaviour.json"
    behaviour = json.loads(path.read_text()) if path.exists() else {}
    if behaviour.get("never_ready"):
        print("still loading", flush=True)
        time.sleep(1000)
    print(LOG, flush=True)
    with Server((arguments.host, arguments.port), Handler) as server:
        server.name, server.behaviour = arguments.served_model_name, behaviour
        server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "bench"])
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--random-input-len", type=int)
    parser.add_argument("--result-dir", type=Path)
    parser.add_argument("--result-filename")
    parser.add_argument("--num-prompts", type=int)
    arguments, _ = parser.parse_known_args()
    if arguments.command == "serve":
        serve(arguments)
    elif arguments.random_input_len == 2:  # a load that never ends
        time.sleep(1000)
    elif arguments.random_input_len == 3:
        sys.exit("RuntimeError: no tokenizer")
    else:
        failures = {
            "completed": 1,
            "failed": arguments.num_prompts - 1,
            "errors": ["", "Traceback:\nTimeoutError: slow"],
        }
        (arguments.result_dir / arguments.result_filename).write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
