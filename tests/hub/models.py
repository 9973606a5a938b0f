"""Small models for tests, as the files of a repository, and the stage programs that download them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


def weights(*names: str, rows: int = 8, seed: int = 0) -> bytes:
    """A safetensors file with one float32 tensor [rows, 8] per name."""
    generator = np.random.default_rng(seed)
    return save({name: generator.standard_normal((rows, 8), dtype=np.float32) for name in names})


def big_weights(size_mib: int) -> bytes:
    return save({"big": np.random.default_rng(0).standard_normal((size_mib, 256, 1024), dtype=np.float32)})


def tiny_model(**changes: bytes | None) -> dict[str, bytes]:
    """A complete model in one file. *changes*: files to add or replace; None removes a file."""
    files: dict[str, bytes | None] = {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights("embed", "head"),
        "README.md": b"---\nlicense: apache-2.0\n---\n# tiny\n",
    }
    return {path: content for path, content in (files | changes).items() if content is not None}


def sharded_model(**changes: bytes | None) -> dict[str, bytes]:
    """A complete model in two shards, one tensor each, with an index."""
    weight_map = {"embed": "model-00001-of-00002.safetensors", "head": "model-00002-of-00002.safetensors"}
    shards: dict[str, bytes | None] = {
        "model.safetensors": None,
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "model-00001-of-00002.safetensors": weights("embed"),
        "model-00002-of-00002.safetensors": weights("head", seed=1),
    }
    return tiny_model(**(shards | changes))


def write_model(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


@dataclass
class Stages:
    """Starts ``python -m stages.…`` with the Hub at *url* and a store in *folder*."""

    url: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def base(self, model: str = "org/tiny") -> Path:
        return self.store / model.replace("/", "--") / "base"

    def start(
        self, stage: str, *arguments: str, terminal: Any = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        """*terminal*: a file descriptor for stderr."""
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / "hf"),
            "SLIPWAY_STORE": str(self.store),
            "SLIPWAY_OUTPUTS": str(self.folder / "outputs"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLIPWAY_"))}
        return subprocess.Popen(
            [sys.executable, "-m", f"stages.{stage}", *arguments],
            env=inherited | variables | self.environment | environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
        )

    def run(self, stage: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(stage, *arguments, **environment) as process:
            output, errors = process.communicate(timeout=180)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def resolve(self, model: str = "org/tiny", revision: str = "main", **environment: str) -> str:
        result = self.run("resolve", "--model", model, "--revision", revision, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def acquire(self, commit: str, model: str = "org/tiny", **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("acquire", "--model", model, "--commit", commit, **environment)
