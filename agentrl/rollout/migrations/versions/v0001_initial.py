"""The first tables: groups, episodes, samples, claims, steps, versions, cursors, identity, evaluations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "rollout_0001"
down_revision = None


def upgrade() -> None:
    _groups_and_episodes()
    _claims_and_steps()
    op.create_table(
        "rollout_cursors",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
    )
    op.create_table("rollout_identity", sa.Column("id", sa.String, primary_key=True))
    op.create_table(
        "rollout_evaluations",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("label", sa.String, nullable=False),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False, server_default=""),
        sa.Column("blame", sa.String, nullable=False, server_default=""),
        sa.Column("reward", sa.Float),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("label", "slot"),
    )


def _groups_and_episodes() -> None:
    op.create_table(
        "rollout_groups",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("seq", sa.Integer, nullable=False, unique=True),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("task", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("reason", sa.String, nullable=False, server_default=""),
        sa.Column("issued_version", sa.Integer, nullable=False),
        sa.Column("ended_version", sa.Integer),
        sa.Column("issued_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
    )
    op.create_table(
        "rollout_episodes",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("group_id", sa.String, sa.ForeignKey("rollout_groups.id"), nullable=False, index=True),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("reason", sa.String, nullable=False, server_default=""),
        sa.Column("detail", sa.Text, nullable=False, server_default=""),
        sa.Column("blame", sa.String, nullable=False, server_default=""),
        sa.Column("reward", sa.Float),
        sa.Column("turns", sa.Integer),
        sa.Column("tokens", sa.Integer),
        sa.Column("total_s", sa.Float),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("payload", sa.LargeBinary),
        sa.UniqueConstraint("group_id", "slot", "issue"),
    )
    op.create_table(
        "rollout_samples",
        sa.Column("episode_id", sa.String, sa.ForeignKey("rollout_episodes.id"), primary_key=True),
        sa.Column("trajectory_id", sa.String, primary_key=True),
        sa.Column("group_id", sa.String, sa.ForeignKey("rollout_groups.id"), nullable=False, index=True),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("trained_tokens", sa.Integer, nullable=False),
        sa.Column("min_version", sa.Integer, nullable=False),
        sa.Column("max_version", sa.Integer, nullable=False),
        sa.Column("swept_step", sa.Integer),
        sa.Column("swept_lag", sa.Integer),
    )


def _claims_and_steps() -> None:
    op.create_table(
        "rollout_claims",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("group_id", sa.String, sa.ForeignKey("rollout_groups.id"), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("claimed_at", sa.Float, nullable=False),
    )
    live = sa.text("state != 'void'")
    op.create_index(
        "rollout_claims_one", "rollout_claims", ["group_id"], unique=True, sqlite_where=live, postgresql_where=live
    )
    op.create_table(
        "rollout_steps",
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.String, nullable=False),
        sa.Column("committed_at", sa.Float, nullable=False),
    )
    op.create_table(
        "rollout_versions",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("path", sa.String, nullable=False),
        sa.Column("published_at", sa.Float, nullable=False),
    )
