"""Faults of what a program depends on: the disk fails at one of its calls and stays so, is too small, can't be written
to or has no hard links; the Hub is cut, slow, wrong, busy, or refuses."""

from __future__ import annotations

import errno
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from stages.parts.base.errors import (
    AccessDenied,
    DamagedModel,
    HubUnavailable,
    NotEnoughSpace,
    NotWritable,
    VolumeFailed,
)
from tests.campaign import steps
from tests.campaign.kills import Known
from tests.campaign.steps import Place
from tests.hub.server import HubServer

GROWING: Final = ("create", "write", "mkdir", "symlink", "link", "fsync")
CHANGING: Final = (*GROWING, "append", "rewrite", "rename", "unlink", "rmdir")
MARGIN: Final = 1 << 16
LARGE: Final = 1 << 30
SLOW_BYTES_PER_S: Final = 2e6
NOWHERE: Final = "http://127.0.0.1:9/nothing"


class DiskFault(NamedTuple):
    code: int
    kinds: tuple[str, ...]
    """The calls that fail."""
    ends: tuple[int, ...]
    """The exit statuses that say it."""
    first: bool = False
    """Whether it is there from the start."""


DISK: Final[Mapping[str, DiskFault]] = {
    "full": DiskFault(errno.ENOSPC, GROWING, (NotEnoughSpace.exit_code,)),
    "quota exceeded": DiskFault(errno.EDQUOT, GROWING, (NotEnoughSpace.exit_code,)),
    "read-only": DiskFault(errno.EROFS, CHANGING, (NotWritable.exit_code,)),
    "failing": DiskFault(errno.EIO, CHANGING, (VolumeFailed.exit_code,)),
    "without hard links": DiskFault(errno.EPERM, ("link",), (0,), first=True),
}
UNAVAILABLE: Final = HubUnavailable.exit_code
HUB: Final[Mapping[str, tuple[int, ...]]] = {
    "cut off": (UNAVAILABLE,),
    "wrong bytes": (DamagedModel.exit_code, UNAVAILABLE),
    "too short": (DamagedModel.exit_code, UNAVAILABLE),
    "slow": (),
    "busy": (UNAVAILABLE,),
    "broken": (UNAVAILABLE,),
    "not allowed any more": (AccessDenied.exit_code,),
    "redirected to nowhere": (UNAVAILABLE,),
}
"""What happens to answers, and the exit statuses that say it, if not all is well in the end."""
PATTERNS: Final = ("*.safetensors", "*.json", "config.json", "/api/models/*", "*")


def wrong_after(known: Known, place: Place, status: int, printed: str, ends: tuple[int, ...]) -> list[str]:
    """What is wrong once a program met a fault that is over now: how it ended, what is there, and what the next run
    makes of it."""
    wrong = [] if status in (0, *ends) else [f"it ended with {status}: {printed[-500:]}"]
    if status and ("error: " not in printed or "Traceback" in printed):
        wrong.append(f"it did not say what was wrong: {printed[-500:]}")
    wrong += steps.faults(place.store)
    steps.age(place.store)
    return wrong + place.again(known.step, known.after)


def at_a_call(known: Known, place: Place, kind: str, number: int) -> list[str]:
    """Let the disk fail from the call of this number on. Returns what is wrong."""
    fault = DISK[kind]
    steps.copy(known.before, place.store.root)
    how = f"fail:{1 if fault.first else number}:{fault.code}:{','.join(fault.kinds)}"
    status, printed = place.run(known.step, how)
    return wrong_after(known, place, status, printed, fault.ends)


def every_call(known: list[Known]) -> list[tuple[Known, str, int]]:
    """Each step with each fault at each of its calls that it concerns."""
    return [
        (each, kind, number)
        for each in known
        if each.step.killed
        for kind, fault in DISK.items()
        for number, call in enumerate(each.calls, 1)
        if call.kind in fault.kinds
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[str], None] | None]:
    """Mount a disk of its own; yields how to mount it again with other options, or None where nobody may."""
    folder.mkdir(parents=True)

    def mount(*options: str) -> int:
        return subprocess.run(["mount", *options, folder], capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "none"):
        yield None
        return

    def change(options: str) -> None:
        assert mount("-o", f"remount,{options}") == 0, options

    try:
        yield change
    finally:
        subprocess.run(["umount", folder], check=True)


def on_a_small_disk(known: Known, place: Place, change: Callable[[str], None], room: float | None) -> list[str]:
    """Run a step where there is so large a part of the *room* that it takes, or where nothing may be written if that is
    None. The store of *place* leads to the disk. Returns what is wrong."""
    root = place.store.root.resolve()
    change(f"rw,size={LARGE}")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(known.before, root, symlinks=True)
    used = shutil.disk_usage(root).used
    if room is None:
        change("ro")
    else:
        grown = sum(len(call.content or b"") for call in known.calls) + MARGIN
        change(f"size={used + int(grown * room)}")
    status, printed = place.run(known.step)
    change(f"rw,size={LARGE}")
    ends = (NotWritable.exit_code,) if room is None else (NotEnoughSpace.exit_code,)
    return wrong_after(known, place, status, printed, ends)


def disturb(hub: HubServer, kind: str, draw: random.Random) -> None:
    """Let some of the Hub's answers fail, the first ones or all."""
    pattern, times = draw.choice(PATTERNS), draw.choice((1, 2, 3, None))
    match kind:
        case "cut off":
            hub.cut(pattern, draw.randrange(2000), times=times, reset=draw.random() < 0.5)
        case "wrong bytes":
            hub.corrupt(pattern, times=times)
        case "too short":
            hub.shorten(pattern, draw.randrange(1, 100), times=times)
        case "slow":
            hub.slow(pattern, SLOW_BYTES_PER_S, times=times)
        case "busy":
            hub.fail(pattern, 429, times=times, retry_after=1)
        case "broken":
            hub.fail(pattern, draw.choice((500, 502, 503, 504)), times=times)
        case "not allowed any more":
            hub.fail(pattern, draw.choice((401, 403)), times=times)
        case "redirected to nowhere":
            hub.redirect(pattern, NOWHERE, times=times)


def of_the_hub(known: Known, place: Place, kind: str, draw: random.Random) -> list[str]:
    """Let the Hub fail while a model is acquired. Returns what is wrong."""
    steps.copy(known.before, place.store.root)
    disturb(place.hub.server, kind, draw)
    status, printed = place.run(known.step)
    place.hub.server.heal()
    return wrong_after(known, place, status, printed, HUB[kind])
