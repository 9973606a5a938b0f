"""Serve folders as a Hub does, until stopped.

python -m tests.hub --repo slipway/demo-llama=tests/demo/model --port 0 --port-file hub.port
HF_ENDPOINT=http://127.0.0.1:$(cat hub.port) slipway run slipway/demo-llama
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from tests.hub import HubServer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder with ORG/NAME/ (branch main) or ORG/NAME/REVISION/")
    parser.add_argument(
        "--repo", action="append", default=[], metavar="ORG/NAME=DIR", help="a further repository; can be repeated"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 (the default): any free port")
    parser.add_argument("--port-file", type=Path, help="file to which the port is written when the server is ready")
    arguments = parser.parse_args()
    for each in arguments.repo:
        name, _, folder = each.partition("=")
        if not folder or not Path(folder).is_dir():
            parser.error(f"--repo {each}: give ORG/NAME=DIR with an existing folder")
    server = HubServer(arguments.root, port=arguments.port)
    for each in arguments.repo:
        name, _, folder = each.partition("=")
        server.add_repo(name, Path(folder))
    print(f"{server.url} serves {', '.join(sorted(server.repositories)) or 'nothing'}", file=sys.stderr, flush=True)
    if arguments.port_file:
        beside = arguments.port_file.with_name(arguments.port_file.name + ".new")
        beside.write_text(f"{server.port}\n")
        beside.replace(arguments.port_file)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
