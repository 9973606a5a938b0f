"""The triggers on a cluster: what ``slipway render events`` shows, and a registry that posts to the receiver."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from typing import Final

import yaml

from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import DEPLOYMENTS, PODS, Kind
from tests.cluster.conftest import Place
from tests.pipeline.events.receiving import HARBOR_PUSH, HARBOR_TOKEN, PUSH, SECRET, TOKEN

SECRETS: Final = Kind("v1", "Secret", "secrets")
NAME: Final = "slipway-events"
POST: Final = """
import os, urllib.request
headers = {os.environ["HEADER"]: os.environ["VALUE"], "Content-Type": "application/json"}
asked = urllib.request.Request(os.environ["URL"], os.environ["BODY"].encode(), headers)
print(urllib.request.urlopen(asked, timeout=30).status)
"""


@contextlib.contextmanager
def deployed(place: Place) -> Iterator[None]:
    """The triggers, for any model of ``slipway``, until the block is left. SLIPWAY_TEST_NATS is the address of a NATS
    server to use as the bus; without it, Argo Events makes one."""
    said = place.call("render", "events")
    assert said.returncode == 0, said.stderr
    secret = {"huggingface-secret": SECRET, "harbor-token": HARBOR_TOKEN, "token": TOKEN}
    documents = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": secret},
        *yaml.safe_load_all(said.stdout),
    ]
    kinds = [place.cluster.kind(each["apiVersion"], each["kind"]) for each in documents]
    try:
        for kind, each in zip(kinds, documents, strict=True):
            if each["kind"] == "ConfigMap":
                each["data"]["allow"] = "slipway/*"
            if each["kind"] == "EventBus" and (nats := os.environ.get("SLIPWAY_TEST_NATS")):
                each["spec"] = {"jetstreamExotic": {"url": nats, "streamConfig": ""}}
            place.cluster.apply(kind, each, place.namespace, force=True)
        place.until(lambda: _ready(place.cluster), 300)
        yield
    finally:
        for kind, each in reversed(list(zip(kinds, documents, strict=True))):
            with contextlib.suppress(Absent):
                place.cluster.delete(kind, each["metadata"]["name"])


def post(place: Place, provider: str, model: str, commit: str) -> None:
    """Report the push of *commit* as the registry does, from a pod."""
    if provider == "huggingface":
        body = copy.deepcopy(PUSH)
        body["repo"]["name"] = model
        for each in body["updatedRefs"]:
            each["newSha"] = commit
        header, value = "X-Webhook-Secret", SECRET
    else:
        body = copy.deepcopy(HARBOR_PUSH)
        body["event_data"]["repository"] |= {"name": model, "repo_full_name": f"models/{model}"}
        body["event_data"]["resources"][0]["tag"] = commit
        header, value = "Authorization", f"Bearer {HARBOR_TOKEN}"
    variables = {
        "URL": f"http://slipway-receiver.{place.namespace}/{provider}",
        "BODY": json.dumps(body),
        "HEADER": header,
        "VALUE": value,
    }
    name = f"push-{provider}"
    container = {
        "name": "main",  # as in pods of Argo, whose logs are read
        "image": place.image("slim"),
        "command": ["python", "-c", POST],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    place.cluster.create(PODS, pod | {"spec": {"restartPolicy": "Never", "containers": [container]}})
    place.until(lambda: place.cluster.get(PODS, name)["status"].get("phase") in ("Succeeded", "Failed"), 120)
    assert "".join(place.cluster.logs(name)).strip() == "202"
    place.cluster.delete(PODS, name, grace_s=0)


def _ready(cluster: Cluster) -> bool:
    """Whether the receiver, the EventSource's pod and the Sensor's are there."""
    found, _ = cluster.list(DEPLOYMENTS)
    ready = [each["metadata"]["name"] for each in found if each.get("status", {}).get("readyReplicas")]
    return all(
        any(name.startswith(part) for name in ready)
        for part in ("slipway-receiver", "slipway-pushes-event", "slipway-pushes-sensor")
    )
