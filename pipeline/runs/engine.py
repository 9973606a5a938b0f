"""What the command line needs of an engine. ``pipeline.local`` and ``pipeline.argo`` implement it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from stages.parts.base.errors import MissingRun

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.runs.state import RunState
    from pipeline.settings.config import RunConfig

AnyRun = TypeVar("AnyRun")
LATEST: Final = "latest"
"""What commands take for the newest run."""


class Printout(NamedTuple):
    """What a command prints."""

    document: Any
    """With ``--json``: records, and what JSON has."""
    text: Any
    """A string, or anything that rich can draw."""
    failure: Exception | None = None
    """What the command fails with after it has printed this."""


def plain_table(*headings: str, rows: Iterable[Sequence[Any]] = (), right: Sequence[str] = (), **options: Any) -> Table:
    """Make a table without lines. The columns with the headings *right* are aligned on the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", **options)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class PipelineRun(Protocol):
    """One run of an engine."""

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> RunState: ...

    @property
    def winner(self) -> str | None: ...

    @property
    def outcome(self) -> str | None: ...

    @property
    def link(self) -> str | None:
        """Return where its page is, if it has one: a path or an address."""

    def show(self) -> Printout:
        """Return the run's tasks, and its results so far."""

    def report(self) -> Printout:
        """Return the run's report, or where it is. Raises: MissingRun: it was not written yet."""

    def logs(self, task: str | None, *, follow: bool) -> Iterator[str]:
        """Return the lines of one task's log; or of all tasks that have started, each line led by its task's name. With
        *follow*, wait for more lines until the run has ended.

        Raises:
            UnknownName: the run has no such task.
            MissingRun: it has not started.
            ConfigError: the engine follows only one task at a time.
        """

    def stop(self) -> bool:
        """Stop the run's tasks; its report is still written. False if the run has ended already."""

    def resume(self, task: str | None) -> list[str]:
        """Resume suspended tasks: *task*, or all. Returns their names; does not wait for them.

        Raises:
            MissingRun: the run has ended.
            UnknownName: *task* is not suspended.
            ConfigError: nothing is suspended.
        """


class PipelineEngine(Protocol):
    """Starts runs, and finds those that were started."""

    @property
    def no_runs(self) -> str:
        """What to tell if there are no runs: how to start one."""

    def start(
        self, config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool = False, force: bool = False
    ) -> Printout:
        """Start a run, and wait until it has succeeded, unless the engine was told not to.

        Args:
            model: a name on the Hub, or a local directory.
            serve: leave the winner serving at the end.
            refresh: ask the Hub again which commit a revision is.
            force: start another run even if the same one is active, on a cluster.

        Raises:
            ConfigError: the model's name or the settings can't be used; nothing was started.
            RunFailed: with the exit code of the task that failed first.
            Interrupted: by Ctrl-C.
        """

    def retry(self, name: str, *, allow_incomplete: bool) -> Printout:
        """Start a run with the arguments of run *name*; finished work is reused. With *allow_incomplete*, go on without
        a variant, whatever that run did. Raises: as ``start``."""

    def runs(self) -> Sequence[PipelineRun]:
        """All runs, the newest first."""

    def find(self, name: str) -> PipelineRun:
        """Find a run by its id, the beginning of its id, or 'latest'. Raises: as ``choose_run``."""


def last_runs(runs: Sequence[PipelineRun]) -> dict[str, PipelineRun]:
    """Return the first of *runs* of each model, by the model's directory in the store."""
    return {run.state.arguments.get("model-directory", ""): run for run in reversed(runs)}


def choose_run(name: str, runs: Mapping[str, AnyRun], place: str) -> AnyRun:
    """Return the one of *runs* by id, the newest first, that *name* means: an id, the beginning of one, or 'latest'.

    Raises: MissingRun: it means none, or more than one.
    """
    if name in runs:
        return runs[name]
    ids = [*runs]
    matches = ids[:1] if name == LATEST else [run for run in ids if run.startswith(name)]
    if len(matches) == 1:
        return runs[matches[0]]
    problem = "matches several runs" if matches else "is not a run"
    raise MissingRun(f"{name!r} {problem} in {place}", hint=f"the latest: {', '.join(ids[:5]) or 'none yet'}")
