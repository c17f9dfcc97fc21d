"""The history of the gateway's tables."""
