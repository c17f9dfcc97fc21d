"""When a session's time is over, from which on its rows are kept for a while only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0003"
down_revision = "gateway_0002"

DAY_S = 86_400
"""Given to sessions that were opened before."""


def upgrade() -> None:
    op.add_column("gateway_sessions", sa.Column("ends_at", sa.Float, nullable=False, server_default="0"))
    op.execute(f"UPDATE gateway_sessions SET ends_at = opened_at + {DAY_S}")
    op.create_index("ix_gateway_sessions_ends_at", "gateway_sessions", ["ends_at"])
