"""LoRA adapters in PEFT's format, trained by a few steps of plain torch: PEFT is not among the locked packages."""

from __future__ import annotations

import json
import math
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from stages.parts.base.store import ModelStore
from stages.parts.model.adapter import CONFIG, WEIGHTS
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest

PROJECTIONS: Final = ("q_proj", "v_proj")
CONTENT: Final[dict[str, Any]] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "target_modules": list(PROJECTIONS),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "inference_mode": True,
}
"""The rest of what PEFT writes."""


def train(base: Path, target: Path, text: str, *, rank: int = 8, steps: int = 40, named: str = "") -> list[float]:
    """Teach an adapter of the model in *base* a *text*, and write it to *target*. Returns the loss of each step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)
    matrices: dict[str, torch.nn.Parameter] = {}
    for name, layer in list(model.named_modules()):
        if name.endswith(PROJECTIONS):
            a = torch.nn.Parameter(torch.empty(rank, layer.in_features))
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as PEFT does
            b = torch.nn.Parameter(torch.zeros(layer.out_features, rank))
            layer.register_forward_hook(lambda _, inputs, output, a=a, b=b: output + 2 * inputs[0] @ a.T @ b.T)
            matrices |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tokens = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt").input_ids
    optimizer, losses = torch.optim.Adam(matrices.values(), lr=0.01), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays = {name: matrix.detach().numpy() for name, matrix in matrices.items()}
    write(target, arrays, r=rank, base_model_name_or_path=named)
    return losses


def write(target: Path, matrices: dict[str, Any], *, r: int = 8, **changed: Any) -> Path:
    """Write an adapter with the scaling 2, and these fields of its configuration *changed*."""
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files(matrices, r=r, **changed).items():
        (target / name).write_bytes(content)
    return target


def files(matrices: dict[str, Any], *, r: int = 8, **changed: Any) -> dict[str, bytes]:
    """As ``write``, the files by name."""
    config = CONTENT | {"r": r, "lora_alpha": 2 * r} | changed
    weights = save({f"base_model.model.{name}": matrix for name, matrix in matrices.items()})
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: weights}


def untrained(
    hidden: int = 64,
    outputs: int = 64,
    *,
    module: str = "model.layers.{}.self_attn.q_proj",
    layers: int = 1,
    r: int = 8,
) -> dict[str, Any]:
    """Matrices of zeros for a module of each layer."""
    shapes = {"A": (r, hidden), "B": (outputs, r)}
    return {
        f"{module.format(layer)}.lora_{which}.weight": np.zeros(shape, np.float32)
        for layer in range(layers)
        for which, shape in shapes.items()
    }


def acquired(store: ModelStore, name: str, **changed: Any) -> Acquired:
    """Put an adapter into the store as acquire does, instead of the one that is there."""
    folder = store.adapter(name)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, untrained(), **changed)
    kept = tuple(File.of(folder, path) for path in (CONFIG, WEIGHTS))
    record = Acquired(
        model=f"org/{name}",
        source="http://hub.example",
        revision="main",
        commit="c" * 40,
        license=None,
        architecture="LORA",
        parameters=1024,
        files=kept,
        digest=files_digest(kept),
        acquired_at=datetime.now(UTC),
    )
    record.write(folder / ACQUIRED)
    return record
