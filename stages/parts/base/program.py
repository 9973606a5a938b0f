"""What every stage program has in common: it records its outcome and ends with the right exit code.

A stage is the program ``python -m stages.<name>``, in a container and on one machine. ``SLIPWAY_STORE`` names the
store's folder. The stage writes its output parameters as files to ``SLIPWAY_OUTPUTS`` and, as a part of a run, its
outcome to ``runs/<SLIPWAY_RUN>/outcomes/``. On a cluster it copies its log to the file ``SLIPWAY_LOG``. It also writes
its error as JSON: the local engine reads the error from ``SLIPWAY_OUTPUTS``, Argo from the container's termination log.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.parts.base import log
from stages.parts.base.errors import Interrupted, SlipwayError, disk_errors
from stages.parts.base.files import write_text
from stages.parts.base.store import ModelStore, Record

OUTPUTS_VARIABLE: Final = "SLIPWAY_OUTPUTS"
RUN_VARIABLE: Final = "SLIPWAY_RUN"
DEBUG_VARIABLE: Final = "SLIPWAY_DEBUG"
PRINTED: Final = "said"
"""The output with what a command printed that ran in a pod."""

FAILURE: Final = "failure.json"
"""In the folder of the outputs."""
TERMINATION_LOG: Final = Path("/dev/termination-log")
"""Kubernetes makes this file for each container, and shows what it holds as the container's termination message."""
TERMINATION_BYTES: Final = 4096
"""Kubernetes cuts a longer termination message."""

Result = Literal["done", "reused", "failed", "left out", "not tried"]

SECRET: Final = re.compile(r"(TOKEN|SECRET|PASSWORD|USAGE_URL|(API|ACCESS|SIGNING)_?KEY)$")
"""Names of environment variables that hold a secret."""


def without_secrets(variables: Mapping[str, str], kept: str = "(?!)") -> dict[str, str]:
    """Return the environment for a process that needs no secret but those whose names begin with the pattern *kept*."""
    return {name: value for name, value in variables.items() if re.match(kept, name) or not SECRET.search(name)}


def version() -> str:
    """Return Slipway's version, as in pyproject.toml."""
    from importlib.metadata import version as installed

    return installed("slipway")


class Outcome(Record):
    """How one stage of one run ended, and why."""

    stage: str
    variant: str = ""
    result: Result
    reason: str
    """One sentence for a person: what was done, why nothing had to be done, or the error."""
    hint: str = ""
    key: str = ""
    """The key of the result (see ``Variant.key``, ``Evaluation.key``), by which select finds this run's results."""
    retried: tuple[str, ...] = ()
    """Why each earlier attempt failed, as far as its program could say."""
    started_at: datetime
    seconds: float


@dataclass
class Report:
    """Collects what a stage says about its outcome while it runs."""

    result: Result = "done"
    reason: str = ""
    hint: str = ""
    key: str = ""

    def reused(self, reason: str, *, key: str = "") -> None:
        self.result, self.reason, self.key = "reused", reason, key

    def done(self, reason: str, *, key: str = "") -> None:
        self.result, self.reason, self.key = "done", reason, key

    def left_out(self, reason: str, *, hint: str, tried: bool = True) -> None:
        self.result, self.reason, self.hint = "left out" if tried else "not tried", reason, hint


class StageFailure(BaseModel):
    """Why a stage program failed. Readers ignore fields they do not know: an image may be newer than they are."""

    model_config = ConfigDict(frozen=True)

    message: str
    hint: str = ""
    exit_code: int

    @classmethod
    def parse(cls, text: str | bytes, exit_code: int) -> StageFailure | None:
        """Parse the document, if *text* is one of a program that ended with *exit_code*; one killed later says
        nothing."""
        try:
            failure = cls.model_validate_json(text)
        except ValidationError:
            return None
        return failure if failure.exit_code == exit_code else None

    @classmethod
    def read(cls, path: Path, exit_code: int) -> StageFailure | None:
        """As ``parse``, from a file that need not be there."""
        return cls.parse(path.read_bytes(), exit_code) if path.is_file() else None

    def line(self) -> str:
        """One line of JSON of at most ``TERMINATION_BYTES``; the message, then the hint, is cut if needed."""
        failure = self
        for field in ("message", "hint"):
            if (excess := len(failure.model_dump_json().encode()) - TERMINATION_BYTES) > 0:
                text = getattr(failure, field).encode()
                cut = text[: max(0, len(text) - excess - len("…".encode()))].decode(errors="ignore")
                failure = failure.model_copy(update={field: f"{cut}…"})
        return failure.model_dump_json()


