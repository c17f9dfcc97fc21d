"""Sandboxes on this machine: a fork server, kernel namespaces where allowed, and the backend that drives them."""
