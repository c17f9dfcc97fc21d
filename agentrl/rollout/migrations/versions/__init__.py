"""One module a revision; `agentrl.core.db.open_database` applies them in order."""
