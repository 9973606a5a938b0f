"""The progress of a run on stderr: a live tree on a terminal, plain lines elsewhere."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from pipeline.runs.state import Node, Phase, RunState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

TAIL_BYTES: Final = 1 << 14
MARKS: Final[dict[Phase, tuple[str, str]]] = {
    "Pending": ("·", "dim"),
    "Running": ("▶", "cyan"),
    "Succeeded": ("✔", "green"),
    "Failed": ("✘", "red"),
    "Error": ("✘", "red"),
    "Skipped": ("–", "dim"),
    "Omitted": ("–", "dim"),
}


class RunObserver(Protocol):
    """Shows every change of a run. It must not block, and must not change the states, which belong to the engine."""

    def changed(self, run: RunState) -> None:
        """Show that the run, or a node of it, may have changed."""

    def finished(self, run: RunState) -> None:
        """Show the end. This is called once, also after an error of the engine."""


class Lines:
    """One line for each change: ``12:01:33 optimize-awq  Succeeded  41.2 s``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = {"": ("", "")}
        """The phase and message of each node, and under an empty name of the run, as they were shown last."""

    def finished(self, run: RunState) -> None:
        self._shown[""] = (run.phase, run.message)
        self.changed(run)
        self._say(run, run.name, run.phase, run.message, run.seconds)

    def changed(self, run: RunState) -> None:
        if self._is_new("", run.phase, run.message):
            self._say(run, run.name, run.phase, run.message, run.seconds)
        for node in run.nodes:
            phase = "Cached" if node.cached else node.phase
            if self._is_new(node.name, phase, node.message):
                self._say(run, node.name, phase, run.message_of(node), node.seconds if node.finished else None)
                if node.hint:
                    print(f"         hint: {node.hint}", file=self._stream, flush=True)

    def _is_new(self, name: str, phase: str, message: str) -> bool:
        former, self._shown[name] = self._shown.get(name, ("Pending", "")), (phase, message)
        return former != (phase, message)

    def _say(self, run: RunState, name: str, phase: str, message: str, seconds: float | None) -> None:
        width = max(len(title) for title in (run.name, *(node.name for node in run.nodes)))
        took = "" if seconds is None else duration(seconds)
        line = "  ".join(part for part in (f"{name:<{width}}", f"{phase:<9}", took, message) if part)
        print(f"{datetime.now().astimezone():%H:%M:%S} {line.rstrip()}", file=self._stream, flush=True)


class Tree:
    """A live tree with a line for each node, and the last line of its log while it runs."""

    def __init__(self, console: Console, run_dir: Path) -> None:
        self._console, self._run_dir = console, run_dir
        self._run: RunState
        self._live: Live | None = None

    def changed(self, run: RunState) -> None:
        from rich.live import Live

        self._run = run
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)
            self._live.start()

    def finished(self, run: RunState) -> None:
        self._run = run
        if self._live:
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.text import Text
        from rich.tree import Tree as RichTree

        run = self._run
        style = {"Succeeded": "green", "Running": "cyan", "Pending": "yellow"}.get(run.phase, "red")
        title = Text.assemble((run.name, "bold"), "  ", (run.phase, style), "  ", duration(run.seconds or 0.0))
        if run.message:
            title.append(f"  {run.message.splitlines()[0]}", "dim")
        tree = RichTree(title, guide_style="dim")
        width = max((len(node.title) for node in run.nodes), default=0)
        branches = {"": tree}
        for node in run.nodes:
            branches[node.name] = branches[node.parent].add(self._line(run, node, width))
        return tree

    def _line(self, run: RunState, node: Node, width: int) -> Text:
        from rich.text import Text

        mark, style = MARKS[node.phase]
        took = f"{duration(node.seconds):>8}" if node.seconds is not None else " " * 8
        line = Text.assemble((f"{mark} ", style), f"{node.title:<{width}} ", (took, "dim"), "  ", no_wrap=True)
        line.overflow = "ellipsis"
        if node.cached:
            line.append("cached ", "green")
        if message := run.message_of(node):
            failed = node.phase in ("Failed", "Error")
            line.append(message.splitlines()[0], "red" if failed else "yellow" if not node.finished else "dim")
        elif node.phase == "Running" and node.log:
            line.append(last_line(self._run_dir / node.log), "dim")
        if node.hint:
            line.append(f"  hint: {node.hint}", "dim")
        return line


def observer_for(stream: TextIO, run_dir: Path) -> RunObserver:
    """Return the live tree if *stream* is a terminal, else plain lines."""
    if not stream.isatty():
        return Lines(stream)
    from rich.console import Console

    return Tree(Console(file=stream), run_dir)


def duration(seconds: float) -> str:
    """Return a duration as text: '0.4 s', '41.2 s', '3:07', '1:02:11'."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def last_line(log: Path, start: int = 0) -> str:
    """Read the last line of a log, from the byte *start*, without control sequences; empty if there is none. Progress
    bars rewrite their line with carriage returns."""
    from rich.text import Text

    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return Text.from_ansi(lines[-1]).plain.strip() if lines else ""
