"""``python -m tests.own_surroundings``: print what a program can see of how it was started, and end as it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil


def main() -> None:
    own = psutil.Process()
    seen = {
        "arguments": sys.argv[1:],
        "main": Path(sys.argv[0]).name,
        "modules": sys.modules["__main__"].__name__,
        "path": sys.path,
        "environment": dict(os.environ),
        "shown": (own.cmdline(), own.environ(), own.exe()),
        "directory": str(Path.cwd()),
        "parent": os.getppid(),
        "session_of_its_own": os.getsid(0) == os.getpid(),
        "group_of_its_own": os.getpgrp() == os.getpid(),
        "descriptors": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()),
        "read": sys.stdin.read(),
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "encodings": [(each.encoding, each.line_buffering, each.isatty()) for each in (sys.stdout, sys.stderr)],
    }
    print(json.dumps(seen, sort_keys=True))
    print("to stderr", file=sys.stderr)
    match sys.argv[1]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("as asked")
        case "say":
            sys.exit("its last words")
        case code:
            sys.exit(int(code))


if __name__ == "__main__":
    main()
