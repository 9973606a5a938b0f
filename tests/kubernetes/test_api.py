"""The test server itself: as strict as the real one, so that what passes against it is worth something."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kubernetes import KubernetesServer

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as server:
        yield server


@pytest.fixture
def client(server: KubernetesServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=20) as client:
        yield client


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def patch(client: httpx.Client, name: str, body: Any, content_type: str, **query: str) -> httpx.Response:
    headers = {"Content-Type": content_type}
    return client.patch(f"{MAPS}/{name}", content=json.dumps(body), params=query, headers=headers)


def test_objects_are_created_read_changed_and_deleted_with_rising_versions(client):
    made = client.post(MAPS, json=config_map("one", a="1")).json()
    changed = patch(client, "one", {"data": {"a": None, "b": "2"}}, MERGE).json()
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert client.get(f"{MAPS}/one").json()["data"] == {"b": "2"}
    assert client.delete(f"{MAPS}/one").status_code == 200
    assert client.get(f"{MAPS}/one").status_code == 404


def test_a_name_can_be_generated_and_is_taken_once(client):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "made-"}}
    names = {client.post(MAPS, json=body).json()["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    again = client.post(MAPS, json=config_map(names.pop()))
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyExists")


def test_an_update_of_an_old_version_is_a_conflict(client):
    old = client.post(MAPS, json=config_map("one", a="1")).json()
    assert client.put(f"{MAPS}/one", json=old | {"data": {"a": "2"}}).status_code == 200
    late = client.put(f"{MAPS}/one", json=old | {"data": {"a": "3"}})
    assert (late.status_code, late.json()["reason"]) == (409, "Conflict")


def test_two_managers_of_one_field_conflict_until_one_forces_it(client):
    assert patch(client, "one", config_map("one", a="1", b="1"), APPLY, fieldManager="first").status_code == 200
    refused = patch(client, "one", config_map("one", a="2"), APPLY, fieldManager="second")
    assert refused.status_code == 409
    assert refused.json()["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "first"', "field": ".data.a"}
    ]
    forced = patch(client, "one", config_map("one", a="2"), APPLY, fieldManager="second", force="true")
    assert forced.json()["data"] == {"a": "2", "b": "1"}
    # What a manager leaves out goes, if nobody else owns it.
    assert patch(client, "one", config_map("one"), APPLY, fieldManager="first").json()["data"] == {"a": "2"}


def test_a_dry_run_keeps_nothing(client, server):
    version = server.objects.version
    made = patch(client, "one", config_map("one", a="1"), APPLY, fieldManager="first", dryRun="All")
    assert made.status_code == 200
    assert client.get(f"{MAPS}/one").status_code == 404
    assert server.objects.version == version


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/api/v1/namespaces/default/configmap", {}, 404),
        ("GET", "/apis/argoproj.io/v1/namespaces/default/workflows", {}, 404),
        ("GET", "/healthy", {}, 404),
        ("GET", f"{MAPS}?labelSelctor=a", {}, 400),
        ("GET", f"{MAPS}?fieldSelector=data.a=1", {}, 400),
        ("GET", f"{MAPS}?labelSelector=a~b", {}, 400),
        ("POST", MAPS, {"content": "{}", "headers": {"Content-Type": "text/plain"}}, 415),
        ("POST", MAPS, {"json": {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}}}, 400),
        ("POST", MAPS, {"json": config_map("Not_a_name")}, 422),
        ("POST", "/api/v1/namespaces/nowhere/configmaps", {"json": config_map("one")}, 404),
        ("PATCH", f"{MAPS}/one", {"content": "{}", "headers": {"Content-Type": "application/json"}}, 415),
        ("PATCH", f"{MAPS}/one", {"content": "{}", "headers": {"Content-Type": APPLY}}, 400),
        ("DELETE", MAPS, {}, 405),
    ],
)
def test_what_the_real_server_would_refuse_is_refused(client, method, path, options, status):
    answer = client.request(method, path, **options)
    assert answer.status_code == status
    assert answer.json()["kind"] == "Status"


def test_a_workflow_with_an_unknown_field_is_refused(client, server):
    body = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "one"}}
    body["spec"] = {"entrypoint": "main", "serviceAccount": "mistyped"}
    answer = client.post("/apis/argoproj.io/v1alpha1/namespaces/default/workflows", json=body)
    assert answer.status_code == 422
    assert "unknown field spec.serviceAccount" in answer.json()["message"]
    assert len(server.mistakes) == 1


def test_status_is_changed_by_its_subresource_alone(client, server):
    place = "/apis/serving.kserve.io/v1beta1/namespaces/default/inferenceservices"
    body = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": {"name": "one"}}
    made = client.post(place, json=body | {"spec": {"a": 1}, "status": {"ready": True}}).json()
    assert "status" not in made
    said = client.put(f"{place}/one/status", json=made | {"spec": {"a": 2}, "status": {"ready": True}}).json()
    assert (said["spec"], said["status"]) == ({"a": 1}, {"ready": True})
    assert said["metadata"]["generation"] == 1


def test_lists_come_in_pages_and_select_by_label(client):
    for number in range(5):
        body = config_map(f"map-{number}")
        body["metadata"]["labels"] = {"odd": str(number % 2)}
        client.post(MAPS, json=body)
    first = client.get(MAPS, params={"limit": 3}).json()
    rest = client.get(MAPS, params={"limit": 3, "continue": first["metadata"]["continue"]}).json()
    assert [len(first["items"]), len(rest["items"])] == [3, 2]
    assert len(client.get(MAPS, params={"labelSelector": "odd=1"}).json()["items"]) == 2
    assert len(client.get(MAPS, params={"fieldSelector": "metadata.name=map-4"}).json()["items"]) == 1


def test_a_watch_tells_what_happens_until_it_expires_and_a_new_one_from_then_is_gone(client, server):
    version = client.get(MAPS).json()["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
    events = []
    with client.stream("GET", MAPS, params=query) as answer:
        server.put(config_map("one", a="1"))
        for line in answer.iter_lines():
            events.append(json.loads(line))
            if events[-1]["type"] == "BOOKMARK" and len(events) > 1:
                server.expire_watches()
    kinds = [each["type"] for each in events]
    assert [each for each in kinds if each != "BOOKMARK"] == ["ADDED", "ERROR"]
    assert "BOOKMARK" in kinds
    assert events[-1]["object"]["code"] == 410
    with client.stream("GET", MAPS, params=query) as answer:
        assert json.loads(next(answer.iter_lines()))["object"]["reason"] == "Expired"


def test_a_cut_watch_and_a_lost_answer_are_lost_connections(client, server):
    with client.stream("GET", MAPS, params={"watch": "true"}) as answer:
        server.cut_watches()
        with pytest.raises(httpx.RemoteProtocolError):
            list(answer.iter_lines())
    server.lose_answer("create", "*/configmaps")
    with pytest.raises(httpx.RemoteProtocolError):
        client.post(MAPS, json=config_map("one"))
    assert server.find("ConfigMap", "one")["metadata"]["name"] == "one"


def test_who_is_not_known_or_not_allowed_is_told_so(client, server):
    assert httpx.get(f"{server.url}{MAPS}").status_code == 401
    server.forbidden.add(("list", "configmaps"))
    assert client.get(MAPS).status_code == 403
    asks = {"verb": "list", "resource": "configmaps", "namespace": "default"}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
    review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = client.post(review, json=body | {"spec": {"resourceAttributes": asks}})
    assert answer.json()["status"] == {"allowed": False}


def test_a_finalizer_keeps_what_is_deleted(client, server):
    server.put(config_map("one") | {"metadata": {"name": "one", "finalizers": ["example.com/a"]}})
    assert client.delete(f"{MAPS}/one").status_code == 200
    marked = client.get(f"{MAPS}/one").json()["metadata"]["deletionTimestamp"]
    patch(client, "one", {"data": {"a": "2"}}, MERGE)
    assert client.get(f"{MAPS}/one").json()["metadata"]["deletionTimestamp"] == marked
    patch(client, "one", {"metadata": {"finalizers": None}}, MERGE)
    assert client.get(f"{MAPS}/one").status_code == 404


def test_throttling_says_when_to_come_back(client, server):
    server.fail("list", "*/configmaps", 429, retry_after=7)
    answer = client.get(MAPS)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert client.get(MAPS).status_code == 200


def test_a_controller_is_told_of_every_change_in_order(client, server):
    seen, enough = [], threading.Event()

    def told(change: str, each: dict[str, Any]) -> None:
        seen.append((change, each["data"]))
        if change == "DELETED":
            enough.set()

    server.on_change("ConfigMap", told)
    client.post(MAPS, json=config_map("one", a="1"))
    patch(client, "one", {"data": {"a": "2"}}, MERGE)
    client.delete(f"{MAPS}/one")
    assert enough.wait(60)
    assert seen == [("ADDED", {"a": "1"}), ("MODIFIED", {"a": "2"}), ("DELETED", {"a": "2"})]
