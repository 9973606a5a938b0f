"""Small random models of every family, as a publisher would write them, of sizes that vLLM and the quantizers take."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from scoring.capacity.families import FAMILIES
from stages.parts.vllm.parsers import FORMS, Form
from tests.scoring.small_models import GIVEN, SEEN_WITH, fields
from tests.stages.optimize.tiny import make_tokenizer

KINDS: Final = {SEEN_WITH[name] if name.endswith("_text") else name: name for name in FAMILIES} | {
    "mistral3": "mistral"
}
"""The family of the language model, by the ``model_type`` of config.json."""
LAYERS: Final = 2
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
    "laurel_rank": 16,
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 1024,
    "sliding_window": 128,
    "attention_chunk_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "interleave_moe_layer_step": 1,
    "q_lora_rank": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "block_multiple_of": 128,
    "block_auto_adjust_ff_dim": False,
}
OWN: Final[dict[str, dict[str, Any]]] = {
    **{family: {"num_key_value_heads": 4} for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    "gemma3n_text": {"activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"num_experts": None, "top_k_experts": None},
    "gpt_oss": {"vocab_size": 201088},  # vLLM writes its chats with the published tokens
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"moe_topk": [2, 2]},
    "llama4_text": {"num_experts_per_tok": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]},
    "phi3": {"rope_scaling": None},
    "phimoe": {"rope_scaling": None},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Fields of single families, instead of those that fit deeper models."""
PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "lfm2": {"block_dim": 256, "block_ffn_dim_multiplier": 1.0, "conv_dim": 256, "conv_dim_out": 256},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
"""What config.json has where models are published, which vLLM reads and Transformers no longer writes."""
WITH_VIDEOS: Final = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
TOWER: Final = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
QWEN_TOWER: Final = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 256}
NEWER_TOWER: Final = QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
PARTS: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 7,
        "eoi_token_index": 8,
    },
    "gemma4": {
        "vision_config": TOWER
        | {
            "model_type": "gemma4_vision",
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "default_output_length": 70,
        },
        "image_token_id": 5,
        "audio_token_id": 6,
        **{f"{mark}_token_id": number for mark, number in (("boi", 7), ("boa", 7), ("eoi", 8), ("eoa", 8))},
        "video_token_id": 6,
    },
    "llama4": {
        "vision_config": TOWER
        | {
            "image_size": 56,
            "patch_size": 14,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "image_token_index": 9,  # <|patch|>
    },
    "mistral3": {
        "vision_config": TOWER | {"model_type": "pixtral", "image_size": 56, "patch_size": 14, "head_dim": 64},
        "image_token_index": 5,
    },
    "qwen2_vl": WITH_VIDEOS | {"vision_config": {"depth": 1, "embed_dim": 64, "num_heads": 1, "hidden_size": 256}},
    "qwen2_5_vl": WITH_VIDEOS | {"vision_config": QWEN_TOWER | {"fullatt_block_indexes": [0]}},
    "qwen3_vl": WITH_VIDEOS | {"vision_config": NEWER_TOWER},
    "qwen3_vl_moe": WITH_VIDEOS | {"vision_config": NEWER_TOWER},
    "qwen3_5": WITH_VIDEOS | {"vision_config": NEWER_TOWER | {"deepstack_visual_indexes": []}},
    "qwen3_5_moe": WITH_VIDEOS | {"vision_config": NEWER_TOWER | {"deepstack_visual_indexes": []}},
}
"""The parts with which a model sees, and its tokens for pictures; see TOKENS."""
TOOL_PARSERS: Final = {
    **dict.fromkeys(("mistral", "ministral3", "mistral3"), "mistral"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_next", "smollm3"), "hermes"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3_coder"),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), "glm45"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "lfm2"),
    **{name: name for name in ("apertus", "gemma4", "granite", "jamba", "minimax_m2", "olmo3", "seed_oss")},
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "openai",
    "granitemoehybrid": "granite4",
    "hunyuan_v1_moe": "hunyuan_a13b",
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
}
"""The parser for the form in which the published models of a family write calls of tools."""
TOKENS: Final = {5: "<|image_pad|>", 6: "<|video_pad|>", 7: "<|vision_start|>", 8: "<|vision_end|>"}
CHAT: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}PICTURE{% endif %}{% endfor %}{% endif %}{% endfor %}{% if tools %}TOOLS{% endif %}"
)
PICTURES: Final = {
    "gemma3": "<|vision_start|>",
    "gemma4": "<|image_pad|>",
    "llama4": "<|image|>",
    "mistral3": "<|image_pad|>",
}
"""What a chat template writes for a picture; otherwise Qwen's three tokens."""
LOOKED_UP: Final = {
    "gemma3": ["\n" * count for count in (1, 2, 3, 4)],
    "llama4": ["<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"]
    + [f"<|tile_{axis}_separator|>" for axis in "xy"],
}
"""Further tokens that the family's processor looks up. They come after those of TOKENS."""
NOT_SEEING: Final = {"gemma3n": "its images need timm"}
"""Families of models that see of which only the language model is made here."""


def configuration(kind: str) -> Any:
    from transformers import AutoConfig

    family = KINDS[kind]
    given = {name: value for name, value in GIVEN.get(family, {}).items() if not isinstance(value, list)}
    given |= SIZES | OWN.get(family, {})
    text = {name: value for name, value in given.items() if name in fields(family)}
    if "num_hidden_layers" in text and family == "nemotron_h":
        text["num_hidden_layers"] = len(text["layers_block_type"])
    if kind not in PARTS:
        return AutoConfig.for_model(family, **text)
    return AutoConfig.for_model(kind, text_config={"model_type": family} | text, **PARTS[kind])


