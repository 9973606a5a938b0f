"""The demo's model with chat templates that offer tools, as families of models write them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.demo import DEMO

CHAT: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QWEN: Final = (
    "{{ bos_token }}{% if tools %}<|user|>{{ tools | tojson }} Write a call as <tool_call>"
    '{"name": <function-name>, "arguments": <args-json-object>}</tool_call>{{ eos_token }}{% endif %}'
) + CHAT
LLAMA: Final = (
    "{{ bos_token }}{% if tools %}<|user|>{{ tools | tojson }} Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{{ eos_token }}{% endif %}'
) + CHAT


def qwen_like(folder: Path) -> Path:
    return _with_template(folder, QWEN)


def llama_like(folder: Path) -> Path:
    """Its tokenizer has the token that vLLM's parser wants, in the place of one that no template uses."""
    _with_template(folder, LLAMA)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|system|>", "<|python_tag|>"))
    return folder


def _with_template(folder: Path, template: str) -> Path:
    shutil.copytree(DEMO / "model", folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
