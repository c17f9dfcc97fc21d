"""The event feed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "sandbox_events",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("sandbox", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
    )
