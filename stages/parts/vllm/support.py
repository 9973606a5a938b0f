"""Whether the installed vLLM serves a model here: whether it has a class for its architecture, takes LoRA adapters and
recipes with it, and has a kernel for a variant's weights on this machine's processor or GPU."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from scoring.capacity.architecture import NotSizeable
from scoring.capacity.families import FAMILIES, read_architecture
from scoring.capacity.reader import EXPERTS, EXPERTS_PER_TOKEN
from scoring.names import REFERENCE
from stages.parts.base.errors import NotInstalled, UnusableModel
from stages.parts.base.files import digest_of
from stages.parts.base.formats import why_failed
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.environment import engine_of, installed
from stages.parts.machine.hardware import cpu_dtype, hardware, processor
from stages.parts.model.adapter import Adapter, max_lora_rank
from stages.parts.model.checkpoint import config_in, sees
from stages.parts.model.description import Description
from stages.parts.model.published import format_of, quantization_of
from stages.parts.vllm.arguments import asked_once, engine_arguments, installed_version, serves_on_gpu

OWN_ACTIVATIONS: Final = {"gpt_oss": "swigluoai"}
"""What vLLM computes between the matrices of experts, where config.json says something else."""
LAYERS: Final = {"attention": "model.layers.1.self_attn.o_proj", "mlp": "model.layers.1.mlp.down_proj"}
"""The name of a layer of each kind, which may be among those that a checkpoint keeps in 16 bits."""

VLLM_KERNELS: Final = "vllm.model_executor.kernels.linear."


class Experts(NamedTuple):
    """What vLLM's choice of a kernel for experts depends on."""

    total: int
    active: int
    """Experts that one token passes."""
    hidden: int
    width: int
    activation: str


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """Read the experts of a model from its config.json; None if it has none, or does not say how wide they are."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    sizes = ((*EXPERTS_PER_TOKEN, "moe_top_k"), ("hidden_size",), ("moe_intermediate_size", "intermediate_size"))
    total, active, hidden, width = (_first_count(config, names) for names in (EXPERTS, *sizes))
    if total < 2 or not (hidden and width) or config.get("enable_moe_block") is False:
        return None
    named = (config.get(field) for field in ("hidden_act", "hidden_activation", "mlp_hidden_act"))
    family = str(config.get("model_type"))
    activation = OWN_ACTIVATIONS.get(family) or str(next(filter(None, named), "silu"))
    gated = family not in FAMILIES or FAMILIES[family].gated
    return Experts(total, active or 1, hidden, width, activation if gated else f"{activation}_no_mul")


def missing_kernel(
    config: Mapping[str, Any], dtype: str = "auto", *, lora: bool, allow_fallback: bool, published: bool = False
) -> str:
    """Let vLLM build the layers that config.json describes, without memory for the weights, and say why it can't; empty
    if it can. Its answer is kept for this version, hardware and layers.

    Args:
        dtype: the type in which vLLM computes.
        lora: whether adapters are served with it.
        allow_fallback: whether an emulation, and for layers PyTorch's operators on a processor, count as a kernel.
        published: whether the model was published so: any kernel for its layers counts.
    """
    form = format_of(config)
    if not serves_on_gpu() and (why := form.missing_on_cpu(config, processor(), lora=lora)):
        return why
    layers, experts = sorted(_linear_layers(config)), experts_of(config)
    if not form.method and not experts:
        return ""
    settings = (dtype, allow_fallback or published, allow_fallback, lora)
    asked = [digest_of(hardware()), quantization_of(config), config.get("model_type"), layers, experts, *settings]
    name = f"kernels-{digest_of(asked)}"
    return asked_once(name, lambda: {"missing": _unbuildable(config, layers, experts, *settings)})["missing"]


def _unbuildable(
    config: Mapping[str, Any],
    layers: Iterable[tuple[str, tuple[int, int]]],
    experts: Experts | None,
    dtype: str,
    slow_layers: bool,
    slow_experts: bool,
    lora: bool,
) -> str:
    import torch
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    current_platform.import_kernels()
    name = "16-bit" if quantization_of(config) is None else format_of(config).name
    computed = getattr(torch, _automatic_dtype(config) if dtype == "auto" else dtype)
    settings = VllmConfig()
    settings.model_config = SimpleNamespace(dtype=computed, is_moe=False, quantization_config=None)
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(settings):
        if not distributed.model_parallel_is_initialized():
            distributed.init_distributed_environment(1, 0, f"file://{folder}/world", 0, "gloo")
            distributed.initialize_model_parallel()
    shape = "any shape"
    try:
        with set_current_vllm_config(settings), set_default_torch_dtype(computed), torch.device("meta"):
            if quantization := _quantization(config):
                if computed not in quantization.get_supported_act_dtypes():
                    return f"vLLM does not compute {name} in {computed}"
                if serves_on_gpu() and not current_platform.has_device_capability(quantization.get_min_capability()):
                    return f"vLLM needs compute capability {quantization.get_min_capability() / 10} for {name}"
                for layer, sizes in layers:
                    shape = " × ".join(map(str, sizes))
                    linear = ReplicatedLinear(*sizes, False, quant_config=quantization, prefix=layer, disable_tp=True)
                    if not slow_layers and (kernel := _fallback(linear)):
                        return _slow(name, kernel)
            if experts:
                adapted = " with adapters" if lora else ""
                shape = f"{experts.total} experts of {experts.hidden} × {experts.width}{adapted}"
                backend = _emulation(_chosen_for_experts(experts, quantization, computed, lora=lora))
                return _slow(f"{name} experts", backend) if backend and not slow_experts else ""
    except Exception as error:
        last = (str(error).strip().splitlines() or [repr(error)])[-1].partition(" Candidate backends were")[0].strip()
        if not isinstance(error, (ValueError, NotImplementedError)) or "meta tensor" in last:
            say(f"vLLM does not tell whether it has a {name} kernel for a layer of {shape}: {error!r}")
            return ""
        return f"vLLM has no {name} kernel here for a layer of {shape}: {last}"
    return ""


def _quantization(config: Mapping[str, Any]) -> Any:
    """Let vLLM read how a model is quantized; None if it is not."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    if (stated := quantization_of(config)) is None:
        return None
    stated, model = dict(stated), SimpleNamespace(model_type=config.get("model_type"))
    overrides = (
        get_quantization_config(method).override_quantization_method(stated, None, hf_config=model)
        for method in QUANTIZATION_METHODS
    )
    return get_quantization_config(next(filter(None, overrides), format_of(config).method)).from_config(stated)


