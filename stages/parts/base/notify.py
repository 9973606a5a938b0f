"""Tells people what happened to a model, by a web hook: to Slack and what takes its form, or as plain JSON.

The address is a secret, so that no setting has it: whoever knows it may post.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from stages.parts.base.log import say

VARIABLE: Final = "SLIPWAY_NOTIFY"
SLACK: Final = "slack+"
"""Before the address of a hook that takes Slack's form under another name, such as Mattermost's."""
SLACK_HOST: Final = "hooks.slack.com"
TIMEOUT_S: Final = 10.0

Event = Literal["rolled back", "awaiting approval", "watch alarm", "watch ended"]


def notify(model: str, event: Event, text: str, *, url: str | None = None, **details: Any) -> None:
    """Post *text* to *url*, or to the address in ``VARIABLE``; without one, do nothing. It never fails."""
    import httpx

    url = url or os.environ.get(VARIABLE, "")
    if not url:
        return
    body = {"event": event, "model": model, "text": f"{model}: {text}", "at": datetime.now(UTC).isoformat(), **details}
    if url.startswith(SLACK) or urlsplit(url).hostname == SLACK_HOST:
        # Slack reads three characters as its own markup.
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        body = {"text": f"*{model}*: {event}\n{escaped}"}
    try:
        httpx.post(url.removeprefix(SLACK), json=body, timeout=TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        kind = f"{error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        say(f"not notified: {urlsplit(url).hostname}: {kind}")  # the rest of the address is secret
