"""Tells others what happened to a model: people by a web hook, to Slack and what takes its form, or as plain JSON, and
MLflow's model registry by its REST API.

The hook's address is a secret, so that no setting has it: whoever knows it may post.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from stages.parts.base.log import say

VARIABLE: Final = "SLIPWAY_NOTIFY"
SLACK: Final = "slack+"
"""Before the address of a hook that takes Slack's form under another name, such as Mattermost's."""
SLACK_HOST: Final = "hooks.slack.com"
TIMEOUT_S: Final = 10.0
MLFLOW: Final = tuple(f"MLFLOW_TRACKING_{name}" for name in ("URI", "TOKEN", "USERNAME", "PASSWORD"))
REGISTRY_S: Final = 5.0

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


def register(release: Path, why: dict[str, str]) -> None:
    """Give a release in production a version in MLflow's registry, unless one has its name as a tag, and that version
    the alias ``production``; without an address, do nothing. It never fails, and takes ``REGISTRY_S`` at most."""
    if os.environ.get(MLFLOW[0]):
        thread = Thread(target=_register, args=(release, why), daemon=True)  # no timeout ends a look-up of names
        thread.start()
        thread.join(REGISTRY_S)
        if thread.is_alive():
            say(f"warning: {release.name} may not be in MLflow's registry: no answer within {REGISTRY_S:g} s")


def _register(release: Path, why: dict[str, str]) -> None:
    import httpx

    address, token, user, password = (os.environ.get(name, "") for name in MLFLOW)
    login = httpx.BasicAuth(user, password) if user and password else None
    headers = {"Authorization": f"Bearer {token}"} if token and not login else {}
    model, (variant, _, digest) = release.parents[1].name, release.name.partition("-")[2].rpartition("-")
    tags = {"release": release.name, "variant": variant, "digest": digest, **why}
    new = {"name": model, "source": f"slipway:{release}", "tags": [{"key": key, "value": tags[key]} for key in tags]}
    try:
        with httpx.Client(base_url=f"{address.rstrip('/')}/api/2.0/mlflow", auth=login, headers=headers) as mlflow:
            mlflow.post("registered-models/create", json={"name": model})  # refused if it is there
            query = {"filter": f"name='{model}' AND tags.release='{release.name}'"}
            found = mlflow.get("model-versions/search", params=query).raise_for_status().json().get("model_versions")
            if not found:
                found = [mlflow.post("model-versions/create", json=new).raise_for_status().json()["model_version"]]
            alias = {"name": model, "alias": "production", "version": found[0]["version"]}
            mlflow.post("registered-models/alias", json=alias).raise_for_status()
    except Exception as error:  # of whatever kind, since anything may answer
        answer = error.response if isinstance(error, httpx.HTTPStatusError) else None
        reason = f"{answer.status_code} {answer.text[:200]!r}" if answer else type(error).__name__
        say(f"warning: {release.name} is not in MLflow's registry: {reason}")
