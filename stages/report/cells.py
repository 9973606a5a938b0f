"""What the report's tables and lists show: text that is ready for the template, which only lays it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from scoring.names import recipe_of, variant_of
from scoring.units import GIB
from stages.report.plots import Style, legend_mark


@dataclass(frozen=True)
class Cell:
    lines: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    """Lines below, smaller and paler."""
    mark: Markup | None = None
    """A variant's mark, before the text."""
    css: str = ""
    """Classes of the style sheet, separated by spaces."""
    code: bool = False


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    css: str = ""


@dataclass(frozen=True)
class Table:
    id: str
    """Unique in the page."""
    heads: tuple[Cell, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fact:
    """One entry of a list of terms; *code* stands between the two texts."""

    term: str
    text: str = ""
    code: str = ""
    rest: str = ""
    css: str = ""


@dataclass(frozen=True)
class Variants:
    """The color and mark of each variant, the same in the whole page."""

    styles: dict[str, Style]

    @classmethod
    def styled(cls, names: Iterable[str], reference: str) -> Variants:
        """Give each format a color and a shape, and each recipe a sign; those of the *reference* are the first."""
        candidates = {*names, reference}
        formats = sorted({variant_of(name) for name in candidates} - {variant_of(reference)})
        recipes = sorted({recipe_of(name) for name in candidates} - {""})
        numbers = {name: number for number, name in enumerate([variant_of(reference), *formats])}
        signs = {name: number for number, name in enumerate(["", *recipes])}
        return cls({name: Style(numbers[variant_of(name)], signs[recipe_of(name)]) for name in candidates})

    def mark(self, name: str) -> Markup:
        return legend_mark(self.styles[name])

    def cell(self, name: str, *small: str) -> Cell:
        return Cell((name,), small, mark=self.mark(name))


def cell(text: str, *small: str, css: str = "", code: bool = False) -> Cell:
    return Cell((text,), small, css=css, code=code)


ABSENT: Final = cell("–")


def row(*cells: Cell, css: str = "") -> Row:
    return Row(cells, css)


def heads(*texts: str) -> tuple[Cell, ...]:
    return tuple(cell(text) for text in texts)


def interval(low: float, high: float, digits: int) -> str:
    """Write an interval, such as '0.36–0.41'."""
    return f"{low:,.{digits}f}–{high:,.{digits}f}"


def signed(value: float, digits: int) -> str:
    """Write a difference, such as '+0.12', with a true minus sign."""
    return f"{value:+z.{digits}f}".replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def count(number: int, noun: str) -> str:
    """Write a count, such as '1 round' and '2 rounds'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
