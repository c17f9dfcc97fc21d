"""Which replicas the weight updater lets take calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0002"
down_revision = "gateway_0001"


def upgrade() -> None:
    op.create_table(
        "gateway_replicas",
        sa.Column("url", sa.String, primary_key=True),
        sa.Column("accepting", sa.Boolean, nullable=False),
    )
