"""A headless Chromium that tests drive: by DevTools messages over a pipe, which needs no port and no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.serving import wait_until

CHROMIUM = shutil.which("chromium")


class Browser:
    def __init__(self, folder: Path) -> None:
        """*folder* is for its profile."""
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder}"
        command = f"exec {CHROMIUM} {flags} about:blank 3<&{read} 4>&{write}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._number, self._session, self._rest = 0, "", b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._call("Browser.close")
        self._process.wait(60)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> None:
        """Open *url* in a tab of its own, and wait until it is loaded."""
        tab = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.wait_for(url)

    def wait_for(self, url: str) -> None:
        loaded = json.dumps(f"{url} complete")
        wait_until(lambda: self.value(f"`${{location.href}} ${{document.readyState}}` === {loaded}"), url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; None while there is none."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True).get("result", {}).get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session and method.startswith("Runtime."):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._from, 65536)
                assert part, "Chromium has ended"
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                return dict(answer.get("result", {}))
