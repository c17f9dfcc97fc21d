"""Sandboxes as containers of a Docker Engine on this machine."""
