"""The reward service: an error is not a zero."""
