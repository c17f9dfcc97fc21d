"""The tables of rollout.db. Used by the store, the buffer, the audit and the evaluation, and by nobody else.

Names carry the room's prefix, since rooms may share one database. Migrations create what is described here,
which a test compares. Invariant: a group has at most one claim that is not void.
"""

from __future__ import annotations

import zlib
from enum import StrEnum

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy import UniqueConstraint as Unique

from agentrl.core.types import Value

metadata = MetaData()


class GroupState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a group never trains."""

    TOO_FEW_SCORED = "too_few_scored"
    FLAT = "flat"
    STALE = "stale"
    PRUNED = "pruned"
    """Given back by a resume from a checkpoint so old that its tokens were no longer kept."""


class EpisodeState(StrEnum):
    RUNNING = "running"
    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"
    FAILED = "failed"


class ClaimState(StrEnum):
    OPEN = "open"
    """The trainer works on it, or died while it did."""
    FINAL = "final"
    """A committed step contains it."""
    VOID = "void"
    """Given back by a rewind."""


INTERRUPTED = "INTERRUPTED"
"""Failure code of an episode that was running when the rollout process died."""

PRUNED = b""
"""Payload of an episode whose retention is over; NULL is that of one that has not ended, or was interrupted."""

groups = Table(
    "rollout_groups",
    metadata,
    Column("id", String, primary_key=True),
    Column("seq", Integer, nullable=False, unique=True),
    Column("size", Integer, nullable=False),
    Column("task", LargeBinary, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("reason", String, nullable=False, server_default=""),
    Column("issued_version", Integer, nullable=False),
    Column("ended_version", Integer),
    Column("issued_at", Float, nullable=False),
    Column("ended_at", Float),
)

episodes = Table(
    "rollout_episodes",
    metadata,
    Column("id", String, primary_key=True),
    Column("group_id", ForeignKey("rollout_groups.id"), nullable=False, index=True),
    Column("slot", Integer, nullable=False),
    Column("issue", Integer, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("reason", String, nullable=False, server_default=""),
    Column("detail", Text, nullable=False, server_default=""),
    Column("blame", String, nullable=False, server_default=""),
    Column("reward", Float),
    Column("turns", Integer),
    Column("tokens", Integer),
    Column("total_s", Float),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("payload", LargeBinary),
    Unique("group_id", "slot", "issue"),
)

samples = Table(
    "rollout_samples",
    metadata,
    Column("episode_id", ForeignKey("rollout_episodes.id"), primary_key=True),
    Column("trajectory_id", String, primary_key=True),
    Column("group_id", ForeignKey("rollout_groups.id"), nullable=False, index=True),
    Column("tokens", Integer, nullable=False),
    Column("trained_tokens", Integer, nullable=False),
    Column("min_version", Integer, nullable=False),
    Column("max_version", Integer, nullable=False),
    Column("swept_step", Integer),
    Column("swept_lag", Integer),
)

claims = Table(
    "rollout_claims",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("group_id", ForeignKey("rollout_groups.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("claimed_at", Float, nullable=False),
)
Index(
    "rollout_claims_one",
    claims.c.group_id,
    unique=True,
    sqlite_where=claims.c.state != ClaimState.VOID.value,
    postgresql_where=claims.c.state != ClaimState.VOID.value,
)

steps = Table(
    "rollout_steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("checkpoint", String, nullable=False),
    Column("committed_at", Float, nullable=False),
)

versions = Table(
    "rollout_versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("path", String, nullable=False),
    Column("published_at", Float, nullable=False),
)

cursors = Table(
    "rollout_cursors",
    metadata,
    Column("name", String, primary_key=True),
    Column("position", Integer, nullable=False),
)

identity = Table("rollout_identity", metadata, Column("id", String, primary_key=True))
"""One row: a random name, by which the run's sandboxes are told from those of a run with the same name."""

evaluations = Table(
    "rollout_evaluations",
    metadata,
    Column("id", String, primary_key=True),
    Column("label", String, nullable=False),
    Column("slot", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False, server_default=""),
    Column("blame", String, nullable=False, server_default=""),
    Column("reward", Float),
    Column("payload", LargeBinary, nullable=False),
    Unique("label", "slot"),
)


def pack(value: Value) -> bytes:
    """JSON, deflated: token arrays shrink about fourfold."""
    return zlib.compress(value.model_dump_json().encode(), 1)


def unpack(blob: bytes) -> bytes:
    """The JSON of a packed value."""
    return zlib.decompress(blob)