def _automatic_dtype(config: Mapping[str, Any]) -> str:
    """Choose the type in which vLLM computes a model whose settings name none."""
    from vllm.platforms import current_platform

    if serves_on_gpu():
        return "bfloat16" if current_platform.has_device_capability(80) else "float16"
    return "bfloat16" if quantization_of(config) is not None else cpu_dtype(processor())


def _chosen_for_experts(experts: Experts, quantization: Any, dtype: Any, *, lora: bool) -> Iterable[object]:
    """Let vLLM make the method that computes experts of a checkpoint, and list what it chose for it."""
    import torch
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.platforms import current_platform

    activation = MoEActivation.SILU
    with contextlib.suppress(ValueError):  # a name that the model's own class translates
        activation = MoEActivation.from_str(experts.activation)
    module = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(module)
    module.moe_config = FusedMoEConfig(
        num_experts=experts.total,
        num_local_experts=experts.total,
        num_logical_experts=experts.total,
        experts_per_token=experts.active,
        hidden_dim=experts.hidden,
        intermediate_size=experts.width,
        activation=activation,
        device=current_platform.device_type,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
        is_lora_enabled=lora,
    )
    module.layer_name = "model.layers.1.mlp.experts"
    for part in ("gate", "up", "down"):
        setattr(module, f"ckpt_{part}_proj_name", f"{part}_proj")
    method: object = module._get_quant_method(module.layer_name, quantization, module.moe_config)
    return vars(method).values()


def _fallback(layer: Any) -> str:
    """Name the kernel that vLLM chose for a layer if it only stands in for a fast one: an emulation, or PyTorch's own
    operators on a processor. Empty otherwise."""
    chosen = vars(getattr(layer, "scheme", layer.quant_method)).values()  # compressed-tensors' layers have a scheme
    kernels = [type(part) for part in chosen if type(part).__module__.startswith(VLLM_KERNELS)]
    slow = ("emulation",) if serves_on_gpu() else ("emulation", "pytorch")
    return next((each.__name__ for each in kernels if each.__module__.endswith(slow)), "")


def _emulation(chosen: Iterable[object]) -> str:
    """Name the backend among what vLLM *chose* for experts if it emulates one; empty otherwise."""
    return next((str(each) for each in chosen if isinstance(each, Enum) and each.name == "EMULATION"), "")


def _slow(what: str, kernel: str) -> str:
    return f"vLLM computes {what} here with {kernel}, which is slow; optimize.allow_fallback=true measures it"


def _linear_layers(config: Mapping[str, Any]) -> set[tuple[str, tuple[int, int]]]:
    """Name the different linear layers, with their inputs and outputs: one of a usual size if the model can't be
    sized."""
    with contextlib.suppress(NotSizeable):
        model = read_architecture(config)
        matrices = [matrix for layer in model.counted for matrix in layer.matrices(model.hidden)]
        return {(LAYERS[each.kind], (each.inputs, each.outputs)) for each in matrices if each.kind in LAYERS}
    return {(LAYERS["mlp"], (4096, 4096))}


