"""What an endpoint offers, on one machine and on a cluster: what vLLM answers for a model that generates text.

vLLM has more: routes that generate without a key (``/invocations``), and routes that reveal what clients do
(``/metrics``, ``/load``).
"""

from __future__ import annotations

from typing import Final

HEALTH: Final = "/health"
OFFERED: Final = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    "/v1/models": "GET",
    HEALTH: "GET",
}
"""The method of each path."""
