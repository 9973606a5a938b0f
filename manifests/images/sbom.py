"""Prints, as CycloneDX 1.6, the Python distributions and Debian packages of the image in which it runs:
``build --record DIR`` pipes it in. It needs nothing but Python.

https://cyclonedx.org/docs/1.6/json/
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from urllib.parse import quote

FORMAT = "${Package}\t${Version}\t${Architecture}\n"


def component(kind: str, name: str, version: str, of: str = "") -> dict[str, str]:
    reference = f"pkg:{kind}/{quote(name)}@{quote(version)}{of}"
    return {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}


def distributions() -> list[dict[str, str]]:
    found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
    named = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found if name}
    return [component("pypi", name, version) for name, version in sorted(named.items())]


def packages() -> list[dict[str, str]]:
    try:
        said = subprocess.run(["dpkg-query", "--show", "-f", FORMAT], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return []
    found = (line.split("\t") for line in said.splitlines())
    return [component("deb/debian", name, version, f"?arch={arch}") for name, version, arch in found]


def main() -> None:
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": [*distributions(), *packages()]}
    json.dump(bom, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
