"""The sandboxes table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("deadline", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.UniqueConstraint("owner", "key"),
    )
    op.create_index("sandboxes_ended_at", "sandboxes", ["ended_at"])
