"""Alembic revisions of the rollout room's tables."""
