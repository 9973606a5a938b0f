"""KEDA's part in Standard mode: replicas of one release's Deployment by vLLM's own queue.

CPU, KServe's default, says nothing of an LLM. In Knative mode Knative scales by concurrency; see ``objects.py``.
"""

from __future__ import annotations

from typing import Final

from stages.rollout.kserve.objects import ENDPOINT, PART_OF, RELEASE, Endpoint, Object

LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
POLL_S: Final = 15
FAILURES: Final = 3
"""Polls without an answer of Prometheus, until the replicas stay as they are."""


def scaled_object(endpoint: Endpoint, release: str, deployment: str) -> Object:
    """One for each release: a canary scales by its own load, and promoting it changes nothing of its pods.

    Needs ``settings.prometheus``.
    """
    scaling = endpoint.settings.scaling
    hundred_percent = {"type": "Percent", "value": 100, "periodSeconds": 60}
    one_pod = {"type": "Pods", "value": 1, "periodSeconds": 60}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {
            "name": deployment,
            "namespace": endpoint.namespace,
            "labels": PART_OF | {ENDPOINT: endpoint.name, RELEASE: release},
        },
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
            "minReplicaCount": scaling.minimum,
            "maxReplicaCount": scaling.maximum,
            "pollingInterval": POLL_S,
            "fallback": {
                "failureThreshold": FAILURES,
                "replicas": scaling.minimum,
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {
                            "stabilizationWindowSeconds": scaling.scale_up_window_s,
                            "policies": [hundred_percent],
                        },
                        "scaleDown": {
                            "stabilizationWindowSeconds": scaling.scale_down_delay_s,
                            "policies": [one_pod],
                        },
                    }
                }
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": endpoint.settings.prometheus,
                        "query": load_query(endpoint, release),
                        "threshold": str(scaling.concurrency),
                        "ignoreNullValues": "false",  # no answer is no idleness
                    },
                }
            ],
        },
    }


def selector(endpoint: Endpoint, release: str) -> str:
    """Of one release's series; the latter labels come from the PodMonitor in ``manifests/monitoring``."""
    labels = {"namespace": endpoint.namespace, "slipway_endpoint": endpoint.name, "slipway_release": release}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def load_query(endpoint: Endpoint, release: str) -> str:
    """Requests that one release has, over all of its pods."""
    return " + ".join(f"sum({metric}{{{selector(endpoint, release)}}})" for metric in LOAD)
