"""The demo's model as others might publish it: quantized by our own quantizers, and with a flaw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stages.optimize.ensure import ensure
from stages.parts.base.optimize_settings import Calibration, Optimize
from stages.parts.records.variant import VARIANT
from tests.demo import DEMO
from tests.stages.optimize.tiny import acquire

FEW = Optimize(calibration=Calibration(samples=16, sequence_length=256))


def quantized(method: str, root: Path) -> Path:
    """Quantize the demo's model in a store below *root*. Returns a folder as a publisher would upload it."""
    store = acquire(DEMO / "model", root / method)
    ensure(store, method, FEW)
    (store.optimized(method) / VARIANT).unlink()
    return store.optimized(method)


def copied(source: Path, target: Path, **config: Any) -> Path:
    """Copy a model, with other fields in its config.json."""
    shutil.copytree(source, target)
    path = target / "config.json"
    fields = json.loads(path.read_text()) | config
    path.unlink()
    path.write_text(json.dumps(fields))
    return target


def with_token(folder: Path) -> Path:
    """Swap the ids of two tokens."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.unlink()
    path.write_text(json.dumps(content))
    return folder


def with_template(folder: Path) -> Path:
    """Another chat template."""
    path = folder / "chat_template.jinja"
    text = path.read_text()
    path.unlink()
    path.write_text(f"{text}{{# another #}}")
    return folder


def truncated(folder: Path) -> Path:
    """Cut the end off the last file of weights."""
    path = max(folder.glob("*.safetensors"))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    return folder
