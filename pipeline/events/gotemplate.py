"""Go's text templates, as far as our Sensor's ``dataTemplate`` uses them, and a few of sprig's functions.

Values (``.a.b``, ``$.a.b``, text, whole numbers), pipelines, ``range`` over a list, and ``if``; what is beyond that is
refused.
Sources: https://pkg.go.dev/text/template, https://masterminds.github.io/sprig/
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from stages.parts.base.errors import UnsupportedField

ACTION: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
TOKEN: Final = re.compile(
    r'\s+|(?P<text>"[^"\\]*"|`[^`]*`)|(?P<number>\d+)|(?P<field>\$?(?:\.[A-Za-z_]\w*)+|\$|\.)'
    r"|(?P<word>[A-Za-z_]\w*)|(?P<sign>[|()])"
)


def _printf(form: str, *values: str) -> str:
    if re.findall(r"%.?", form) != ["%s"] * len(values) or not all(isinstance(each, str) for each in values):
        raise UnsupportedField(f"printf {form!r}: only %s is evaluated here, with a text for each")
    return form % values


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        value = value[key]
    return value


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "eq": lambda one, other: one == other,
    "index": _index,
    "printf": _printf,
    "replace": lambda old, new, text: text.replace(old, new),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "trunc": lambda length, text: text[:length],
}


def render(template: str, data: Mapping[str, Any]) -> str:
    """The text that *template* gives for *data*.

    Raises:
        UnsupportedField: it uses something that is not evaluated here, or a value that is not there.
    """
    parts = iter(_split(template))
    return "".join(_run(_block(parts, template, nested=False), dict(data), dict(data)))


@dataclass(frozen=True)
class _Action:
    keyword: str
    """'', 'range' or 'if'."""
    tokens: tuple[re.Match[str], ...]
    body: tuple[str | _Action, ...] = ()


_Block: TypeAlias = "tuple[str | _Action, ...]"


def _split(template: str) -> list[tuple[str, str]]:
    """('text', …) and ('action', …), in turn."""
    kinds = ("text", "action")
    return [(kinds[number % 2], each) for number, each in enumerate(ACTION.split(template))]


def _block(parts: Iterator[tuple[str, str]], template: str, *, nested: bool) -> _Block:
    found: list[str | _Action] = []
    for kind, content in parts:
        if kind == "text":
            found.append(content)
            continue
        tokens = _tokens(content)
        keyword = tokens[0]["word"] if tokens else ""
        if keyword == "end" and nested and len(tokens) == 1:
            return tuple(found)
        if keyword in ("range", "if"):
            found.append(_Action(keyword, tokens[1:], _block(parts, template, nested=True)))
        else:
            found.append(_Action("", tokens))
    if nested:
        raise UnsupportedField(f"a range or if has no end: {template}")
    return tuple(found)


def _tokens(content: str) -> tuple[re.Match[str], ...]:
    found, position = [], 0
    while position < len(content):
        token = TOKEN.match(content, position)
        if token is None:
            raise UnsupportedField(
                f"{{{{{content}}}}} has something that is not evaluated here: {content[position:]!r}"
            )
        position = token.end()
        if token.lastgroup:
            found.append(token)
    return tuple(found)


def _run(block: _Block, dot: Any, root: Any) -> Iterator[str]:
    for each in block:
        if isinstance(each, str):
            yield each
            continue
        value = _Pipeline(each.tokens, dot, root).value()
        if each.keyword == "range":
            if not isinstance(value, list):
                raise UnsupportedField(f"range goes over a list, not a {type(value).__name__}")
            for item in value:
                yield from _run(each.body, item, root)
        elif each.keyword == "if":
            if value:
                yield from _run(each.body, dot, root)
        elif isinstance(value, str):
            yield value
        else:
            raise UnsupportedField(f"{''.join(token[0] for token in each.tokens)} is no text but {value!r}")


class _Pipeline:
    """One action's tokens, read from left to right."""

    def __init__(self, tokens: tuple[re.Match[str], ...], dot: Any, root: Any) -> None:
        self.rest, self.dot, self.root = list(tokens), dot, root

    def value(self) -> Any:
        value = self._commands()
        if self.rest:
            raise UnsupportedField(f"{self.rest[0][0]!r} is not expected here")
        return value

    def _commands(self) -> Any:
        value = self._command()
        while self.rest and self.rest[0][0] == "|":
            self.rest.pop(0)
            value = self._command(value)
        return value

    def _command(self, *piped: Any) -> Any:
        if not self.rest:
            raise UnsupportedField("an action of the template is empty")
        name = self.rest[0]["word"]
        if name is None:
            if piped:
                raise UnsupportedField(f"{self.rest[0][0]!r} is no function")
            return self._operand()
        self.rest.pop(0)
        if name not in FUNCTIONS:
            raise UnsupportedField(
                f"the template's function {name} is not evaluated here", hint=f"known: {', '.join(sorted(FUNCTIONS))}"
            )
        operands = []
        while self.rest and self.rest[0][0] not in ("|", ")"):
            operands.append(self._operand())
        try:
            return FUNCTIONS[name](*operands, *piped)
        except (TypeError, AttributeError, LookupError) as error:
            raise UnsupportedField(f"{name} can't be used with {[*operands, *piped]}") from error

    def _operand(self) -> Any:
        token = self.rest.pop(0)
        if token["text"]:
            return token[0][1:-1]
        if token["number"]:
            return int(token[0])
        if token["field"]:
            return self._field(token[0])
        if token[0] == "(":
            value = self._commands()
            if not self.rest or self.rest.pop(0)[0] != ")":
                raise UnsupportedField("a ( of the template has no )")
            return value
        raise UnsupportedField(f"{token[0]!r} is not expected here")

    def _field(self, text: str) -> Any:
        value = self.root if text.startswith("$") else self.dot
        for key in filter(None, text.removeprefix("$").split(".")):
            if not isinstance(value, dict) or key not in value:
                raise UnsupportedField(f"the event has nothing at {text}")
            value = value[key]
        return value
