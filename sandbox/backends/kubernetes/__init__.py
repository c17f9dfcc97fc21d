"""Sandboxes as pods: their manifests, the shared watch over them, and the backend that drives both."""
