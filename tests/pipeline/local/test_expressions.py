"""The language of depends, when and retry expressions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runs.expressions import Dialect, holds, names, parse
from stages.parts.base.errors import ConfigError

LAST = {
    "lastRetry.exitCode": "75",
    "lastRetry.status": "Failed",
    "lastRetry.message": "pod was evicted: node shutdown",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lastRetry.exitCode == '75'", True),
        ('lastRetry.exitCode == "75"', True),
        ("lastRetry.exitCode != '75'", False),
        ("lastRetry.message matches 'node shutdown|[Ee]vict|[Pp]reempt'", True),
        ("lastRetry.message matches '^node'", False),
        ("lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.message matches 'x'", True),
        ("lastRetry.status == 'Error' || lastRetry.exitCode == '1' && lastRetry.status == 'Failed'", False),
        ("(lastRetry.status == 'Failed' || lastRetry.exitCode == '1') && lastRetry.exitCode != '75'", False),
        (r"'it\'s' == 'it\'s'", True),
        (r"lastRetry.message matches 'node\\s+shutdown'", True),
    ],
)
def test_a_retry_expression_means_what_it_means_in_argo(text: str, expected: bool) -> None:
    assert holds(parse(text, "expression"), LAST.__getitem__) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("awq == awq", True),
        ("'awq' == awq", True),
        ("true == true", True),
        ("false == true", False),
        ("awq != gptq && (5 == 5 || 1 == 2)", True),
        ("Failed != Succeeded", True),
    ],
)
def test_words_in_a_when_need_no_quotes(text: str, expected: bool) -> None:
    assert holds(parse(text, "when"), str) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("awq-4bit == awq", "put texts in quotes"),
        ("a ==", "ends too early"),
        ("(a == b", "')' is missing"),
        ("a == b)", "')' was not expected"),
        ("a == b c", "'c' was not expected"),
        ("a == &&", "'&&' was not expected"),
        ("awq", "a comparison (==, !=, matches) is missing after 'awq'"),
        ("'open == a", "can't be read"),
        ("", "ends too early"),
        ("a matches '['", "not a regular expression"),
        ("a matches b", "needs a pattern in quotes"),
    ],
)
def test_a_text_that_is_not_an_expression_is_refused_and_shown(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="when") as caught:
        parse(text, "when")
    assert says in str(caught.value)


@pytest.mark.parametrize("dialect", ["when", "expression"])
@pytest.mark.parametrize(
    "text",
    [
        "asInt(a) == 75",
        "a < 3",
        "a in ['b']",
        "a contains 'b'",
        "a startsWith 'b'",
        "!(a == b)",
        "not (a == b)",
        "a == b ? c : d",
        "a ?? b",
    ],
)
def test_operators_that_our_workflows_do_not_use_are_refused(text: str, dialect: Dialect) -> None:
    with pytest.raises(ConfigError, match=dialect):
        parse(text, dialect)


def test_depends_names_tasks_with_hyphens() -> None:
    expression = parse("optimize-fp16.Succeeded && (optimize-awq||4bit.Failed)", "depends")
    assert list(names(expression)) == ["optimize-fp16.Succeeded", "optimize-awq", "4bit.Failed"]


@pytest.mark.parametrize("text", ["a == b", "'a'", "a(b)", "a,b", "(a, b)", "a.b.c", "[a]", "a && ", "!a"])
def test_depends_has_no_values(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, "depends")


VALUES = {"a-1": True, "b-2.Succeeded": False, "c": True, "d.Failed": False}
trees = st.recursive(
    st.sampled_from(sorted(VALUES)),
    lambda inner: st.tuples(inner, st.sampled_from(["&&", "||"]), inner) | st.tuples(st.just("("), inner),
    max_leaves=25,
)


def ours(tree: Any) -> str:
    match tree:
        case ("(", inner):
            return f"({ours(inner)})"
        case (left, operation, right):
            return f"{ours(left)} {operation} {ours(right)}"
        case leaf:
            return str(leaf)


def pythons(text: str) -> bool:
    """Python's own reading of the same text: its precedence of and, or is the same."""
    for name, value in VALUES.items():
        text = text.replace(name, str(value))
    return bool(eval(text.replace("&&", "and").replace("||", "or")))  # noqa: S307


@given(trees)
def test_random_conditions_agree_with_pythons_own_reading(tree: Any) -> None:
    text = ours(tree)
    assert holds(parse(text, "depends"), VALUES.__getitem__) is pythons(text)
