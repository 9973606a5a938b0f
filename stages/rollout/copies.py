"""Clients' requests beside their copies at the canary, as Envoy's log tells of both.

Nothing of an answer's text is known. Speed is compared where both did the same work: streams, of which neither release
had much more of the prompt in its cache, since a canary has seen less than the stable release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stages.parts.endpoint.access_log import LoggedRequest, LogReader
from stages.rollout.slices import SHORTEST_S, CopiedRequest, Timing

CLIENT_LEFT: Final = "DC"
"""Envoy's flag of a request whose client went away."""
NO_FLAGS: Final = "-"
STREAM: Final = "text/event-stream"
WAITING: Final = 10_000
"""Requests whose copy, if there is one, has not ended."""
ALIKE_TOKENS, ALIKE = 16, 0.1
"""How much may differ what both releases had to compute of a prompt: a block of the cache, or this share."""
US_PER_S: Final = 1e6


class CopyReader:
    """Reads from Envoy's log what has ended since, and finds each request's copy."""

    def __init__(self, log: Path) -> None:
        self._log = LogReader(log, at_end=True)
        self._requests: dict[str, LoggedRequest] = {}
        self._copies: dict[str, LoggedRequest] = {}

    def read(self, release: str) -> list[CopiedRequest]:
        """List the requests that have ended at both releases since the last call, with what each did. Those whose copy
        was sent to another canary than *release* are left out."""
        copied = []
        for line in self._log.requests():
            own, others = (self._copies, self._requests) if line.copy_of else (self._requests, self._copies)
            name = line.copy_of or line.id
            if (other := others.pop(name, None)) is None:
                own[name] = line
                if len(own) > WAITING:
                    del own[next(iter(own))]
                continue
            original, copy = (other, line) if line.copy_of else (line, other)
            if copy.release in (None, release) and (judged := compared(original, copy)):
                copied.append(judged)
        return copied


def compared(original: LoggedRequest, copy: LoggedRequest) -> CopiedRequest | None:
    """Compare a request with its copy; None if that says nothing of the canary: the stable release refused the request,
    somebody went away, or it was too large to be copied."""
    too_large = copy.server is None and copy.status == 413
    if too_large or 400 <= original.status < 500 or any(CLIENT_LEFT in (line.flags or "") for line in (original, copy)):
        return None
    failed, lost = (not 200 <= line.status < 300 or line.flags not in (None, NO_FLAGS) for line in (original, copy))
    if not failed and original.output_tokens and not copy.output_tokens:
        lost = True
    at_canary, at_stable = timing(copy), timing(original)
    computed = [(line.prompt_tokens or 0) - (line.cached_tokens or 0) for line in (original, copy)]
    if at_canary and at_stable and alike(*computed) and not failed and not lost:
        return CopiedRequest(lost, failed, (at_canary, at_stable))
    return CopiedRequest(lost, failed, None)


def timing(line: LoggedRequest) -> Timing | None:
    """Time a streamed answer; None if it has no second token."""
    tokens, first_us, answer_us = line.output_tokens or 0, line.server_ttft_us, line.server_answer_us
    if tokens < 2 or first_us is None or answer_us is None or STREAM not in (line.content_type or ""):
        return None
    first_s, token_s = first_us / US_PER_S, answer_us / US_PER_S / (tokens - 1)
    return Timing(max(SHORTEST_S, first_s), max(SHORTEST_S, token_s))


def alike(*computed: int) -> bool:
    """Whether both releases computed about as many tokens of a prompt."""
    return max(computed) - min(computed) <= max(ALIKE_TOKENS, ALIKE * max(computed))
