"""The embedded engine, speaking vLLM's HTTP API, and the client for both."""