def parser(stage: str, about: str | None, examples: str) -> argparse.ArgumentParser:
    """Make the parser of a stage's arguments, of which the model is the first. Both texts are printed as they are."""
    made = argparse.ArgumentParser(
        prog=f"python -m stages.{stage}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples,
    )
    made.add_argument("--model", required=True, help="org/name as on the Hub, or a directory such as ./my-model")
    return made


def main(stage: Callable[[], None]) -> NoReturn:
    """Run a stage and end the process with 0, the error's exit code, 130 on Ctrl-C, or 143 on SIGTERM."""
    answer_sigterm()
    with log.kept():
        try:
            with disk_errors():
                stage()
        except SlipwayError as error:
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            _fail(str(error), error.hint, 143 if isinstance(error, _Terminated) else error.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted", "", Interrupted.exit_code)
        except Exception as error:
            traceback.print_exc()
            line = (str(error).splitlines() or [""])[0]
            _fail(f"{type(error).__name__}: {line}", "", SlipwayError.exit_code)
    sys.exit(0)


def _fail(message: str, hint: str, exit_code: int) -> NoReturn:
    """Print the error, leave it, and end."""
    with suppress(OSError):  # nobody listens any more
        print(SlipwayError(message, hint=hint).render(), file=sys.stderr, flush=True)
    leave_failure(message, hint, exit_code)
    sys.exit(exit_code)


def leave_failure(message: str, hint: str, exit_code: int) -> None:
    """Leave an error as JSON for whoever started the program."""
    line = StageFailure(message=message, hint=hint, exit_code=exit_code).line()
    with suppress(SlipwayError, OSError):  # a full disk must not hide the error
        write_output(FAILURE, line)
    if TERMINATION_LOG.exists():
        with suppress(OSError):
            TERMINATION_LOG.write_text(line, encoding="utf-8")


def answer_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that it cleans up."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        # A second signal must not interrupt the clean-up.
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated("asked to stop (SIGTERM)")

    signal.signal(signal.SIGTERM, end)


@contextmanager
def outcome(store: ModelStore, stage: str, variant: str = "") -> Iterator[Report]:
    """Record in the run's folder how the block ended, also when it failed. Outside a run, only print it."""
    started_at, started, report = datetime.now(UTC), time.monotonic(), Report()
    try:
        with disk_errors(store.path):
            yield report
    except BaseException as error:
        report.result = "failed"
        report.reason = str(error).strip() or type(error).__name__
        report.hint = getattr(error, "hint", "")
        raise
    finally:
        run_id, name = os.environ.get(RUN_VARIABLE), f"{stage}-{variant}.json" if variant else f"{stage}.json"
        path = store.run(run_id) / "outcomes" / name if run_id else None
        earlier = Outcome.model_validate_json(path.read_text()) if path and path.is_file() else None
        record = Outcome(
            stage=stage,
            variant=variant,
            **vars(report),
            retried=(*earlier.retried, earlier.reason) if earlier and earlier.result == "failed" else (),
            started_at=started_at,
            seconds=round(time.monotonic() - started, 3),
        )
        if record.result != "failed":
            about = f"{variant} " if record.result in ("left out", "not tried") else ""
            print(f"{about}{record.result}: {record.reason}", file=sys.stderr, flush=True)
        if path:
            record.write(path)


def outcomes(run: Path) -> list[Outcome]:
    """All outcomes recorded in a run's folder, in the order of their start."""
    records = [Outcome.model_validate_json(path.read_text()) for path in run.glob("outcomes/*.json")]
    return sorted(records, key=lambda record: record.started_at)


def write_output(name: str, value: str) -> None:
    """Write an output parameter (a few KB at most). Does nothing if ``SLIPWAY_OUTPUTS`` is not set."""
    if folder := os.environ.get(OUTPUTS_VARIABLE):
        write_text(Path(folder) / name, value)


class _Terminated(Interrupted): ...
