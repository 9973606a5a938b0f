"""The conditions of ``depends``, ``when`` and ``retryStrategy.expression``.

Argo evaluates these with two libraries (expr-lang and govaluate). This grammar covers the part of both that we use:
``&&`` and ``||``, parentheses, and in a ``when`` and a retry expression the comparisons ``== != matches`` of two
operands. A text in quotes stands for itself. A word stands for:

    depends     a task, or a task and its result: ``optimize-awq.Succeeded``; it is a condition by itself
    when        itself, because references are replaced before: ``{{x}} == awq`` needs no quotes
    retry       a variable: ``lastRetry.exitCode``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from stages.parts.base.errors import ConfigError


@dataclass(frozen=True)
class Operand:
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class TextComparison:
    left: Operand
    operation: str
    right: Operand


@dataclass(frozen=True)
class Junction:
    """``&&`` or ``||`` of two or more conditions."""

    operation: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = Operand | TextComparison | Junction
Dialect: TypeAlias = Literal["depends", "when", "expression"]
"""The field that a condition is the value of."""

COMPARISONS: Final = ("==", "!=", "matches")
WORDS: Final[dict[Dialect, str]] = {"depends": r"[-\w]+(?:\.\w+)?", "when": r"[\w.]+", "expression": r"\w+(?:\.\w+)*"}
SYMBOLS: Final = r"&&|\|\||==|!=|[()]"
QUOTED: Final = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""


def parse(text: str, dialect: Dialect) -> Condition:
    """Read a condition. Raises: ConfigError: *text* is not one of the dialect; the message says where."""
    parser = _Parser(text, dialect)
    condition = parser.disjunction()
    if parser.tokens:
        raise parser.mistake(f"{parser.tokens[0]!r} was not expected")
    return condition


def names(condition: Condition) -> Iterator[str]:
    """Every task and result in a ``depends``, in the order of the text."""
    match condition:
        case Operand(text):
            yield text
        case Junction(_, parts):
            for part in parts:
                yield from names(part)


def holds(condition: Condition, lookup: Callable[[str], str | bool]) -> bool:
    """Whether the condition is true. *lookup* returns the value of a word: a bool in ``depends``, a text elsewhere."""
    match condition:
        case Operand(text):
            return lookup(text) is True
        case TextComparison(left, operation, right):
            texts = [side.text if side.quoted else str(lookup(side.text)) for side in (left, right)]
            if operation == "matches":
                return re.search(texts[1], texts[0]) is not None
            return (texts[0] == texts[1]) == (operation == "==")
        case Junction("&&", parts):
            return all(holds(part, lookup) for part in parts)
        case Junction(_, parts):
            return any(holds(part, lookup) for part in parts)


class _Parser:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self.text, self.dialect = text, dialect
        self.tokens = list(self._tokens())

    def disjunction(self) -> Condition:
        return self._junction("||", lambda: self._junction("&&", self._condition))

    def _tokens(self) -> Iterator[str]:
        quoted = "" if self.dialect == "depends" else f"{QUOTED}|"
        token, at = re.compile(rf"\s*({SYMBOLS}|{quoted}{WORDS[self.dialect]})\s*"), 0
        while at < len(self.text):
            if not (match := token.match(self.text, at)):
                hint = "; put texts in quotes" if quoted else ""
                raise self.mistake(f"{self.text[at:]!r} can't be read{hint}")
            yield match[1]
            at = match.end()

    def _junction(self, operation: str, part: Callable[[], Condition]) -> Condition:
        parts = [part()]
        while self._take(operation):
            parts.append(part())
        return Junction(operation, tuple(parts)) if len(parts) > 1 else parts[0]

    def _condition(self) -> Condition:
        if self._take("("):
            inner = self.disjunction()
            if not self._take(")"):
                raise self.mistake("')' is missing")
            return inner
        left = self._operand()
        if self.dialect == "depends":
            return left
        if (operation := next(filter(self._take, COMPARISONS), None)) is None:
            raise self.mistake(f"a comparison ({', '.join(COMPARISONS)}) is missing after {left.text!r}")
        comparison = TextComparison(left, operation, self._operand())
        if operation == "matches":
            if not comparison.right.quoted:
                raise self.mistake("'matches' needs a pattern in quotes on its right")
            try:
                re.compile(comparison.right.text)
            except re.error as error:
                raise self.mistake(f"{comparison.right.text!r} is not a regular expression: {error}") from error
        return comparison

    def _operand(self) -> Operand:
        if not self.tokens:
            raise self.mistake("it ends too early")
        token = self.tokens.pop(0)
        if re.fullmatch(SYMBOLS, token):
            raise self.mistake(f"{token!r} was not expected")
        if token[0] in "'\"":
            # Inside quotes a backslash stands for the next character only before a quote or a backslash.
            return Operand(re.sub(r"\\([\\'\"])", r"\1", token[1:-1]), quoted=True)
        return Operand(token)

    def _take(self, symbol: str) -> bool:
        if self.tokens and self.tokens[0] == symbol:
            self.tokens.pop(0)
            return True
        return False

    def mistake(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.dialect} {self.text!r}: {problem}")
