"""The agentrl command."""
