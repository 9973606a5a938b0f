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


@dataclass(frozen=True)
class Form:
    """A form of calls or thoughts."""

    parser: str
    """vLLM's name of what reads it."""
    marks: tuple[str, ...]
    """A template that has all of them uses the form."""
    families: tuple[str, ...] = ()
    """How the ``model_type`` of the models begins that write it; any, if empty."""
    tokens: tuple[str, ...] = ()
    """Tokens without which vLLM's parser refuses the tokenizer, and the server does not start."""


DEEPSEEK_CALLS: Final = tuple(f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end"))
PYTHON_TAG: Final = "<|python_tag|>"
JSON_OF_LLAMA: Final = "dictionary of argument name and its value"
LIST_OF_PYTHON: Final = "[func_name1(params_name1="
THINK: Final = ("<think>", "</think>")
CALLS: Final = (
    Form("openai", ("<|channel|>",), ("gpt_oss",)),
    Form("seed_oss", ("<seed:tool_call>",)),
    Form("minimax_m2", ("<minimax:tool_call>",), ("minimax_m2",)),
    Form("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Form("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), tokens=DEEPSEEK_CALLS),
    Form("deepseek_v31", ("<｜tool▁calls▁begin｜>",), tokens=DEEPSEEK_CALLS),
    Form("mistral", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    Form("gemma4", ("<|tool_call>",)),
    Form("functiongemma", ("<start_function_call>",)),
    Form("lfm2", ("tools",), ("lfm2",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    Form("olmo3", ("<function_calls>",), ("olmo",)),
    Form("apertus", ("<|tools_prefix|>",), ("apertus",)),
    Form("cohere_command3", ("<|START_ACTION|>",), ("cohere",)),
    Form("hunyuan_a13b", ("<tool_calls>",), ("hunyuan",)),
    Form("jamba", ("<tool_calls>",), ("jamba",), ("<tool_calls>", "</tool_calls>")),
    Form("longcat", ("<longcat_tool_call>",)),
    Form("granite", ("<|tool_call|>",), ("granite",)),
    Form("granite4", ("<tool_call>",), ("granitemoehybrid",)),
    Form("ernie45", ("<tool_call>",), ("ernie4_5",)),
    Form("glm45", ("<tool_call>", "<arg_key>")),
    Form("qwen3_coder", ("<tool_call>", "<function=")),
    Form("hermes", ("<tool_call>", "arguments")),
    Form("phi4_mini_json", ("functools[",)),
    Form("llama4_pythonic", (LIST_OF_PYTHON,), ("llama4",)),
    Form("pythonic", (LIST_OF_PYTHON,)),
    Form("llama4_json", (JSON_OF_LLAMA,), ("llama4",), (PYTHON_TAG,)),
    Form("llama3_json", (JSON_OF_LLAMA,), ("llama", "mllama"), (PYTHON_TAG,)),
    Form("llama3_json", (PYTHON_TAG,), ("llama", "mllama"), (PYTHON_TAG,)),
)
"""The forms of calls, of which the first holds that a template has."""
THOUGHTS: Final = (
    Form("openai_gptoss", ("<|channel|>",), ("gpt_oss",)),
    Form("gemma4", ("<|channel>",), ("gemma4",)),
)
"""The forms of thoughts that are anywhere in a template."""
BEFORE_ANSWER: Final = (
    Form("seed_oss", ("<seed:think>",)),
    Form("qwen3", ("<think>",), ("qwen3",), THINK),
    Form("glm45", ("<think>",), ("glm4_moe",), THINK),
    Form("nemotron_v3", ("<think>", "<|im_start|>"), ("nemotron_h",), THINK),
    Form("deepseek_v3", ("<think>", "thinking"), ("deepseek_v3",), THINK),
)
"""The forms of thoughts that a template begins, or for no thoughts ends, right before an answer."""
ALWAYS: Final = Form("deepseek_r1", ("<think>",), tokens=THINK)
"""The form of a model that always thinks first. What it writes without an end of thoughts is all thoughts."""
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
        return self._first(CALLS, self.template) if self.offers_tools else None

    @property
    def reasoning_parser(self) -> str | None:
        """Find the parser for the thoughts that it writes; None if there are none, or none is known."""
        before_answer = self.template.rpartition(PROMPT)[2] if PROMPT in self.template else ""
        always = () if any(switch in self.template for switch in SWITCHES) else (ALWAYS,)
        return self._first(THOUGHTS, self.template) or self._first((*BEFORE_ANSWER, *always), before_answer)

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
