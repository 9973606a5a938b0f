"""Lets PyTorch, and with it vLLM, see the processor as ``ONEDNN_MAX_CPU_ISA`` limits it. See docs/one-machine.md.

Python imports a module of this name when it starts, before anything else. oneDNN reads the variable itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

LIMIT: Final = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
HIDDEN: Final = {"AVX2": ("avx512", "amx"), "AVX512_CORE": ("avx512_bf16", "avx512_fp16", "amx")}.get(LIMIT, ())
CAPABILITIES: Final = "torch.cpu"


class Limited:
    """Finds ``torch.cpu`` as it would be found without this, and changes what it tells once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != CAPABILITIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def limited(module: ModuleType) -> None:
            execute(module)
            tell = module.get_capabilities
            module.get_capabilities = lambda: without(tell())  # type: ignore[attr-defined]

        spec.loader.exec_module = limited  # type: ignore[method-assign]
        return spec


def without(capabilities: Mapping[str, Any]) -> Mapping[str, Any]:
    """The capabilities, those that are hidden false."""
    return MappingProxyType({name: not name.startswith(HIDDEN) and told for name, told in capabilities.items()})


def import_the_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    here = Path(__file__).parent
    others = [path for path in sys.path if Path(path or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if HIDDEN:
    sys.meta_path.insert(0, Limited())
import_the_next()
