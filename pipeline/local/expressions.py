"""The small expression language of ``depends``, ``when``, and whatever is called ``expression``.

Argo evaluates these with two libraries (expr-lang and govaluate); here one grammar covers what they share, and
four dialects say what a word means in each field:

    depends     a task (``optimize-awq.Succeeded``); undecided while the task is
    when        a text, as govaluate is used there: ``{{x}} == awq`` needs no quotes
    retry       a variable (``lastRetry.exitCode``) or a call of ``asInt``
    value       a variable (``tasks['make-it'].outputs.parameters.digest``) of an output or a hook, perhaps without
                a value; ``a ?? b`` is b then, and there is ``a ? b : c``

Operators, loosest first: ``||``, ``&&``, then ``== != < <= > >= in contains matches startsWith endsWith`` (``not``
before a word among them), then ``!`` or ``not``. Literals: quoted texts, numbers, ``true``, ``false``, lists.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from stages.parts.base.errors import ConfigError

Value: TypeAlias = "str | int | float | bool | list[Value] | None"
"""None: not known yet."""


@dataclass(frozen=True)
class Literal:
    value: Value


@dataclass(frozen=True)
class Name:
    text: str


@dataclass(frozen=True)
class Items:
    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Apply:
    """An operator or a function with its operands."""

    operation: str
    operands: tuple[Expression, ...]


Expression: TypeAlias = Literal | Name | Items | Apply


@dataclass(frozen=True)
class Dialect:
    field: str
    name: re.Pattern[str]
    values: bool = True
    """Whether there are literals, and with them comparisons and calls."""
    choices: bool = False
    """Whether there are ``?:`` and ``??``."""


DEPENDS: Final = Dialect("depends", re.compile(r"[A-Za-z0-9][-A-Za-z0-9]*(\.[A-Za-z]+)?"), values=False)
WHEN: Final = Dialect("when", re.compile(r"[A-Za-z_][\w.]*"))
RETRY: Final = Dialect("expression", re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"))
INDEX: Final = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\")\s*\]")
VALUE: Final = Dialect("expression", re.compile(rf"[A-Za-z_]\w*(\.[A-Za-z_]\w*|{INDEX.pattern})*"), choices=True)

SPACE: Final = re.compile(r"\s+")
SYMBOL: Final = re.compile(r"&&|\|\||==|!=|<=|>=|[<>!()\[\],]")
CHOICE: Final = re.compile(r"\?\?|[?:]")
NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(?![\w.])")
QUOTED: Final = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
ORDER: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WORD_OPERATORS: Final = frozenset({"in", "contains", "matches", "startsWith", "endsWith"})
COMPARISONS: Final = frozenset({"==", "!=", *ORDER}) | WORD_OPERATORS
FUNCTIONS: Final = frozenset({"asInt"})


@dataclass(frozen=True)
class Token:
    kind: str
    """symbol, word, or value."""
    text: str
    value: Value = None


def parse(text: str, dialect: Dialect) -> Expression:
    """Raises: ConfigError: *text* is no expression of the dialect; says where."""
    return _Parser(text, dialect).whole()


def names(expression: Expression) -> Iterator[str]:
    """Every name in it, in the order of the text."""
    match expression:
        case Name(text):
            yield text
        case Items(items):
            for each in items:
                yield from names(each)
        case Apply(_, operands):
            for each in operands:
                yield from names(each)


def evaluate(expression: Expression, lookup: Callable[[str], Value]) -> Value:
    """The value, where *lookup* gives that of a name. None stays None in ``!``, ``&&``, ``||`` unless the rest decides.

    Raises:
        ConfigError: an operand is of the wrong type.
    """
    match expression:
        case Literal(value):
            return value
        case Name(text):
            return lookup(text)
        case Items(items):
            return [evaluate(each, lookup) for each in items]
        case Apply("&&" | "||" as operation, (left, right)):
            return _logic(operation, evaluate(left, lookup), lambda: evaluate(right, lookup))
        case Apply("??", (left, right)):
            value = evaluate(left, lookup)
            return evaluate(right, lookup) if value is None else value
        case Apply("?", (condition, then, otherwise)):
            return evaluate(then if decide(condition, lookup) else otherwise, lookup)
        case Apply(operation, operands):
            return _apply(operation, [evaluate(each, lookup) for each in operands])


def decide(expression: Expression, lookup: Callable[[str], Value]) -> bool | None:
    """Like evaluate, for an expression that must be true or false (or None: not known yet)."""
    return _truth(evaluate(expression, lookup), "the whole expression")


class _Parser:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self.text, self.dialect = text, dialect
        self.tokens = list(self._tokens())
        self.position = 0

    def whole(self) -> Expression:
        result = self._choice()
        if self._peek():
            raise self._mistake(f"{self._peek()!r} was not expected")
        return result

    def _tokens(self) -> Iterator[Token]:
        at = 0
        while at < len(self.text):
            if found := SPACE.match(self.text, at):
                pass
            elif found := (self.dialect.choices and CHOICE.match(self.text, at)) or SYMBOL.match(self.text, at):
                yield Token("symbol", found[0])
            elif self.dialect.values and (found := QUOTED.match(self.text, at)):
                body = found[1] if found[1] is not None else found[2]
                # Inside quotes a backslash stands for the next character only before a quote or a backslash.
                yield Token("value", found[0], re.sub(r"\\([\\'\"])", r"\1", body))
            elif self.dialect.values and (found := NUMBER.match(self.text, at)):
                yield Token("value", found[0], float(found[0]) if found[1] else int(found[0]))
            elif found := self.dialect.name.match(self.text, at):
                yield self._word(INDEX.sub(lambda index: f".{index[1] or index[2]}", found[0]))
            else:
                quotes = "; put texts in quotes" if self.dialect.values else ""
                raise self._mistake(f"{self.text[at:]!r} can't be read{quotes}")
            at = found.end()

    def _word(self, text: str) -> Token:
        if self.dialect.values and text in ("true", "false"):
            return Token("value", text, text == "true")
        is_operator = self.dialect.values and (text in WORD_OPERATORS or text == "not")
        return Token("symbol" if is_operator else "word", text)

    def _choice(self) -> Expression:
        condition = self._either()
        if not self._take("?"):
            return condition
        then = self._choice()
        if not self._take(":"):
            raise self._mistake("':' is missing")
        return Apply("?", (condition, then, self._choice()))

    def _either(self) -> Expression:
        left = self._both()
        while self._take("||"):
            left = Apply("||", (left, self._both()))
        return left

    def _both(self) -> Expression:
        left = self._comparison()
        while self._take("&&"):
            left = Apply("&&", (left, self._comparison()))
        return left

    def _comparison(self) -> Expression:
        left = self._negation()
        while self.dialect.values:
            negated = self._take("not")
            operation = next(filter(self._take, COMPARISONS), None)
            if operation is None and negated:
                raise self._mistake("'not' stands before no operator")
            if operation is None:
                return left
            left = Apply(operation, (left, self._negation()))
            left = Apply("!", (left,)) if negated else left
        return left

    def _negation(self) -> Expression:
        if self._take("!") or self._take("not"):
            return Apply("!", (self._negation(),))
        left = self._operand()
        while self._take("??"):  # binds tighter than any other, as in expr-lang
            left = Apply("??", (left, self._operand()))
        return left

    def _operand(self) -> Expression:
        if self._take("("):
            inner = self._list(")")
            return inner.items[0] if len(inner.items) == 1 else inner
        if self.dialect.values and self._take("["):
            return self._list("]")
        token = self._next()
        if token.kind == "value":
            return Literal(token.value)
        if token.kind == "symbol":
            raise self._mistake(f"{token.text!r} was not expected")
        if self._take("("):
            if token.text not in FUNCTIONS:
                raise self._mistake(f"there is no function {token.text!r}; known: {', '.join(sorted(FUNCTIONS))}")
            return Apply(token.text, self._list(")").items)
        return Name(token.text)

    def _list(self, end: str) -> Items:
        items = [self._choice()]
        while self.dialect.values and self._take(","):
            items.append(self._choice())
        if not self._take(end):
            raise self._mistake(f"{end!r} is missing")
        return Items(tuple(items))

    def _peek(self) -> str:
        return self.tokens[self.position].text if self.position < len(self.tokens) else ""

    def _next(self) -> Token:
        if self.position >= len(self.tokens):
            raise self._mistake("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1]

    def _take(self, symbol: str) -> bool:
        if self.position < len(self.tokens) and self.tokens[self.position] == Token("symbol", symbol):
            self.position += 1
            return True
        return False

    def _mistake(self, what: str) -> ConfigError:
        return ConfigError(f"{self.dialect.field} {self.text!r}: {what}")


def _logic(operation: str, left: Value, right: Callable[[], Value]) -> bool | None:
    """Kleene's three-valued logic; the right side is only looked at where the left does not decide."""
    decisive = operation == "||"
    first = _truth(left, operation)
    if first is decisive:
        return decisive
    second = _truth(right(), operation)
    if second is decisive:
        return decisive
    return None if first is None or second is None else not decisive


