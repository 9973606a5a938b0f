"""``evaluations/<variant>.refused.json``: a variant that failed a gate and therefore was never loaded."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from stages.parts.base.record import Record

REFUSED_SUFFIX: Final = ".refused.json"


class Refused(Record):
    variant: str
    variant_digest: str
    key: str
    """As of an evaluation (``Evaluation.key``)."""
    limits: str
    """The digest of the limits that it was tried by. By others it is measured again."""
    reason: str
    """One sentence that names the gates."""
    started_at: datetime
    seconds: float
