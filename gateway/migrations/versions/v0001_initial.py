"""The first tables: sessions and their calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "gateway_sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("key", sa.String, nullable=False, unique=True),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("opened_at", sa.Float, nullable=False),
        sa.Column("sealed", sa.Boolean, nullable=False),
        sa.Column("flushed", sa.Text, nullable=False),
    )
    op.create_table(
        "gateway_nodes",
        sa.Column("session_id", sa.String, sa.ForeignKey("gateway_sessions.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer),
        sa.Column("follows", sa.Integer),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("root_key", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("idempotency_key", sa.String, nullable=False),
        sa.Column("finish_reason", sa.String, nullable=False),
        sa.Column("branch", sa.String),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("prompt_delta", sa.LargeBinary, nullable=False),
        sa.Column("sampled", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
    )
