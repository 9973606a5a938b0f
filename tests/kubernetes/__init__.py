"""A server that an unmodified Kubernetes client takes for a cluster's API, and controllers that act on it.

``KubernetesServer`` keeps objects and speaks HTTP as strictly as the real one; ``WorkflowController`` plays Argo's
workflow controller on it, from a script of outcomes.
"""

from tests.kubernetes.api import KubernetesServer
from tests.kubernetes.argo import Outcome, WorkflowController
from tests.kubernetes.objects import Resource

__all__ = ["KubernetesServer", "Outcome", "Resource", "WorkflowController"]
