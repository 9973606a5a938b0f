"""The settings of the variants: which are made, and how."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import field_validator

from scoring.capacity.storage import DEFAULT_GROUP_SIZE
from scoring.names import REFERENCE
from stages.parts.base.errors import InvalidName, UnknownName
from stages.parts.base.formats import FORMATS
from stages.parts.base.settings import Positive, Settings
from stages.parts.base.store import directory_name

AUTO: Final = "auto"
WITHOUT: Final = "-"
"""In front of the name of a variant that *auto* is not to try."""


class Calibration(Settings):
    """The text from which awq, gptq, w4a16, w8a8 and nvfp4 compute their scales."""

    text: str = "python-docs"
    """A name in ``configs/calibration/``, or a path to a .txt file (documents separated by form feeds or, if it has
    none, by blank lines) or to a .jsonl file with a ``text`` field. It must not contain the texts on which quality is
    measured."""
    samples: Positive = 128
    """Number of sequences. The GPTQ paper uses 128; fewer are faster and give noisier scales."""
    sequence_length: Positive = 512
    """Tokens per sequence."""
    seed: int = 0


class Optimize(Settings):
    """Which variants are made, and how."""

    variants: tuple[str, ...] = (AUTO,)
    """Names of ``stages.parts.base.formats``. ``profile.reference``, fp16 by default, has to be among them. auto: fp16,
    and what ``configs/hardware`` says is tried first where the variants are measured. Names beside it are tried, too;
    those after a minus sign are not: ``[auto, fp8, -gptq]``."""
    candidates: tuple[str, ...] = ()
    """Checkpoints of the same model on the Hub that are measured, too: ``org/name`` or ``org/name@revision``."""
    group_size: Literal[32, 64, 128] = DEFAULT_GROUP_SIZE
    """Weights that share one scale in awq, gptq and w4a16. It must divide the layers' inputs. 32 is the most exact
    and largest."""
    calibration: Calibration = Calibration()
    make_unservable: bool = False
    """True: make a variant that vLLM can't serve where it would be measured, for another machine. It is not measured
    and can't win. False: it is left out before it is made."""

    allow_fallback: bool = False
    """True: make and measure a variant that vLLM computes here with a slow stand-in, such as an emulation, for a kernel
    that it lacks. False: it is left out before it is made."""

    allow_incomplete: bool = False
    """What happens if a variant of ``variants`` could not be made or measured. False: the best of the others is
    published, but neither served nor put in production, and the run ends with exit code 45. True: it is used like any
    other winner. A variant that can't be served on this machine is left out beforehand and is not missing."""

    force_publish: bool = False
    """True: the winner takes the place of the release in production, however the two compare."""

    @field_validator("candidates")
    @classmethod
    def _on_the_hub(cls, candidates: tuple[str, ...]) -> tuple[str, ...]:
        for candidate in candidates:
            try:
                directory_name(candidate.partition("@")[0])
            except InvalidName as error:
                raise ValueError(f"{error}; a candidate is org/name or org/name@revision, as on the Hub") from error
        if len(set(candidates)) < len(candidates):
            raise ValueError("candidates names a checkpoint twice")
        return candidates

    @property
    def names(self) -> tuple[str, ...]:
        """The variants; with *auto*, all that it may try on any hardware."""
        if AUTO not in self.variants:
            return self.variants
        return tuple(name for name in FORMATS if f"{WITHOUT}{name}" not in self.variants)

    def is_automatic(self, name: str) -> bool:
        """Whether the hardware decides if this variant is tried."""
        return AUTO in self.variants and name not in (REFERENCE, *self.variants)

    def variants_of(self, published: str) -> tuple[str, ...]:
        """List the variants of a model *published* in this format, which takes the place of fp16."""
        if published == REFERENCE:
            return self.names
        return tuple(dict.fromkeys((published, *(name for name in self.names if name != REFERENCE))))

    @field_validator("variants", mode="before")
    @classmethod
    def _alone(cls, variants: Any) -> Any:
        return (variants,) if isinstance(variants, str) else variants

    @field_validator("variants")
    @classmethod
    def _known_and_once(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        removed = [name for name in variants if name.startswith(WITHOUT)]
        if removed and AUTO not in variants:
            raise ValueError(f"{removed[0]} takes a variant away from {AUTO}, which is not among them")
        named = [name.removeprefix(WITHOUT) for name in variants if name != AUTO]
        for name in named:
            if name not in FORMATS:
                unknown = UnknownName("variant", name, (AUTO, *FORMATS))
                raise ValueError(f"{unknown}; {unknown.hint}")
        if not variants:
            raise ValueError("variants names none")
        if len(set(named)) < len(named) or variants.count(AUTO) > 1:
            raise ValueError("variants names a variant twice")
        return variants
