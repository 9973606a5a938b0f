"""The serve step may do what it does, and not much more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from stages.errors import RolledBack
from tests.serving import REPOSITORY
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import NEXT

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/(?P<space>[^/]+)/(?P<plural>\w+)(?:/(?P<name>.+))?"
)
Asked = tuple[str, str, str]
"""verb, group, plural."""


def documents() -> Iterator[dict[str, Any]]:
    for file in ("base/accounts.yaml", "kserve/rights.yaml", "kserve/detection.yaml"):
        yield from yaml.safe_load_all((REPOSITORY / "manifests" / file).read_text())


def granted(namespace: str) -> set[Asked]:
    """To the serve step, by name or not."""
    found = list(documents())
    bound = {
        each["roleRef"]["name"]
        for each in found
        if each["kind"] == "RoleBinding"
        and each["metadata"]["namespace"] == namespace
        and any(subject["name"] == "slipway-serve" for subject in each["subjects"])
    }
    roles = [each for each in found if each["kind"] == "Role" and each["metadata"]["namespace"] == namespace]
    return {
        (verb, group, plural)
        for role in roles
        if role["metadata"]["name"] in bound
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
    }


@pytest.mark.parametrize("mode", MODES)
def test_whatever_a_rollout_asks_of_the_cluster_is_granted(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.settings = kserve.settings.model_copy(update={"prometheus": "http://127.0.0.1:9"})
    kserve.first()
    kserve.make(NEXT)
    with pytest.raises(RolledBack):  # Prometheus does not answer: nothing shows that it is as good
        kserve.roll(NEXT, step_timeout_s=0.2)
    asked = [(each.verb, PATH.fullmatch(each.path)) for each in kserve.server.requests]
    calls = {(verb, found["group"] or "", found["plural"], found["space"]) for verb, found in asked if found}
    # Server-side apply is a patch, and where the object is new a create.
    calls |= {("create", *rest) for verb, *rest in calls if verb == "patch"}
    assert {each[3] for each in calls} == {"default", "kserve"}
    for space, namespace in (("default", "slipway"), ("kserve", "kserve")):
        assert {each[:3] for each in calls if each[3] == space} <= granted(namespace)


def test_nothing_is_granted_on_secrets_or_beyond_two_namespaces() -> None:
    assert {each["metadata"]["namespace"] for each in documents()} == {"slipway", "kserve"}
    assert {"ClusterRole", "ClusterRoleBinding"}.isdisjoint(each["kind"] for each in documents())
    assert "secrets" not in {plural for _, _, plural in granted("slipway") | granted("kserve")}
    assert {verb for verb, _, _ in granted("kserve")} == {"get"}
