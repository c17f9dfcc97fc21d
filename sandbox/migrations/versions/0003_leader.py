"""Which of several controllers leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "sandbox_leader",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("term", sa.Integer, nullable=False),
        sa.Column("until", sa.Float, nullable=False),
    )
