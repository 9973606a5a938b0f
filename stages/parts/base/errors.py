"""All errors that a user can see, as a tree. Each class has an exit code; each instance says what to do next.

    SlipwayError                1   something failed; the message says what
    ├── ConfigError             2   wrong fields or values; one error shows all of them
    │   ├── UnknownName         2   a choice that does not exist; the hint lists the known ones
    │   ├── InvalidName         2   a model's, file's or variant's name that can't be used as a path
    │   └── NotWritable         2   a volume or a folder that is read-only, or belongs to somebody else
    ├── PermanentError              another attempt would fail as well
    │   ├── ModelNotFound      10
    │   ├── RevisionNotFound   11
    │   ├── AccessDenied       12   private or gated
    │   ├── UnusableModel      13   can't be served (of another kind, only pickles, no tokenizer, needs its own code)
    │   ├── DamagedModel       14   a damaged checkpoint (truncated, altered, missing shard, NaN)
    │   ├── NotEnoughSpace     15
    │   ├── QuantizationFailed 20
    │   ├── ServerFailed       30   vLLM did not start, or crashed
    │   ├── MeasurementFailed  31
    │   ├── PortInUse          32
    │   ├── NothingToServe     33
    │   ├── NotEnoughGpus      34   a quota or the nodes have fewer free GPUs than a release needs beside what serves
    │   ├── NoWinner           40
    │   ├── VerificationFailed 41   a decision does not follow from the measurements
    │   ├── Conflict           42   another rollout is under way, or someone else changed what is served
    │   ├── RolledBack         43   the canary was worse, or there is no evidence that it is as good
    │   ├── DrillFailed        44   the endpoint did not withstand a drill
    │   ├── Incomplete         45   a variant is missing from the decision; the best of the others waits
    │   ├── NotTrusted         46   a release is not signed by the key that is trusted, or was altered since
    │   ├── Degraded           47   what serves is no longer what its release was when it was measured
    │   ├── MissingRun         51
    │   ├── EventRefused       52   an event of a registry that starts no run
    │   ├── ClusterRefused     60   Kubernetes refused a valid request
    │   ├── NotInstalled       61   the cluster lacks something that a run needs
    │   └── RunFailed           *   the exit code of the task that failed first
    ├── TransientError         75   EX_TEMPFAIL: the retry expression of Argo and of the local engine reads it
    │   ├── HubUnavailable     75
    │   ├── ClusterUnavailable 75   the Kubernetes API does not answer
    │   ├── VolumeFailed       75   the volume of the store can't be read or written
    │   ├── ServerKilled       75   something else ended vLLM, such as the kernel for want of memory
    │   └── Busy               75   another process holds the lock
    └── Interrupted           130   Ctrl-C or SIGTERM

64 and 65 are not used: they belong to Argo's executor.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

SHOWN_NAMES: Final = 30
"""At most, in a hint: lm-eval alone has thousands of tasks."""
SHOWN_CHARACTERS: Final = 16_000
"""At most, of a message: a name in a model's file may have megabytes."""


class SlipwayError(Exception):
    """Something failed. ``str(error)`` is one line; ``hint`` says what the user can do."""

    exit_code: int = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(_shown(message))
        self.hint = _shown(hint)

    def render(self) -> str:
        """Compose the lines that the user sees: ``error: …`` and, if there is a hint, the hint indented below."""
        return f"error: {self}" + (f"\n  hint: {self.hint}" if self.hint else "")


def _shown(text: str) -> str:
    """Write what a terminal would obey, such as an escape in a tensor's name, as Python does."""
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in cut)


class ConfigError(SlipwayError, exit_code=2):
    mistakes: Sequence[str] = ()
    """Each of several, without where it is."""

    @classmethod
    def of_many(cls, mistakes: Sequence[str], where: str) -> ConfigError:
        """One error that shows every mistake on its own line."""
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = "".join(f"\n    {line}" for line in mistakes)
        error = cls(f"{count} in {where}{lines}", hint="every field and its default: configs/defaults.yaml")
        error.mistakes = mistakes
        return error


class UnknownName(ConfigError):
    """A name of a *kind* ('profile', 'workload', …) that is not among *known*."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1)
        question = f"did you mean {close[0]!r}? " if close else ""
        listed = ", ".join(names[:SHOWN_NAMES]) or "none"
        remainder = f", … ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
        super().__init__(f"unknown {kind} {name!r}", hint=f"{question}known: {listed}{remainder}")


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownName unless *name* is among *known*."""
    if name not in known:
        raise UnknownName(kind, name, known)


class InvalidName(ConfigError): ...


class NotWritable(ConfigError): ...


class PermanentError(SlipwayError):
    """Another attempt would fail as well."""


class ModelNotFound(PermanentError, exit_code=10): ...


class RevisionNotFound(PermanentError, exit_code=11): ...


class AccessDenied(PermanentError, exit_code=12): ...


class UnusableModel(PermanentError, exit_code=13): ...


class DamagedModel(PermanentError, exit_code=14): ...


class NotEnoughSpace(PermanentError, exit_code=15): ...


class QuantizationFailed(PermanentError, exit_code=20): ...


class ServerFailed(PermanentError, exit_code=30): ...


class MeasurementFailed(PermanentError, exit_code=31): ...


class PortInUse(PermanentError, exit_code=32): ...


class NothingToServe(PermanentError, exit_code=33): ...


class NotEnoughGpus(PermanentError, exit_code=34): ...


class NoWinner(PermanentError, exit_code=40): ...


class VerificationFailed(PermanentError, exit_code=41): ...


class Conflict(PermanentError, exit_code=42): ...


class RolledBack(PermanentError, exit_code=43): ...


class DrillFailed(PermanentError, exit_code=44): ...


class Incomplete(PermanentError, exit_code=45): ...


class NotTrusted(PermanentError, exit_code=46): ...


class Degraded(PermanentError, exit_code=47): ...


class MissingRun(PermanentError, exit_code=51): ...


class EventRefused(PermanentError, exit_code=52): ...


class ClusterRefused(PermanentError, exit_code=60): ...


class NotInstalled(PermanentError, exit_code=61): ...


class RunFailed(PermanentError):
    """A run ended without a result. Has the exit code of the task that failed first."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class TransientError(SlipwayError, exit_code=75):
    """The cause may disappear by itself, so the engine tries again."""


class HubUnavailable(TransientError): ...


class ClusterUnavailable(TransientError): ...


class VolumeFailed(TransientError): ...


class ServerKilled(TransientError): ...


class Busy(TransientError): ...


class Interrupted(SlipwayError, exit_code=130): ...


def of_disk(error: OSError, where: Path | None = None) -> SlipwayError | None:
    """Say what a disk's failure below *where*, or elsewhere, is for a user: no room, no right to write, or a broken
    device. None for another error."""
    is_below = where is not None and Path(str(error.filename or where)).is_relative_to(where)
    path = where if is_below else error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or remove what is old (slipway store prune --others); nothing was changed"
        return NotEnoughSpace(f"no space left on the volume of {path or where}", hint=hint)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        hint = "check who may write there, and how its volume is mounted"
        return NotWritable(f"cannot use {path}: {error.strerror}", hint=hint)
    if error.errno in (errno.EIO, errno.ESTALE) and path:
        return VolumeFailed(f"the volume of {path} fails: {error.strerror}", hint="look at the volume; then run again")
    return None


@contextlib.contextmanager
def disk_errors(where: Path | None = None) -> Iterator[None]:
    """Raise what ``of_disk`` makes of an error instead of it."""
    try:
        yield
    except OSError as error:
        if told := of_disk(error, where):
            raise told from error
        raise
