"""The methods by name. To add one, write a ``Quantizer`` in a new file and add a line here."""

from __future__ import annotations

from typing import Final

from stages.optimize.four_bit import FourBit
from stages.optimize.fp16 import Fp16
from stages.optimize.int8 import Int8
from stages.optimize.quantizer import Quantizer
from stages.parts.base.errors import UnknownName

QUANTIZERS: Final[dict[str, Quantizer]] = {
    "fp16": Fp16(),
    "awq": FourBit("awq", symmetric=False),
    "gptq": FourBit("gptq", symmetric=True),
    "int8": Int8(),
}


def quantizer(method: str) -> Quantizer:
    """Raises: UnknownName."""
    if method not in QUANTIZERS:
        raise UnknownName("method", method, QUANTIZERS)
    return QUANTIZERS[method]
