"""Tiny models with random weights, otherwise real, and the program under test."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest
from stages.parts.records.variant import VARIANT, Variant

ROOT = Path(__file__).parents[3]
LICENSE = "Do as you like.\n"


WORDS = ("the", "model", "reads", "a", "line", "of", "text", "and", "writes", "another", "one")


def words(count: int, seed: int = 0) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(count))


def make_tokenizer() -> Any:
    """A byte-level BPE of at most 512 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([words(200)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    return LlamaConfig(**{**sizes, **heads, **tokens, **changes})


def publish(directory: Path, config: Any, *, dtype: str = "bfloat16", shard_size: str = "300KB") -> Path:
    """Write a model directory as a publisher would."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=shard_size)
    make_tokenizer().save_pretrained(directory)
    (directory / "LICENSE").write_text(LICENSE)
    return directory


def acquire(source: Path, root: Path) -> ModelStore:
    """A store with the model of a directory in ``base/``."""
    store = ModelStore(root, "test/tiny")
    shutil.copytree(source, store.base)
    record_base(store)
    return store


def record_base(store: ModelStore) -> None:
    """Write the record of the files in ``base/``."""
    paths = sorted(path for path in store.base.rglob("*") if path.is_file() and path.name != ACQUIRED)
    files = tuple(File.of(store.base, path.relative_to(store.base).as_posix()) for path in paths)
    Acquired(
        model=store.model,
        source="http://hub.example",
        revision="main",
        commit="c" * 40,
        license=None,
        architecture=json.loads((store.base / "config.json").read_bytes())["architectures"][0],
        parameters=1,
        files=files,
        digest=files_digest(files),
        acquired_at=datetime.now(UTC),
    ).write(store.base / ACQUIRED)


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The last lines, from ``error:``."""
        return self.stderr[self.stderr.rfind("\nerror: ") + 1 :].strip()


def command(store: ModelStore, method: str, settings: dict[str, Any], *python_options: str) -> list[str]:
    program = [sys.executable, *python_options, "-m", "stages.optimize"]
    return [*program, "--model", store.model, "--method", method, "--settings", json.dumps(settings)]


def environment(store: ModelStore, **more: str) -> dict[str, str]:
    return {**os.environ, "SLIPWAY_STORE": str(store.root), **more}


def optimize(store: ModelStore, method: str, settings: dict[str, Any], *options: str, **variables: str) -> Ended:
    """Run the program to its end."""
    ended = subprocess.run(
        command(store, method, settings, *options),
        env=environment(store, **variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def variant(store: ModelStore, method: str) -> Variant:
    found = Variant.read(store.optimized(method) / VARIANT)
    assert found is not None
    return found
