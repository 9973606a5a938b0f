"""Models with a flaw, made from a sound one in its folder: what a canary may be like."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Final

REFUSE: Final = "{{ raise_exception('refused') }}"
"""In a chat template: vLLM answers 400."""
WIDER: Final = 32
"""The factor by which ``slow_down`` widens layers. A token took 94 ms (p95) then, and 22 ms by the sound model."""


def when_asked(folder: Path, question: str, do: str) -> None:
    """Let the chat template *do* something else when the *question* is asked."""
    path = folder / "chat_template.jinja"
    template = path.read_text()
    path.unlink()  # it may be a link
    path.write_text(f"{{% if messages[-1]['content'] == '{question}' %}}{do}{{% endif %}}{template}")


def damage(folder: Path) -> None:
    """Move the embeddings by half their rows: every word now means another one."""
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + struct.unpack("<Q", data[:8])[0]
        embeddings = json.loads(data[8:start]).get("model.embed_tokens.weight")
        if embeddings:
            low, high = (start + each for each in embeddings["data_offsets"])
            middle = (low + high) // 2
            data[low:high] = data[middle:high] + data[low:middle]
            path.write_bytes(data)


def slow_down(folder: Path) -> None:
    """Widen the layers by zeros, which are multiplied and then add nothing: the same answers, later."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    added = (WIDER - 1) * config["intermediate_size"]
    weights = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    for name, each in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = torch.nn.functional.pad(each, (0, 0, 0, added))
        elif name.endswith("down_proj.weight"):
            weights[name] = torch.nn.functional.pad(each, (0, added))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDER * config["intermediate_size"]}))
