"""The parsers with which vLLM finds calls of tools and thoughts in what a model writes.

Its chat template shows the form that a model was trained to write them in, and the form decides the parser.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stages.parts.base.errors import UnknownName
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import Settings, parse, read_yaml
from stages.parts.model.checkpoint import config_in
from stages.parts.model.description import chat_template, text_of

PARSES_CALLS: Final = "--enable-auto-tool-choice"
"""An argument of ``vllm serve`` without which it refuses ``tool_choice: auto``."""
TOOL_PARSER: Final = "--tool-call-parser"
REASONING_PARSER: Final = "--reasoning-parser"
OWN_TEMPLATE: Final = "--chat-template"
"""With this extra argument the model's own template is not used, and nothing is concluded from it."""
NOT_PARSED: Final = "the chat template offers tools, but no parser is known for its calls (serving.tool_parser)"
TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
PROMPT: Final = "add_generation_prompt"
"""After it, a template writes what comes right before an answer."""


class Form(Settings):
    """A form of calls or thoughts; the table says what its fields are."""

    parser: str
    marks: tuple[str, ...]
    families: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


class Forms(Settings):
    calls: tuple[Form, ...]
    thoughts: tuple[Form, ...]
    before_answer: tuple[Form, ...]
    always: Form


TABLE: Final = Path(__file__).with_suffix(".yaml")
FORMS: Final = parse(Forms, read_yaml(TABLE), str(TABLE))
SWITCHES: Final = ("thinking", "no_think")
"""In a template that can do without thoughts: a parser that is not made for that would take the answer for thoughts."""


@dataclass(frozen=True)
class ChatModel:
    """What decides a model's parsers."""

    model_type: str
    template: str
    """The text of its chat templates; empty without one."""
    tokenizer: str | None = None
    """The text of the tokenizer's files; None if it is not known."""

    @property
    def offers_tools(self) -> bool:
        return "tools" in self.template

    @property
    def tool_parser(self) -> str | None:
        """Find the parser for the calls that it writes; None if there are none, or none is known."""
        return self._first(FORMS.calls, self.template) if self.offers_tools else None

    @property
    def reasoning_parser(self) -> str | None:
        """Find the parser for the thoughts that it writes; None if there are none, or none is known."""
        before_answer = self.template.rpartition(PROMPT)[2] if PROMPT in self.template else ""
        always = () if any(switch in self.template for switch in SWITCHES) else (FORMS.always,)
        return self._first(FORMS.thoughts, self.template) or self._first((*FORMS.before_answer, *always), before_answer)

    def _first(self, forms: Iterable[Form], text: str) -> str | None:
        for form in forms:
            of_family = not form.families or self.model_type.startswith(form.families)
            has_tokens = self.tokenizer is None or all(f'"{token}"' in self.tokenizer for token in form.tokens)
            if of_family and has_tokens and all(mark in text for mark in form.marks):
                return form.parser
        return None


def chat_model(directory: Path) -> ChatModel:
    """Read the model in a directory. What can't be read counts as empty: vLLM says then what is wrong."""
    model_type, template = str(config_in(directory).get("model_type", "")), chat_template(directory)
    tokenizer = "\n".join(text_of(directory / name) for name in TOKENIZERS) if template else ""
    return ChatModel(model_type, template, tokenizer)


def parser_arguments(settings: AskedServing, directory: Path) -> list[str]:
    """List the arguments with which vLLM parses what the model in *directory* writes, as far as the extra arguments say
    nothing of it."""
    tool_parser, reasoning_parser = chosen_parsers(settings, chat_model(directory))
    arguments = [PARSES_CALLS, TOOL_PARSER, tool_parser] if tool_parser else []
    return arguments + ([REASONING_PARSER, reasoning_parser] if reasoning_parser else [])


def chosen_parsers(settings: AskedServing, model: ChatModel) -> tuple[str | None, str | None]:
    """Choose the parsers of tool calls and of thoughts, where *auto* is what the model is found to write."""
    tools = _chosen(settings, settings.tool_parser, model.tool_parser, (PARSES_CALLS, TOOL_PARSER))
    return tools, _chosen(settings, settings.reasoning_parser, model.reasoning_parser, (REASONING_PARSER,))


def _chosen(settings: AskedServing, asked: str, found: str | None, own: Iterable[str]) -> str | None:
    if asked == "none" or _extra(settings, *own):
        return None
    return asked if asked != "auto" else None if _extra(settings, OWN_TEMPLATE) else found


def _extra(settings: AskedServing, *names: str) -> bool:
    """Whether one of the arguments is among the extra ones."""
    return any(extra.partition("=")[0].replace("_", "-") in names for extra in settings.extra_arguments)


def parses_calls(settings: AskedServing, directory: Path) -> bool:
    """Whether vLLM accepts ``tool_choice: auto`` for the model in *directory*."""
    return _extra(settings, PARSES_CALLS) or bool(chosen_parsers(settings, chat_model(directory))[0])


def why_calls_stay(settings: AskedServing, model: ChatModel) -> str:
    """Say why the calls of tools stay in the text of answers though nobody chose that; empty if they do not."""
    unknown = settings.tool_parser == "auto" and model.offers_tools and model.tool_parser is None
    return NOT_PARSED if unknown and not _extra(settings, PARSES_CALLS, OWN_TEMPLATE) else ""


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Check that the installed vLLM, which takes seconds to import, has the parsers; UnknownName if it does not."""
    if not tool_parser and not reasoning_parser:
        return
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    for setting, name, manager in (
        ("serving.tool_parser", tool_parser, ToolParserManager),
        ("serving.reasoning_parser", reasoning_parser, ReasoningParserManager),
    ):
        if name and name not in (known := manager.list_registered()):
            raise UnknownName(setting, name, ["auto", "none", *known])
