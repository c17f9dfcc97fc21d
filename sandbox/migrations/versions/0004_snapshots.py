"""Snapshots, and the keys of what was done to a sandbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("calls", sa.Text, nullable=False, server_default="{}"))
    op.create_table(
        "sandbox_snapshots",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("sandbox", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("deadline", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
    )
