"""Sessions, calls and what the weight updater said of replicas, on disk. Called by `sessions`, `session` and `app`.

Invariant: a call's row is written once and deleted with its session, of which only `sealed` and `flushed` ever
change; what is read back equals what was written, token for token. The token arrays are little-endian bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database, open_database
from agentrl.core.errors import NotFound
from agentrl.core.types import Message, Provenance, SessionRequest, Value, VersionRun
from gateway.tree import Branch, Delivery, Node, Tree

PURGED_AT_ONCE = 100
"""Sessions that one transaction deletes, so that calls wait little for it."""

metadata = MetaData()
sessions = Table(
    "gateway_sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("key", String, nullable=False, unique=True),
    Column("request", Text, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("sealed", Boolean, nullable=False),
    Column("flushed", Text, nullable=False),
    Column("ends_at", Float, nullable=False, server_default="0", index=True),
)
nodes = Table(
    "gateway_nodes",
    metadata,
    Column("session_id", String, ForeignKey("gateway_sessions.id"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("parent", Integer),
    Column("follows", Integer),
    Column("turn", Integer, nullable=False),
    Column("root_key", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("idempotency_key", String, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("branch", String),
    Column("cached_tokens", Integer, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("prompt_delta", LargeBinary, nullable=False),
    Column("sampled", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
)
replicas = Table(
    "gateway_replicas",
    metadata,
    Column("url", String, primary_key=True),
    Column("accepting", Boolean, nullable=False),
)


class NodeRecord(Value):
    """The structured part of a call's row."""

    messages: tuple[Message, ...]
    reply: Message
    versions: tuple[VersionRun, ...]
    provenance: Provenance
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class StoredSession:
    id: str
    key: str
    request: SessionRequest
    opened_at: float
    """Unix seconds."""
    sealed: bool

    @property
    def ends_at(self) -> float:
        """Unix seconds from which on it takes no calls, sealed or not."""
        return self.opened_at + self.request.limits.wall_s


async def open_store(url: str) -> Database:
    """The gateway's database, migrated."""
    return await open_database(url, room="gateway", migrations=Path(__file__).parent / "migrations")


class SessionStore:
    """Reads and writes of one gateway."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_session(self, session: StoredSession) -> bool:
        """Durable on return. False when a session of this id exists already."""
        row = {
            "id": session.id, "key": session.key, "request": session.request.model_dump_json(),
            "opened_at": session.opened_at, "sealed": session.sealed, "flushed": "", "ends_at": session.ends_at,
        }  # fmt: skip

        try:
            await self._database.insert(sessions, row)
        except IntegrityError:
            return False
        return True

    async def find_session(self, *, session_id: str | None = None, key: str | None = None) -> StoredSession | None:
        where = sessions.c.id == session_id if session_id is not None else sessions.c.key == key
        async with self._database.read() as connection:
            row = (await connection.execute(select(sessions).where(where))).one_or_none()
        if row is None:
            return None
        request = SessionRequest.model_validate_json(row.request)
        return StoredSession(row.id, row.key, request, row.opened_at, row.sealed)

    async def add_node(self, session_id: str, node: Node) -> None:
        """Durable on return."""
        await self._database.insert(nodes, _row(session_id, node))

    async def seal(self, session_id: str, flushed: Sequence[int]) -> None:
        """No more calls. `flushed` are the calls whose answers were handed over and not acknowledged since."""
        values = {"sealed": True, "flushed": " ".join(map(str, flushed))}
        statement = update(sessions).where(sessions.c.id == session_id).values(values)

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement)

        await self._database.write(work)

    async def purge(self, before: float) -> tuple[str, ...]:
        """Delete some sessions that ended before that time, with their calls; returns their ids, () at the end."""
        ended = (
            select(sessions.c.id).where(sessions.c.ends_at < before).order_by(sessions.c.ends_at).limit(PURGED_AT_ONCE)
        )

        async def work(connection: AsyncConnection) -> tuple[str, ...]:
            ids = tuple((await connection.execute(ended)).scalars())
            await connection.execute(delete(nodes).where(nodes.c.session_id.in_(ids)))
            await connection.execute(delete(sessions).where(sessions.c.id.in_(ids)))
            return ids

        return await self._database.write(work)

    async def set_accepting(self, url: str, accepting: bool) -> None:
        """Durable on return, so that the next process sends no calls where this one was told not to."""
        values = {"accepting": accepting}

        async def work(connection: AsyncConnection) -> None:
            known = await connection.execute(update(replicas).where(replicas.c.url == url).values(values))
            if known.rowcount == 0:
                await connection.execute(insert(replicas), [{"url": url, **values}])

        await self._database.write(work)

    async def held_back(self) -> frozenset[str]:
        """URLs of the replicas that may take no calls until the weight updater lets them."""
        async with self._database.read() as connection:
            found = await connection.execute(select(replicas.c.url).where(~replicas.c.accepting))
            return frozenset(found.scalars())

    async def load_tree(self, session_id: str) -> Tree:
        query = select(nodes).where(nodes.c.session_id == session_id).order_by(nodes.c.seq)
        delivered = select(sessions.c.flushed).where(sessions.c.id == session_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            flushed = (await connection.execute(delivered)).scalar_one_or_none()
        if flushed is None:
            raise NotFound(f"no session {session_id!r}: its retention is over")
        tree = Tree()
        for row in rows:
            tree.add(_node(row, None if row.parent is None else tree.nodes[row.parent]))
        for seq in map(int, flushed.split()):
            tree.nodes[seq].delivery = Delivery.FLUSHED
        return tree


def _row(session_id: str, node: Node) -> dict[str, Any]:
    record = NodeRecord(
        messages=node.messages,
        reply=node.reply,
        versions=node.versions,
        provenance=node.provenance,
        constrained=node.constrained,
    ).model_dump_json()
    return {
        "session_id": session_id, "seq": node.seq, "parent": node.parent.seq if node.parent else None,
        "follows": node.follows, "turn": node.turn, "root_key": node.root_key, "digest": node.digest,
        "idempotency_key": node.idempotency_key, "finish_reason": node.finish_reason,
        "branch": node.branch.value if node.branch else None,
        "cached_tokens": node.cached_tokens, "record": record.encode(), "prompt_delta": _pack("i", node.prompt_delta),
        "sampled": _pack("i", node.sampled), "logprobs": _pack("d", node.logprobs),
    }  # fmt: skip


def _node(row: Any, parent: Node | None) -> Node:
    record = NodeRecord.model_validate_json(row.record)
    return Node(
        seq=row.seq, parent=parent, follows=row.follows, turn=row.turn, root_key=row.root_key,
        messages=record.messages, reply=record.reply, versions=record.versions, provenance=record.provenance,
        prompt_delta=tuple(_unpack("i", row.prompt_delta)), sampled=tuple(_unpack("i", row.sampled)),
        logprobs=tuple(_unpack("d", row.logprobs)), finish_reason=row.finish_reason,
        branch=Branch(row.branch) if row.branch else None, digest=row.digest, idempotency_key=row.idempotency_key,
        cached_tokens=row.cached_tokens, constrained=record.constrained,
    )  # fmt: skip


def _pack(kind: str, values: Sequence[int] | Sequence[float]) -> bytes:
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(kind: str, data: bytes) -> Any:
    packed = array(kind)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
