"""Which of vLLM's parsers a model gets, by what is characteristic of its family's chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.parts.base.errors import UnknownName
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.settings import parse
from stages.parts.base.store import ModelStore
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import METRICS
from stages.parts.vllm import parsers
from stages.parts.vllm.arguments import engine_arguments
from stages.parts.vllm.parsers import FORMS, ChatModel, chat_model, check_parsers, parser_arguments, parses_calls
from tests.extras import need
from tests.samples import engine
from tests.serving import DEMO
from tests.tool_models import llama_like, qwen_like

RELEASE = "0001-fp16-0123456789ab"
QWEN = '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
XML = "{% if tools %}<tool_call>\n<function=example_function_name>\n<parameter=value>{% endif %}"
SWITCHED = (
    "{% if add_generation_prompt %}<|im_start|>assistant{% if not enable_thinking %}<think>\n\n</think>{% endif %}"
)
ALWAYS = "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
JSON = 'tools: {"name": function name, "parameters": dictionary of argument name and its value}'
PYTHONIC = "tools: [func_name1(params_name1=params_value1, params_name2=params_value2...)]"
DEEPSEEK = "tools <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
HERMES = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("llama", "{% for message in messages %}{{ message['content'] }}{% endfor %}", None, None),
        ("qwen2", QWEN, "hermes", None),
        ("qwen3", QWEN + SWITCHED, "hermes", "qwen3"),
        ("qwen3_moe", QWEN + "{% if '</think>' in content %}{% endif %}{% if add_generation_prompt %}", "hermes", None),
        ("qwen3_moe", XML, "qwen3_coder", None),
        ("qwen3_5", XML + SWITCHED, "qwen3_coder", "qwen3"),
        ("qwen2", ALWAYS, None, "deepseek_r1"),
        ("smollm3", QWEN + SWITCHED, "hermes", None),
        ("llama", JSON, "llama3_json", None),
        ("llama", "tools, builtin_tools: <|python_tag|>brave_search.call(", "llama3_json", None),
        ("mllama", JSON, "llama3_json", None),
        ("llama4", JSON, "llama4_json", None),
        ("llama4", PYTHONIC, "llama4_pythonic", None),
        ("gemma3", PYTHONIC, "pythonic", None),
        ("mistral3", "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral", None),
        ("deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>\n```json\n{ALWAYS}", "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", DEEPSEEK + "{% if add_generation_prompt and thinking %}<think>", "deepseek_v31", "deepseek_v3"),
        ("glm4_moe", "tools <tool_call>{name}\n<arg_key>{k}</arg_key>" + SWITCHED, "glm45", "glm45"),
        ("gpt_oss", "tools <|channel|>commentary to=functions", "openai", "openai_gptoss"),
        ("seed_oss", "tools <seed:tool_call>{% if add_generation_prompt %}<seed:think>", "seed_oss", "seed_oss"),
        ("lfm2", "<|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2", None),
        ("phi3", "<|tool|>{{ tools }}<|/tool|>", None, None),
        ("granitemoehybrid", "tools <tool_call>{arguments}", "granite4", None),
    ],
)
def test_the_template_and_the_family_decide_the_parsers(
    model_type: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    found = ChatModel(model_type, template)
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)


def test_a_parser_that_would_refuse_the_tokenizer_is_not_chosen() -> None:
    assert ChatModel("llama", JSON, tokenizer='{"content": "<|python_tag|>"}').tool_parser == "llama3_json"
    assert ChatModel("llama", JSON, tokenizer="{}").tool_parser is None
    assert ChatModel("qwen2", ALWAYS, tokenizer='"<think>"').reasoning_parser is None


def test_the_installed_vllm_has_every_parser_and_refuses_a_tokenizer_without_its_tokens() -> None:
    need("vllm")
    from transformers import AutoTokenizer
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")  # it has none of the tokens
    forms = [(ToolParserManager.get_tool_parser, form) for form in FORMS.calls]
    thoughts = (*FORMS.thoughts, *FORMS.before_answer, FORMS.always)
    forms += [(ReasoningParserManager.get_reasoning_parser, form) for form in thoughts]
    for find, form in forms:
        try:
            find(form.parser)(tokenizer)
        except RuntimeError:
            assert form.tokens, form
    with pytest.raises(UnknownName, match=r"unknown serving\.tool_parser 'hermess'"):
        check_parsers("hermess", None)
    with pytest.raises(UnknownName, match=r"unknown serving\.reasoning_parser 'qwen33'"):
        check_parsers("hermes", "qwen33")
    check_parsers("hermes", "qwen3")


def test_a_server_gets_the_parsers_of_its_model_unless_settings_say_otherwise(tmp_path: Path) -> None:
    qwen, llama = qwen_like(tmp_path / "qwen"), llama_like(tmp_path / "llama")
    assert parser_arguments(Serving(), DEMO / "model") == parser_arguments(Serving(), tmp_path / "none") == []
    assert parser_arguments(Serving(), llama)[1:] == ["--tool-call-parser", "llama3_json"]
    assert tuple(engine_arguments(Serving(), qwen)[-3:]) == HERMES
    assert parser_arguments(Serving(tool_parser="none"), qwen) == []
    assert parser_arguments(Serving(tool_parser="xlam"), qwen)[2] == "xlam"
    assert parser_arguments(Serving(reasoning_parser="qwen3"), qwen)[3:] == ["--reasoning-parser", "qwen3"]
    for own in (HERMES[:2], ("--tool_call_parser=xlam",), ("--chat-template", "own.jinja")):
        assert parser_arguments(Serving(extra_arguments=own), qwen) == []
    assert parses_calls(Serving(extra_arguments=HERMES), DEMO / "model")


def test_it_is_said_if_a_template_offers_tools_in_a_form_that_is_not_known(tmp_path: Path) -> None:
    unknown = ChatModel("phi3", "<|tool|>{{ tools }}")
    assert "no parser is known" in parsers.why_calls_stay(Serving(), unknown)
    assert parsers.why_calls_stay(Serving(tool_parser="none"), unknown) == ""
    assert parsers.why_calls_stay(Serving(extra_arguments=HERMES), unknown) == ""
    assert parsers.why_calls_stay(Serving(), chat_model(DEMO / "model")) == ""
    assert parsers.why_calls_stay(Serving(), chat_model(qwen_like(tmp_path / "qwen"))) == ""


def test_a_release_is_served_with_the_parser_that_it_was_measured_with(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "org/name")
    folder = qwen_like(store.releases / RELEASE)
    assert pinned(store, AskedServing(), RELEASE).tool_parser == "hermes"
    run = engine(None).model_dump(mode="json") | {"arguments": ["--tool-call-parser", "xlam"]}
    (folder / METRICS).write_text(json.dumps({"engine": run}))
    served = pinned(store, AskedServing(), RELEASE)
    assert (served.tool_parser, served.reasoning_parser) == ("xlam", "none")
    assert pinned(store, AskedServing(tool_parser="none"), RELEASE).tool_parser == "none"


def test_a_parser_s_name_can_be_no_argument() -> None:
    assert parse(AskedServing, {"tool_parser": "granite-20b-fc"}, "here").tool_parser == "granite-20b-fc"
    with pytest.raises(Exception, match="tool_parser"):
        parse(AskedServing, {"tool_parser": "--api-key"}, "here")
