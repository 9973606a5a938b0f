"""Which side of a split a request is on, without any store: a hash of its conversation, so that all of its turns go to
one release and find their beginning in its prefix cache.

A conversation is known by its session or, without one, by the client and the first messages, which every turn sends
again. The prompt of a completion has no such part: without a session, each is on a side of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

SESSION_HEADER: Final = "x-session-id"
SIDE_HEADER: Final = "x-slipway-side"
"""Tells Envoy the side; what a client says in it is replaced."""
SIDES: Final = 100
"""One for each percent of the requests."""
MOST_BODY_BYTES: Final = 256 << 10
"""How much of a request's body is read to know its conversation."""
MESSAGES: Final = re.compile(r'"(?:messages|input)"\s*:\s*(?=["[])')
"""Within a string of JSON, a quote has a backslash."""
BETWEEN: Final = re.compile(r"[\s,]*")
DECODER: Final = json.JSONDecoder()


def side(client: str, session: str, body: bytes, request: str) -> int:
    """Compute a request's side, from 0 to ``SIDES`` - 1. The body may be cut; the id of the *request* decides if it
    belongs to no conversation."""
    if session:
        name = ("session", client, session)
    elif messages := first_messages(body.decode(errors="replace")):
        name = ("messages", client, messages)
    else:
        name = ("request", client, request)
    digest = hashlib.blake2b("\0".join(name).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) % SIDES


def first_messages(body: str) -> str:
    """Take the contents of the messages up to the first one of the user; empty if there are none. Of a body that was
    cut within them, what it has of them counts."""
    if (found := MESSAGES.search(body)) is None:
        return ""
    place, contents = found.end() + (body[found.end()] == "["), ""
    while (between := BETWEEN.match(body, place)) and not body.startswith("]", place := between.end()):
        try:
            message, place = DECODER.raw_decode(body, place)
        except (ValueError, RecursionError):
            return contents + body[place:]
        alone = not isinstance(message, dict)  # a string is what the user says
        contents += json.dumps(message if alone else message.get("content"))
        if alone or message.get("role") == "user":
            break
    return contents
