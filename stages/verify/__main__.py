"""verify: compares a release with its signature before a server loads it: the init container of its pods on KServe."""

from __future__ import annotations

from pathlib import Path

from stages.parts.base import program
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.releases.signing import check_trust


def main() -> None:
    parser = program.parser(
        "verify",
        __doc__,
        "example: python -m stages.verify --model org/name --release /mnt/release \\\n"
        """    --serving '{"signing": "require", "verification_key": "/etc/signing.pub"}'""",
    )
    parser.add_argument("--release", type=Path, required=True, help="the release's directory")
    parser.add_argument("--serving", required=True, help="JSON: AskedServing in stages/parts/base/serving_settings.py")
    arguments = parser.parse_args()
    check_trust(arguments.release, parse_json(AskedServing, arguments.serving, "--serving"))


if __name__ == "__main__":
    program.main(main)
