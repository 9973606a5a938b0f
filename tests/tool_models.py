"""The demo's model with chat templates that offer tools, as families of models write them."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
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


CALL: Final = '{"name": "get_time", "parameters": {"city": "Oslo"}}'
END: Final = 2
"""The token at the end of an answer."""


def qwen_like(folder: Path) -> Path:
    return _with_template(folder, QWEN)


def llama_like(folder: Path) -> Path:
    """Its tokenizer has the token that vLLM's parser wants, in the place of one that no template uses."""
    _with_template(folder, LLAMA)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|system|>", "<|python_tag|>"))
    return folder


def calling(folder: Path) -> Path:
    """A model that follows a beginning of an answer with a call, as llama writes it, and that with an end."""
    llama_like(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    *_, begins = tokenizer["added_tokens"]
    call = begins | {"id": 4096, "content": CALL, "special": False}
    path.write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], call]}))
    return _writing(folder, begins["id"], call["id"])


def answering(folder: Path, tokens: int) -> Path:
    """A model whose answers all have so many tokens, with the end."""
    _with_template(folder, LLAMA)
    *_, begins = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return _writing(folder, begins["id"], *range(200, 199 + tokens))


def _writing(folder: Path, *tokens: int) -> Path:
    """Replace the weights by those of a model that follows each of the *tokens* with the next, and the last with an
    end: what it writes depends on the last token alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for weights in folder.glob("model*"):
        weights.unlink()
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": END, "max_position_embeddings": 1024, "dtype": "bfloat16"}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4160, tie_word_embeddings=False, **shape, **ends))
    layer = model.model.layers[0]
    with torch.no_grad():
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj, model.model.embed_tokens, model.lm_head):
            added.weight.zero_()
        for place, (last, following) in enumerate(pairwise((*tokens, END))):
            model.model.embed_tokens.weight[last, place] = model.lm_head.weight[following, place] = 1
    model.save_pretrained(folder)
    return folder


def _with_template(folder: Path, template: str) -> Path:
    shutil.copytree(DEMO / "model", folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
