"""What a platform's cluster gets."""

from __future__ import annotations

from pipeline.cluster.manifests import documents_of
from pipeline.settings.config import load
from stages.parts.cluster.kinds import Object


def documents(platform: str) -> list[Object]:
    return documents_of(load(chosen={"platform": platform}))
