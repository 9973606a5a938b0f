"""Releases on a cluster: KServe's InferenceServices, in whichever of its modes the cluster runs."""
