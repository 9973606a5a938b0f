"""Power that fails: what a disk may hold after each call of a program, if only what was made durable surely lasts.

A name lasts once its folder was made durable after it; the content of a file, once the file was. All else lasts or does
not, each change of a name by itself: file systems promise no order.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from stages.parts.base.store import ModelStore
from stages.parts.releases import release as releases
from tests.campaign import steps
from tests.campaign.calls import Call
from tests.campaign.kills import Known
from tests.campaign.steps import Place

Lasts = Callable[[], bool]
NOTHING: Final = ("write", "failed")
"""The calls that change no name and make nothing durable."""
DRAWS: Final = 3
"""States drawn after each call, beside that in which nothing else lasts and that in which everything does."""


@dataclass(eq=False)
class Node:
    """A file, a folder or a symbolic link, whatever its names are."""

    names: dict[str, Node] | None = None
    """Of a folder: as programs see it."""
    lasting: dict[str, Node] = field(default_factory=dict)
    """Of a folder: what surely lasts of it."""
    leads: str | None = None
    content: bytes = b""
    lasting_content: bytes | None = None


Change = list[tuple[Node, str, Node | None]]
"""Names that appear and vanish together."""


class Disk:
    """What a program sees of a folder, and what would be left of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.pending = root, list[Change]()
        known: dict[int, Node] = {}
        self.top = self._loaded(root, known)

    def _loaded(self, path: Path, known: dict[int, Node]) -> Node:
        if path.is_symlink():
            return Node(leads=str(path.readlink()))
        if path.is_dir():
            names = {each.name: self._loaded(each, known) for each in path.iterdir()}
            return Node(names=names, lasting=dict(names))
        if (inode := path.stat().st_ino) not in known:
            known[inode] = Node(content=(read := path.read_bytes()), lasting_content=read)
        return known[inode]

    def _folder(self, path: str) -> tuple[Node, str]:
        """The folder of a path, and the path's name in it."""
        *above, name = Path(path).relative_to(self.root).parts
        node = self.top
        for each in above:
            assert node.names is not None
            node = node.names[each]
        return node, name

    def _change(self, *names: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in names:
            assert folder.names is not None
            folder.names.pop(name, None) if node is None else folder.names.update({name: node})
        self.pending.append([*names])

    def apply(self, call: Call, written: bytes) -> None:
        """Do what a call did; *written* is what its file will hold, as far as that was seen."""
        if call.kind in NOTHING:
            return None
        if call.path == str(self.root):
            return self._last(self.top, None)
        folder, name = self._folder(call.path)
        assert folder.names is not None
        node = folder.names.get(name)
        if call.kind == "fsync":
            self._last(node, call.content)
        elif call.kind in ("unlink", "rmdir"):
            self._change((folder, name, None))
        elif call.kind == "mkdir":
            self._change((folder, name, Node(names={})))
        elif call.kind == "symlink":
            self._change((folder, name, Node(leads=call.source)))
        elif call.kind == "create":
            self._change((folder, name, Node(content=written)))
        elif call.kind in ("append", "rewrite"):
            assert node is not None
            node.content = written
        else:
            source, former = self._folder(call.source)
            moved = (source.names or {}).get(former) or Node(content=call.content or b"")
            self._change(*([] if call.kind == "link" else [(source, former, None)]), (folder, name, moved))
        return None

    def _last(self, node: Node | None, content: bytes | None) -> None:
        """Make a file's content, or a folder's names, lasting."""
        assert node is not None
        if node.names is None:
            node.content, node.lasting_content = content or b"", content
            return
        for change in self.pending:
            for each in [each for each in change if each[0] is node]:
                _enter(node.lasting, *each[1:])
                change.remove(each)
        self.pending = [change for change in self.pending if change]

    def write(self, target: Path, lasts: Lasts, part: float) -> None:
        """Write what is left to *target*: of a file that was not made durable, its first *part*."""
        chosen = [change for change in self.pending if lasts()]
        written: dict[int, Path] = {}

        def put(node: Node, path: Path) -> None:
            if node.leads is not None:
                path.symlink_to(node.leads)
            elif node.names is not None:
                path.mkdir()
                names = dict(node.lasting)
                for _, name, other in [each for change in chosen for each in change if each[0] is node]:
                    _enter(names, name, other)
                for name, each in names.items():
                    put(each, path / name)
            elif first := written.get(id(node)):
                os.link(first, path)
            else:
                whole = node.lasting_content == node.content
                kept = node.content if whole else node.content[: round(part * len(node.content))]
                path.write_bytes(node.lasting_content if part == 0 and node.lasting_content is not None else kept)
                written[id(node)] = path

        put(self.top, target)


def _enter(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def contents(calls: list[Call]) -> list[bytes]:
    """What the file of each call holds when it is next seen."""
    later: dict[str, bytes] = {}
    found = []
    for call in reversed(calls):
        if call.content is not None:
            later[call.source or call.path] = call.content
        found.append(later.get(call.path, b""))
    return found[::-1]


class Failure(NamedTuple):
    """What a step left when power failed."""

    after: str
    at_the_end: bool
    """Whether the step had ended, and nothing lasts but what was made durable."""


def failures(known: Known, root: Path, scratch: Path, draw: random.Random, every: int = 1) -> Iterator[Failure]:
    """Write to *scratch* the stores that may be left if power fails after each call of a step, or each *every*-th
    of them and the one at the end. *root* is the folder in which the calls were seen."""
    disk = Disk(known.before)
    choices: list[tuple[Lasts, float]] = [(lambda: False, 0.0), (lambda: True, 0.0), (lambda: True, 0.5)]
    choices += [(lambda: draw.random() < 0.5, 0.5)] * DRAWS
    last = max(number for number, call in enumerate(known.calls, 1) if call.kind not in NOTHING)
    for number, (call, content) in enumerate(zip(known.calls, contents(known.calls), strict=True), 1):
        moved = call._replace(path=_below(call.path, root, known.before))
        if call.source and call.kind != "symlink":
            moved = moved._replace(source=_below(call.source, root, known.before))
        disk.apply(moved, content)
        if call.kind in NOTHING:
            continue
        for choice, (lasts, part) in enumerate(choices):
            at_the_end = number == last and choice == 0
            if (number * len(choices) + choice) % every and not at_the_end:
                continue
            if scratch.exists():
                shutil.rmtree(scratch)
            scratch.parent.mkdir(parents=True, exist_ok=True)
            disk.write(scratch, lasts, part)
            after = f"{known.step.name}, power fails after {call.kind} {number} of {len(known.calls)}"
            yield Failure(after, at_the_end)


def _below(path: str, root: Path, other: Path) -> str:
    return str(other / Path(path).relative_to(root))


def wrong_after(known: Known, place: Place) -> list[str]:
    """What is wrong with a store that was left: it must have the former release in production, or the next one."""
    store, before = place.store, ModelStore(known.before, place.store.model)
    found = steps.faults(store)
    former, now = releases.current_release(before), releases.current_release(store)
    if now not in (former, known.after.get("production", "").rpartition("/")[2] or None):
        found.append(f"{now} is in production, after {former}")
    return found


def lost_at_the_end(known: Known, place: Place) -> list[str]:
    """What a program that had ended well has lost."""
    return steps.differences(steps.but_for_aside(place.store), steps.without_aside(known.after))
