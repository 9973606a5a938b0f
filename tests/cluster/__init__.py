"""``make test-cluster``: what a cluster with real controllers shows."""