def publish(kind: str, directory: Path) -> int:
    """Write the model, and return the number of its parameters."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = configuration(kind)
    make = AutoModelForImageTextToText if kind in PARTS else AutoModelForCausalLM
    model = make.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if not parameter.isfinite().all():  # what Transformers leaves uninitialized
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(directory)
    if fields_of := PUBLISHED.get(kind):
        path = directory / "config.json"
        content = json.loads(path.read_text())
        content.get("text_config", content).update(fields_of)
        path.write_text(json.dumps(content, indent=1))
    if kind in PUBLISHED_TENSORS:
        path = directory / "model.safetensors"
        published = [PUBLISHED_TENSORS[kind](*each) for each in load_file(path).items()]
        save_file(dict(published), path, metadata={"format": "pt"})
    write_tokenizer(kind, directory)
    tensors = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    return sum(each.numel() for each in tensors.values())


def siglip_name(name: str, tensor: Any) -> tuple[str, Any]:
    tower = "vision_tower."
    return name.replace(tower, f"{tower}vision_model.", 1), tensor


def transposed_experts(name: str, tensor: Any) -> tuple[str, Any]:
    return name, tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


PUBLISHED_TENSORS: Final[dict[str, Callable[[str, Any], tuple[str, Any]]]] = {
    "gemma3": siglip_name,
    "qwen3_vl_moe": transposed_experts,
}
"""How tensors are named and stored where models are published, which Transformers reads and no longer writes."""


def write_tokenizer(kind: str, directory: Path) -> None:
    tokenizer, form = make_tokenizer(), form_of(kind)
    picture = PICTURES.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")
    tools = "{% raw %}" + " ".join(form.marks) + "{% endraw %}" if form else ""
    tokenizer.chat_template = CHAT.replace("PICTURE", picture).replace("TOOLS", tools)
    tokenizer.save_pretrained(directory)
    # The tokens take the places of characters that no text here needs.
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    tokens = [*(TOKENS.values() if kind in PARTS else ()), *LOOKED_UP.get(kind, ()), *(form.tokens if form else ())]
    for number, token in enumerate(tokens, min(TOKENS)):
        former = next(name for name, place in vocabulary.items() if place == number)
        vocabulary[token] = vocabulary.pop(former)
        content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": token})
    path.write_text(json.dumps(content, ensure_ascii=False))
    if kind in PARTS:
        with contextlib.suppress(ImportError):  # without torchvision
            write_processor(kind, directory)


def form_of(kind: str) -> Form | None:
    return next((form for form in FORMS.calls if form.parser == TOOL_PARSERS.get(kind)), None)


def write_processor(kind: str, directory: Path) -> None:
    from transformers import AutoTokenizer

    named = {"image_token": TOKENS[5], "boi_token": TOKENS[7], "eoi_token": TOKENS[8]}
    if kind == "gemma4":
        named |= {"audio_token": TOKENS[6], "boa_token": TOKENS[7], "eoa_token": TOKENS[8]}
    tokenizer = AutoTokenizer.from_pretrained(directory, extra_special_tokens=named)
    if kind == "gemma3":
        from transformers.models.gemma3 import Gemma3ImageProcessor, Gemma3Processor

        images = Gemma3ImageProcessor(size={"height": 56, "width": 56}, image_seq_length=4)
        Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4).save_pretrained(directory)
    elif kind == "gemma4":
        from transformers.models import gemma4

        pictures, frames = gemma4.Gemma4ImageProcessor(max_soft_tokens=70), gemma4.Gemma4VideoProcessor()
        heard, template = gemma4.Gemma4AudioFeatureExtractor(), tokenizer.chat_template
        gemma4.Gemma4Processor(heard, pictures, tokenizer, frames, template, image_seq_length=70).save_pretrained(
            directory
        )
    elif kind == "llama4":
        from transformers.models.llama4 import Llama4ImageProcessor, Llama4Processor

        images = Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=1)
        Llama4Processor(images, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(directory)
    elif kind == "mistral3":
        from transformers.models.pixtral import PixtralImageProcessor, PixtralProcessor

        images = PixtralImageProcessor(patch_size=14, size={"longest_edge": 56})
        processor = PixtralProcessor(
            images,
            tokenizer,
            patch_size=14,
            spatial_merge_size=2,
            chat_template=tokenizer.chat_template,
            image_token=TOKENS[5],
            image_break_token=TOKENS[7],
            image_end_token=TOKENS[8],
        )
        processor.save_pretrained(directory)
    elif kind.startswith("qwen"):
        from transformers.models import qwen2_5_vl, qwen2_vl, qwen3_vl

        classes = {
            "qwen2_vl": (qwen2_vl.Qwen2VLProcessor, qwen2_vl.Qwen2VLVideoProcessor, 14),
            "qwen2_5_vl": (qwen2_5_vl.Qwen2_5_VLProcessor, qwen2_vl.Qwen2VLVideoProcessor, 14),
        }
        make, videos, patch = classes.get(kind, (qwen3_vl.Qwen3VLProcessor, qwen3_vl.Qwen3VLVideoProcessor, 16))
        images = qwen2_vl.Qwen2VLImageProcessor(patch_size=patch, min_pixels=64 * 64, max_pixels=128 * 128)
        make(images, tokenizer, videos(patch_size=patch), tokenizer.chat_template).save_pretrained(directory)
