"""A release by a recipe on the cluster of KUBECONFIG: measured, chosen and served with speculation from the prompt."""

from __future__ import annotations

import json
import os

import pytest

from stages.parts.cluster.kinds import CLAIMS, PODS
from stages.rollout.kserve.objects import ISVCS
from tests.cluster.conftest import Place, Tell
from tests.demo import MODEL, REPEATING

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
]
TRACE = "/mnt/models/loops.jsonl"
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def put(place: Place, text: str) -> None:
    """Write the trace on the volume with the models, in a pod."""
    claim = place.cluster.list(CLAIMS)[0][0]["metadata"]["name"]
    write = f"import sys; open({TRACE!r}, 'w').write(sys.argv[1])"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trace"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 8737, "runAsGroup": 8737, "fsGroup": 8737},
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": claim}}],
            "containers": [
                {
                    "name": "trace",
                    "image": place.image("slim"),
                    "command": ["python", "-c", write, text],
                    "volumeMounts": [{"name": "models", "mountPath": "/mnt/models"}],
                }
            ],
        },
    }
    place.cluster.apply(PODS, pod)
    place.until(lambda: place.cluster.get(PODS, "trace")["status"].get("phase") == "Succeeded", 120)
    place.cluster.delete(PODS, "trace")


def test_a_release_by_a_recipe_is_served_by_it(place: Place, tell: Tell) -> None:
    place.answer("install")
    put(place, REPEATING.read_text())
    changed = {
        "optimize.variants": "[fp16, int8]",
        "serving.recipes": json.dumps({"ngram": {"speculation": NGRAM, "variants": ["int8"]}}),
        "profile.weights": "{quality: 0.01, latency: 0.3, throughput: 0.34, memory: 0.35}",
        "profile.task_loss": "0.5",
        "workload.trace": TRACE,
        "workload.slo": "null",
        "workload.prompt_tokens": "null",
        "workload.output_tokens": "null",
    }
    sets = [text for name, value in changed.items() for text in ("--set", f"{name}={value}")]
    run = place.ended(place.submit(MODEL, *sets))
    assert run.state.phase == "Succeeded", f"{run.state.culprit}: {run.state.message}"
    assert run.winner == "int8+ngram"
    (service,), _ = place.cluster.list(ISVCS)
    assert '"--speculative-config","{\\"method\\":\\"ngram\\"' in json.dumps(service["spec"], separators=(",", ":"))
    tell("a release by a recipe on KServe", f"{run.winner} ({run.outcome}) answers with speculation")
