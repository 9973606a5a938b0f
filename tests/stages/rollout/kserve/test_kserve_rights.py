"""The serve step has the rights that it needs, and few more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.parts.base.errors import RolledBack
from stages.rollout.kserve.settings import LLM
from stages.rollout.watch import look
from tests.kubernetes import KubernetesServer
from tests.kubernetes.objects import Resource
from tests.serving import REPOSITORY
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/(?P<space>[^/]+)/(?P<plural>\w+)(?:/(?P<name>.+))?"
)
Asked = tuple[str, str, str]
"""verb, group, plural."""
OF_THE_ENDING: set[Asked] = {("patch", "argoproj.io", "workflows")}
"""What the end of a run needs, which has the same account (tests/stages/ending)."""


def documents() -> Iterator[dict[str, Any]]:
    for file in ("base/accounts.yaml", "kserve/rights.yaml", "kserve/detection.yaml"):
        yield from yaml.safe_load_all((REPOSITORY / "manifests" / file).read_text())


def granted(namespace: str, account: str = "slipway-serve") -> set[Asked]:
    """The rights of an account, by default the serve step's, with or without a name."""
    found = list(documents())
    bound = {
        each["roleRef"]["name"]
        for each in found
        if each["kind"] == "RoleBinding"
        and each["metadata"]["namespace"] == namespace
        and any(subject["name"] == account for subject in each["subjects"])
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


def asked(kserve: OnKServe, space: str) -> set[Asked]:
    """The rights that were used in one namespace so far."""
    found = [(each.verb, PATH.fullmatch(each.path)) for each in kserve.server.requests]
    calls = {(verb, path["group"] or "", path["plural"]) for verb, path in found if path and path["space"] == space}
    # Server-side apply is a patch, and where the object is new a create.
    return calls | {("create", group, plural) for verb, group, plural in calls if verb == "patch"}


def rolled(kserve: OnKServe) -> OnKServe:
    """Through a first release, a canary that goes back, and the end."""
    copied = LLM(source="s3://bucket/models", cache_nodes="gpus")
    changed = {"prometheus": "http://127.0.0.1:9", "llm": copied, "shared_host": "models.example.com"}
    kserve.settings = kserve.settings.model_copy(update=changed)
    kserve.first()
    kserve.make(NEXT)
    with pytest.raises(RolledBack):  # Prometheus does not answer: nothing shows that it is as good
        kserve.roll(NEXT, step_timeout_s=0.2)
    kserve.connect().withdraw(GOOD, first=True)
    return kserve


def test_exactly_the_rights_that_rollouts_need_in_any_mode_are_granted(tmp_path: Path) -> None:
    used: set[Asked] = set()
    for mode, changed in MODES.items():
        with KubernetesServer() as server:
            kserve = OnKServe(tmp_path / mode, server, **changed)
            try:
                used |= asked(rolled(kserve), "default")
            finally:
                kserve.kserve.stop()
            assert asked(kserve, "kserve") <= granted("kserve")
    with KubernetesServer() as server:  # without KEDA
        kserve = OnKServe(tmp_path / "pods", server, **MODES["route"])
        try:
            server.unregister("keda.sh/v1alpha1", "scaledobjects")
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                server.register(Resource("custom.metrics.k8s.io/v1beta1", "MetricValueList", f"pods/{name}"))
            kserve.first()
            kserve.connect().replicas(GOOD)
            used |= asked(kserve, "default")
        finally:
            kserve.kserve.stop()
    assert used | OF_THE_ENDING == granted("slipway")


def test_a_look_reads_and_changes_nothing(tmp_path: Path) -> None:
    used: set[Asked] = set()
    for mode, changed in MODES.items():
        with KubernetesServer() as server:
            kserve = OnKServe(tmp_path / mode, server, gateway=True, **changed)
            try:
                kserve.first()
                server.requests.clear()
                seen = look(kserve.store, kserve.connect(), kserve.gateway.url)
                assert seen
                assert (seen.failed, seen.context, seen.instance) == (0, 4096, "0 restarts"), mode
                assert seen.agreement == pytest.approx(1)
                used |= asked(kserve, "default")
            finally:
                kserve.kserve.stop()
            assert asked(kserve, "kserve") <= granted("kserve", "slipway-watch")
    assert {verb for verb, _, _ in used} == {"get", "list"}
    assert used == granted("slipway", "slipway-watch")


def test_nothing_is_granted_on_secrets_or_beyond_two_namespaces() -> None:
    assert {each["metadata"]["namespace"] for each in documents()} == {"slipway", "kserve"}
    assert {"ClusterRole", "ClusterRoleBinding"}.isdisjoint(each["kind"] for each in documents())
    assert "secrets" not in {plural for _, _, plural in granted("slipway") | granted("kserve")}
    assert {verb for verb, _, _ in granted("kserve")} == {"get"}
