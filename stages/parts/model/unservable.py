"""The kinds of models that slipway can't serve: how each is recognized, what it is, and what one could use instead.

The names of a repository's files and its config.json suffice, so a model is refused before anything else is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from stages.parts.base.errors import UnusableModel

Config = Mapping[str, Any]

NO_PICKLES: Final = "a pickle can run any code when it is loaded: name a model, or a --revision, with safetensors"
SAME_MODEL: Final = "name the same model in the Transformers layout"
DIFFUSERS: Final = "Diffusers or vLLM-Omni make images and videos with it"
POOLING: Final = "vLLM serves many of them by itself: vllm serve MODEL --runner pooling"


@dataclass(frozen=True)
class ModelKind:
    """Models of one kind. One is recognized by any of its files, its class or its configuration."""

    what: str
    """Follows *the model is* or, in ``LAYOUTS``, *the repository holds*."""
    instead: str
    files: tuple[str, ...] = ()
    """Patterns of paths."""
    architectures: str = ""
    """A regular expression for the whole name of the class in config.json."""
    field: str = ""
    """A field of config.json."""
    holds: Callable[[Any], bool] = bool
    """What the value of *field* is if the model is of this kind."""

    def sign(self, paths: Collection[str], config: Config) -> str | None:
        """Name what shows that the model is of this kind, or return None if nothing does."""
        for path in sorted(paths):
            if any(fnmatchcase(path, pattern) for pattern in self.files):
                return path
        named = config.get("architectures")
        for architecture in named if isinstance(named, list) and self.architectures else ():
            if re.fullmatch(self.architectures, str(architecture)):
                return str(architecture)
        if self.field in config and self.holds(config[self.field]):
            return f"{self.field!r} in config.json"
        return None


LAYOUTS: Final = (
    ModelKind("a diffusion model in Diffusers' layout", DIFFUSERS, ("model_index.json",)),
    ModelKind(
        "an adapter (LoRA), not a model",
        "name its base model, and the adapter in serving.adapters; or merge it into its base model",
        ("adapter_config.json",),
    ),
    ModelKind(
        "only GGUF, for llama.cpp",
        "name the model from which it was made (base_model on its card), or serve the file with llama.cpp",
        ("*.gguf", "ggml-*.bin", "*.llamafile"),
    ),
    ModelKind(
        "only weights for MLC, OpenVINO or TensorRT",
        SAME_MODEL,
        ("*mlc-chat-config.json", "*openvino*.xml", "*.engine"),
    ),
    ModelKind("only pickles", NO_PICKLES, ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")),
    ModelKind("only ONNX", SAME_MODEL, ("*.onnx",)),
    ModelKind(
        "only LiteRT, ExecuTorch or Core ML", SAME_MODEL, ("*.tflite", "*.task", "*.litertlm", "*.pte", "*.ml[mp]*")
    ),
    ModelKind("only weights of TensorFlow, Flax or NeMo", SAME_MODEL, ("*.h5", "*.msgpack", "*.nemo")),
    ModelKind("only safetensors in another layout", SAME_MODEL, ("*.safetensors",)),
)
"""Repositories without weights in the Transformers layout. The first that is recognized counts."""

KINDS: Final = (
    ModelKind(
        "a draft for speculative decoding, which continues what another model writes",
        "name that model; vLLM takes the draft in --speculative-config",
        architectures=r"P?[Ee]agle3?[A-Z]\w*|\w*(Eagle3|DraftModel|DSparkModel|MTP|MTPModel|AssistantModel)"
        r"|DFlash\w+|MedusaModel",
    ),
    ModelKind(
        "a reranker, a reward model or another classifier",
        POOLING,
        architectures=r"\w+For(\w*Classification|Ranking|\w*RewardModel|JointSchema|QuestionAnswering|MultipleChoice)",
    ),
    ModelKind(
        "an embedding model",
        POOLING,
        ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"),
        r"\w+For(MaskedLM|PreTraining|Retrieval)|(Ops)?Col[A-Z]\w+|HF_ColBERT|\w*Bidirectional\w*",
    ),
    ModelKind(
        "a recognizer of speech",
        "vLLM serves Whisper and others by itself: vllm serve MODEL",
        architectures=r"Whisper\w+|\w+For(CTC|SpeechSeq2Seq|RNNT|TDT)",
    ),
    ModelKind(
        "an encoder-decoder, such as T5 and BART",
        "name a decoder-only model, or serve it with Transformers",
        architectures=r"(U?M?T5|Switch\w+|Long[Tt]5|M?Bart|Pegasus\w*|Marian\w*|M2M100)(ForConditionalGeneration|MTModel)",
        field="is_encoder_decoder",
        holds=lambda value: value is True,
    ),
    ModelKind(
        "made for images, sound or series of numbers",
        "serve it with Transformers",
        architectures=r"\w+For\w*(Detection|Segmentation|Estimation|Modeling|Matching|XVector|TextToSpeech"
        r"|TextToWaveform|SuperResolution|(?<!Action)Prediction)",
    ),
    ModelKind("a part of a diffusion model", DIFFUSERS, field="_class_name"),
    ModelKind(
        "quantized for MLX",
        "name the model from which it was made (base_model on its card)",
        field="quantization",
        holds=lambda value: isinstance(value, dict) and {"bits", "group_size"} <= value.keys(),
    ),
    ModelKind(
        "without a head that writes text, as embedding models are",
        POOLING,
        # These have one under this name.
        architectures=r"(?!\w*(Chat|ChatGLM|LMHead|DashengLM|Omni|MossAudio|Ultravox)Model$)\w+Model|\w+Encoder",
    ),
)
"""Models with weights in the Transformers layout."""


def unknown_layout(paths: Collection[str], expected: str) -> UnusableModel:
    """Make the error for a repository that lacks the files *expected* of every model."""
    for kind in LAYOUTS:
        if sign := kind.sign(paths, {}):
            return UnusableModel(f"the repository holds {kind.what} ({sign}), and no {expected}", hint=kind.instead)
    return UnusableModel(f"the repository has no weights: no {expected}", hint=SAME_MODEL)


def refuse_kind(config: Config, paths: Collection[str]) -> None:
    """Refuse, with UnusableModel, a model of a kind that can't be served; the message names the kind."""
    for kind in KINDS:
        if sign := kind.sign(paths, config):
            raise UnusableModel(f"the model is {kind.what} ({sign}), which slipway can't serve", hint=kind.instead)