def _first_count(config: Mapping[str, Any], names: Iterable[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def refuse_unserved_family(described: Description, *, text_only: bool) -> None:
    """Refuse, with UnusableModel, a model for which neither vLLM nor Transformers has a class that vLLM can serve, or
    with which, or with a picture shown to it unless *text_only*, vLLM is known to fail on a processor."""
    names = [str(name) for name in described.config.get("architectures") or ()]
    if not set(names) & set(asked_once("classes", _classes_of_vllm)) and not any(map(_served_by_transformers, names)):
        raise UnusableModel(
            f"vLLM {installed_version('vllm')} has no class for {' or '.join(names)}, and Transformers none it takes",
            hint="a newer vLLM may have it: https://docs.vllm.ai/en/latest/models/supported_models.html",
        )
    if serves_on_gpu():
        return
    fails = why_failed(REFERENCE, described.config)
    if why := fails or ("" if text_only else why_failed("picture", described.config)):
        or_text = "" if fails else ", or serve its language part: --set serving.text_only=true"
        raise UnusableModel(f"vLLM does not serve it without a GPU: {why}", hint=f"run where there is a GPU{or_text}")


def refuse_without_torchvision(described: Description) -> None:
    """Refuse, with NotInstalled, a model that sees where torchvision is not installed: vLLM's classes for such models
    import it, even to serve only their language part. Our lock has none, because PyPI's is built for CUDA."""
    if not sees(described.config):
        return
    (release, _, build), found = installed_version("torch").partition("+"), installed("torchvision")
    if not found or (build == "cpu" and "+" not in found):
        fitting = f"0.{int(release.split('.')[1]) + 15}.*"  # https://github.com/pytorch/vision#installation
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        raise NotInstalled(
            f"vLLM serves models that see with torchvision, and {found or 'none'} is installed here"
            + (", which is for CUDA" if found else ""),
            hint=f"uv pip install --no-deps 'torchvision=={fitting}'{index}",
        )


def _classes_of_vllm() -> list[str]:
    from vllm.model_executor.models import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def _served_by_transformers(name: str) -> bool:
    """Whether vLLM would run Transformers' own class, by the rule of vLLM's registry."""
    import transformers

    model_class: Any = getattr(transformers, name, None)
    return bool(model_class) and (model_class.is_backend_compatible() or model_class._can_set_attn_implementation())


def refuse_unserved(adapters: Mapping[str, Adapter], architectures: list[str]) -> None:
    """Refuse, with UnusableModel, adapters that the installed vLLM can't serve with a model of these classes."""
    configs = {name: dict(adapter.config) for name, adapter in adapters.items()}
    key = digest_of([architectures, configs])
    for name, why in asked_once(f"lora-{key}", lambda: _unserved(configs, architectures)).items():
        hint = "take it out of serving.adapters, or merge it into the model"
        raise UnusableModel(f"vLLM can't serve the adapter {name} ({adapters[name].source}): {why}", hint=hint)


def _unserved(configs: Mapping[str, dict[str, Any]], architectures: list[str]) -> dict[str, str]:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.platforms import current_platform

    try:
        current_platform.get_punica_wrapper()
    except NotImplementedError:
        return dict.fromkeys(configs, f"its build for {current_platform.device_name} computes none")
    for name in set(architectures) & ModelRegistry.models.keys():
        if not supports_lora(ModelRegistry.models[name].load_model_cls()):
            return dict.fromkeys(configs, f"its class {name} takes none")
    reasons = {}
    for name, config in configs.items():
        try:
            PEFTHelper.from_dict(config).validate_legal(LoRAConfig(max_lora_rank=max_lora_rank(config)))
        except (TypeError, ValueError) as error:
            reasons[name] = " ".join(str(error).split())
    return reasons


def refused_recipes(serving: Serving, model: Path) -> dict[str, str]:
    """Ask vLLM, which makes its own configuration of the arguments, why it refuses recipes for the model whose
    config.json is in a directory. Its answer is kept for this version, hardware, config.json and arguments."""
    arguments = {}
    # What another version refuses is shown when it starts.
    recipes = {name: each for name, each in serving.recipes.items() if engine_of(each.engine_version or "").is_here}
    for name, recipe in {"": None, **recipes}.items():
        # This pod may have fewer GPUs than the one that measures.
        settings = serving.with_recipe(recipe).model_copy(update={"tensor_parallel_size": 1})
        arguments[name] = engine_arguments(settings, model)
    key = digest_of([digest_of(hardware()), config_in(model), arguments])

    def ask() -> dict[str, str]:
        return {name: why for name, words in arguments.items() if (why := _refusal(["--model", str(model), *words]))}

    refused = asked_once(f"recipes-{key}", ask) if recipes else {}
    return {} if "" in refused else refused  # the reason is none of a recipe


def _refusal(arguments: list[str]) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import get_attn_backend

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    try:
        settings = EngineArgs.from_cli_args(parser.parse_known_args(arguments)[0]).create_engine_config()
        served = settings.model_config
        with set_current_vllm_config(settings):
            if not served.is_attention_free:
                dtype = settings.cache_config.cache_dtype
                get_attn_backend(served.get_head_size(), served.dtype, dtype, use_mla=served.use_mla)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except (ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    except (Exception, SystemExit) as error:
        say(f"vLLM does not tell whether it takes {' '.join(arguments)}: {error!r}")
    return ""
