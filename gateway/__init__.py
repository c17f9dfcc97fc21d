"""The OpenAI-compatible gateway that records trajectories."""
