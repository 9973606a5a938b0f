"""Properties are about results, not about how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("slipway", deadline=None)
settings.load_profile("slipway")