def _apply(operation: str, values: list[Value]) -> Value:
    if operation == "!":
        truth = _truth(values[0], "!")
        return None if truth is None else not truth
    if operation == "asInt":
        return _integer(values)
    left, right = values
    if operation in ("==", "!="):
        # 1 == true holds in Python, not in Argo.
        equal = left == right and isinstance(left, bool) == isinstance(right, bool)
        return equal == (operation == "==")
    if operation in ORDER:
        if isinstance(left, str) and isinstance(right, str):  # both libraries compare texts, too
            return ORDER[operation]((left > right) - (left < right), 0)
        return ORDER[operation](_number(left, operation), _number(right, operation))
    return _word_operator(operation, left, right)


def _word_operator(operation: str, left: Value, right: Value) -> bool:
    if operation == "in" and isinstance(right, list):
        return left in right
    if operation == "contains" and isinstance(left, list):
        return right in left
    if not (isinstance(left, str) and isinstance(right, str)):
        raise ConfigError(f"{operation!r} needs texts, not {left!r} and {right!r}")
    match operation:
        case "contains":
            return right in left
        case "startsWith":
            return left.startswith(right)
        case "endsWith":
            return left.endswith(right)
        case "matches":
            return _matches(left, right)
        case _:
            raise ConfigError(f"{operation!r} needs a list on its right, not {right!r}")


def _matches(text: str, pattern: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error


def _integer(values: list[Value]) -> int:
    try:
        (value,) = values
        return int(str(value))
    except ValueError as error:
        raise ConfigError(f"asInt takes one whole number as a text, not {values!r}") from error


def _truth(value: Value, where: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{where} needs true or false, not {value!r}")


def _number(value: Value, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ConfigError(f"{where!r} compares numbers, not {value!r}; asInt('75') is 75")
