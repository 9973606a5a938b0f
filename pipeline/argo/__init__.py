"""The Argo engine: runs the pipeline as a Workflow on a cluster, through the Kubernetes API (docs/argo.md)."""
