"""The language of depends, when and retry expressions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.local.expressions import DEPENDS, RETRY, VALUE, WHEN, decide, evaluate, names, parse
from stages.parts.base.errors import ConfigError

LAST = {
    "lastRetry.exitCode": "75",
    "lastRetry.status": "Failed",
    "lastRetry.message": "pod was evicted: node shutdown",
    "lastRetry.duration": "12",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lastRetry.exitCode == '75'", True),
        ('lastRetry.exitCode == "75"', True),
        ("lastRetry.exitCode != '75'", False),
        ("lastRetry.exitCode == 75", False),
        ("asInt(lastRetry.exitCode) == 75", True),
        ("asInt(lastRetry.exitCode) > 74 && asInt(lastRetry.duration) <= 12", True),
        ("lastRetry.exitCode in ['75', '143']", True),
        ("lastRetry.exitCode not in ['75', '143']", False),
        ("lastRetry.message matches 'node shutdown|[Ee]vict|[Pp]reempt'", True),
        ("lastRetry.message matches '^node'", False),
        ("lastRetry.message not contains 'evicted'", False),
        ("lastRetry.message startsWith 'pod' and true", None),
        ("lastRetry.message startsWith 'pod'", True),
        ("lastRetry.message endsWith 'shutdown'", True),
        ("not (lastRetry.status == 'Error') && !(lastRetry.exitCode == '1')", True),
        ("lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.message matches 'x'", True),
        ("lastRetry.status == 'Error' || lastRetry.exitCode == '1' && true", False),
        (r"'it\'s' == 'it' + 's'", None),
        (r"lastRetry.message matches 'node\\s+shutdown'", True),
        ("true == 1", False),
        ("1.5 < 2", True),
    ],
)
def test_a_retry_expression_means_what_it_means_in_argo(text: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError):
            parse(text, RETRY)
    else:
        assert decide(parse(text, RETRY), LAST.__getitem__) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("awq == awq", True),
        ("'awq' == awq", True),
        ("true == true", True),
        ("false == true", False),
        ("5 > 3", True),
        ("awq in ('awq', 'gptq')", True),
        ("fp16 in (awq, gptq)", False),
        ("awq != gptq && (5 >= 5 || 1 > 2)", True),
        ("!(awq == gptq)", True),
        ("awq < gptq && '10' < '9'", True),
    ],
)
def test_words_in_a_when_need_no_quotes(text: str, expected: bool) -> None:
    assert decide(parse(text, WHEN), str) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("awq-4bit == awq", "put texts in quotes"),
        ("a ==", "ends too early"),
        ("(a == b", "')' is missing"),
        ("a == b)", "')' was not expected"),
        ("a b", "'b' was not expected"),
        ("len(a) == 1", "no function 'len'"),
        ("'open == a", "can't be read"),
        ("", "ends too early"),
    ],
)
def test_what_is_no_expression_is_refused_and_shown(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="when") as caught:
        parse(text, WHEN)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("awq", "true or false"),
        ("awq < 3", "compares numbers"),
        ("3 startsWith '3'", "needs texts"),
        ("awq matches '['", "no regular expression"),
        ("asInt('x') == 1", "whole number"),
        ("'a' in 'abc'", "needs a list"),
        ("awq && true", "true or false"),
    ],
)
def test_operands_of_the_wrong_kind_are_an_error_not_a_surprise(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(parse(text, WHEN), str)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tasks.a.status == 'Succeeded' ? 'yes' : 'no'", "yes"),
        ("tasks['b-c'].status == 'Succeeded' ? 'yes' : tasks.a.status == 'x' ? 'x' : 'no'", "no"),
        ("tasks.a.outputs.parameters['d'] ?? 'spare'", "spare"),
        ('tasks["a"].outputs.parameters.d ?? tasks.a.status', "Succeeded"),
        ("tasks.a.outputs.parameters.d", None),
        ("(tasks.a.outputs.parameters.d ?? 'x') == 'x'", True),
        ("tasks.a.outputs.parameters.d == ''", False),
        ("tasks.a.outputs.parameters.d ?? 'x' == 'x'", True),
    ],
)
def test_a_value_can_be_chosen_and_what_is_absent_is_no_empty_text(text: str, expected: object) -> None:
    """docs/variables.md, "Outputs of Skipped and Omitted Nodes"."""
    known = {"tasks.a.status": "Succeeded", "tasks.b-c.status": "Failed"}
    assert evaluate(parse(text, VALUE), known.get) == expected


@pytest.mark.parametrize("text", ["a ? b", "a ??", "a[b]", "a : b", "tasks['a' == 'b'"])
def test_choices_that_are_not_whole_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expression"):
        parse(text, VALUE)


def test_depends_names_tasks_with_hyphens() -> None:
    expression = parse("optimize-fp16.Succeeded && (optimize-awq||!4bit.Failed)", DEPENDS)
    assert list(names(expression)) == ["optimize-fp16.Succeeded", "optimize-awq", "4bit.Failed"]


@pytest.mark.parametrize("text", ["a == b", "'a'", "a(b)", "a,b", "(a, b)", "a.b.c", "[a]", "a && "])
def test_depends_has_no_values(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, DEPENDS)


def test_what_is_not_known_yet_decides_nothing_unless_it_does_not_matter() -> None:
    known: dict[str, Any] = {"yes": True, "no": False, "open": None}
    table = {
        "open": None,
        "!open": None,
        "open && no": False,
        "no && open": False,
        "open && yes": None,
        "open || yes": True,
        "open || no": None,
        "!(open && no)": True,
    }
    assert {text: decide(parse(text, DEPENDS), known.__getitem__) for text in table} == table


VALUES = {"a-1": True, "b-2.Succeeded": False, "c": True, "d.Failed": False}
trees = st.recursive(
    st.sampled_from(sorted(VALUES)),
    lambda inner: (
        st.tuples(st.just("!"), inner)
        | st.tuples(inner, st.sampled_from(["&&", "||"]), inner)
        | st.tuples(st.just("("), inner)
    ),
    max_leaves=25,
)


def ours(tree: Any) -> str:
    match tree:
        case ("!", inner):
            return f"!{ours(inner)}" if isinstance(inner, str) or len(inner) == 2 else f"!({ours(inner)})"
        case ("(", inner):
            return f"({ours(inner)})"
        case (left, operation, right):
            return f"{ours(left)} {operation} {ours(right)}"
        case leaf:
            return str(leaf)


def pythons(text: str) -> bool:
    """Python's own reading of the same text: its precedence of not, and, or is the same."""
    for name, value in VALUES.items():
        text = text.replace(name, str(value))
    return bool(eval(text.replace("!", " not ").replace("&&", "and").replace("||", "or")))  # noqa: S307


@given(trees)
def test_random_conditions_agree_with_pythons_own_reading(tree: Any) -> None:
    text = ours(tree)
    assert evaluate(parse(text, DEPENDS), VALUES.__getitem__) is pythons(text)
