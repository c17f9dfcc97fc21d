"""The durable buffer as the trainer sees it: take, commit, rewind, and the published versions.

Implements `protocols.SampleSource` over rollout.db; runs in the trainer's process, while the rollout process
writes to the same tables. Invariant: a group is claimed by at most one step that was not given back, which
the database itself enforces, and every accepted sample is trained, waits, or was dropped with its lag and length.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.errors import RolloutError
from agentrl.core.protocols import Batch
from agentrl.core.types import Episode, Group, Task
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.tables import (
    PRUNED,
    ClaimState,
    DropReason,
    EpisodeState,
    GroupState,
    claims,
    episodes,
    groups,
    samples,
    steps,
    unpack,
    versions,
)

log = logging.getLogger(__name__)

POLL_S = 0.05


class Buffer:
    """See `protocols.SampleSource`."""

    def __init__(self, database: Database, *, staleness: Staleness, min_scored: int) -> None:
        self._database = database
        self._staleness = staleness
        self._min_scored = min_scored

    async def take(self, step: int, *, version: int, groups: int) -> Batch:
        """Wait for `groups` groups that are young enough for `version`, and claim the oldest for `step`.

        Taking a step again gives back what a crashed attempt at it, or at a later step, had claimed.
        """
        await self._give_back(step)
        while True:
            if await self._ready() >= groups:
                claimed = await self._claim(step, version, groups)
                if claimed:
                    return await self._batch(step, claimed)
            await asyncio.sleep(POLL_S)

    async def commit(self, step: int, *, version: int, checkpoint: str) -> None:
        """Make the open claims of every step up to `step` final; `version` is the policy in the checkpoint.

        Repeating a commit changes nothing.
        """

        async def work(connection: AsyncConnection) -> None:
            standing = (claims.c.step <= step, claims.c.state == ClaimState.OPEN)
            pending = set((await connection.execute(select(claims.c.step).where(*standing))).scalars())
            if step not in pending:
                known = await connection.scalar(select(steps.c.checkpoint).where(steps.c.step == step))
                if known == checkpoint:
                    return
                raise RolloutError(
                    f"commit of step {step} with checkpoint {checkpoint!r}: no group is claimed for it "
                    f"(stored checkpoint: {known!r}); take the step before it is committed"
                )
            now = time.time()
            rows = [
                {"step": one, "version": version, "checkpoint": checkpoint, "committed_at": now}
                for one in sorted(pending)
            ]
            await connection.execute(insert(steps), rows)
            mine = select(claims.c.group_id).where(*standing)
            await connection.execute(update(groups).where(groups.c.id.in_(mine)).values(state=GroupState.TRAINED))
            await connection.execute(update(claims).where(*standing).values(state=ClaimState.FINAL))

        await self._database.write(work)

    async def rewind(self, step: int) -> None:
        """Give back every claim of a step after `step`, committed or not, and forget those steps."""
        await self._give_back(step + 1)

    async def publish_version(self, version: int, *, step: int, path: str) -> None:
        """Record a version once; recording it again with other weights is refused."""

        async def work(connection: AsyncConnection) -> None:
            query = select(versions.c.step, versions.c.path).where(versions.c.version == version)
            known = (await connection.execute(query)).one_or_none()
            if known is not None and tuple(known) != (step, path):
                raise RolloutError(
                    f"version {version} is already {known.path} of step {known.step}, not {path} of step {step}: "
                    "publish under a new number"
                )
            if known is None:
                row = {"version": version, "step": step, "path": path, "published_at": time.time()}
                await connection.execute(insert(versions), [row])

        await self._database.write(work)

    async def latest_version(self) -> int:
        async with self._database.read() as connection:
            newest = await connection.scalar(select(func.max(versions.c.version)))
        return -1 if newest is None else int(newest)

    async def _ready(self) -> int:
        async with self._database.read() as connection:
            query = select(func.count()).where(groups.c.state == GroupState.READY)
            return await connection.scalar(query) or 0

    async def _give_back(self, first: int) -> None:
        async def work(connection: AsyncConnection) -> int:
            where = (claims.c.step >= first, claims.c.state != ClaimState.VOID)
            mine = select(claims.c.group_id).where(*where)
            empty = select(episodes.c.group_id).where(episodes.c.group_id.in_(mine), episodes.c.payload == PRUNED)
            gone = {"state": GroupState.DROPPED, "reason": DropReason.PRUNED}
            lost = await connection.execute(update(groups).where(groups.c.id.in_(empty)).values(gone))
            if lost.rowcount:
                log.warning("%d groups since step %d cannot be trained again: their tokens are no longer kept "
                            "(rollout.keep_steps)", lost.rowcount, first)  # fmt: skip
            whole = (groups.c.id.in_(mine), groups.c.id.not_in(empty))
            back = await connection.execute(update(groups).where(*whole).values(state=GroupState.READY))
            await connection.execute(update(claims).where(*where).values(state=ClaimState.VOID))
            await connection.execute(steps.delete().where(steps.c.step >= first))
            return back.rowcount

        returned = await self._database.write(work)
        if returned:
            log.warning("gave back %d groups that step %d or later had claimed", returned, first)

    async def _claim(self, step: int, version: int, wanted: int) -> tuple[str, ...]:
        """Sweep, then claim the `wanted` oldest ready groups; () when too few are left after the sweep."""

        async def work(connection: AsyncConnection) -> tuple[str, ...]:
            query = select(groups.c.id).where(groups.c.state == GroupState.READY)
            ordered = query.order_by(groups.c.seq).with_for_update()
            ready: Sequence[str] = (await connection.execute(ordered)).scalars().all()
            dropped = await self._sweep(connection, ready, step, version)
            chosen = tuple(id_ for id_ in ready if id_ not in dropped)[:wanted]
            if len(chosen) < wanted:
                return ()
            now = time.time()
            rows = [
                {"group_id": id_, "step": step, "version": version, "state": ClaimState.OPEN, "claimed_at": now}
                for id_ in chosen
            ]
            await connection.execute(insert(claims), rows)
            await connection.execute(update(groups).where(groups.c.id.in_(chosen)).values(state=GroupState.CLAIMED))
            return chosen

        return await self._database.write(work)

    async def _sweep(self, connection: AsyncConnection, ready: Sequence[str], step: int, version: int) -> set[str]:
        """Take out the samples that are too old; groups left with too few scored episodes are dropped."""
        oldest = version - self._staleness.limit
        old = (samples.c.group_id.in_(ready), samples.c.swept_step.is_(None), samples.c.min_version < oldest)
        touched = set((await connection.execute(select(samples.c.group_id).where(*old))).scalars().all())
        if not touched:
            return set()
        await connection.execute(
            update(samples).where(*old).values(swept_step=step, swept_lag=version - samples.c.min_version)
        )
        live = (
            select(samples.c.group_id, func.count(samples.c.episode_id.distinct()).label("left"))
            .where(samples.c.group_id.in_(touched), samples.c.swept_step.is_(None))
            .group_by(samples.c.group_id)
        )
        scored = {row.group_id: row.left for row in await connection.execute(live)}
        dropped = {id_ for id_ in touched if scored.get(id_, 0) < self._min_scored}
        values = {"state": GroupState.DROPPED, "reason": DropReason.STALE, "ended_version": version}
        await connection.execute(update(groups).where(groups.c.id.in_(dropped)).values(values))
        log.info("step %d at version %d: %d groups held stale samples, %d dropped", step, version, len(touched),
                 len(dropped))  # fmt: skip
        return dropped

    async def _batch(self, step: int, claimed: Sequence[str]) -> Batch:
        live = select(samples.c.episode_id, samples.c.trajectory_id).where(
            samples.c.group_id.in_(claimed), samples.c.swept_step.is_(None)
        )
        payloads = (
            select(episodes.c.id, episodes.c.group_id, episodes.c.payload)
            .where(episodes.c.group_id.in_(claimed), episodes.c.state == EpisodeState.ACCEPTED)
            .order_by(episodes.c.slot)
        )
        heads = select(groups.c.id, groups.c.task, groups.c.size).where(groups.c.id.in_(claimed))
        swept = select(func.count()).where(samples.c.swept_step == step)
        async with self._database.read() as connection:
            kept: dict[str, set[str]] = {}
            for episode_id, trajectory_id in await connection.execute(live):
                kept.setdefault(episode_id, set()).add(trajectory_id)
            blobs = (await connection.execute(payloads)).all()
            found = (await connection.execute(heads.order_by(groups.c.seq))).all()
            dropped = await connection.scalar(swept) or 0
        by_group: dict[str, list[Episode]] = {id_: [] for id_ in claimed}
        for episode_id, group_id, blob in blobs:
            episode = _living(Episode.model_validate_json(unpack(blob)), kept.get(episode_id, set()))
            if episode.trajectories:
                by_group[group_id].append(episode)
        batch = tuple(
            Group(id=id_, task=Task.model_validate_json(unpack(task)), size=size, episodes=tuple(by_group[id_]))
            for id_, task, size in found
        )
        return Batch(step=step, groups=batch, dropped_samples=dropped)


def _living(episode: Episode, kept: set[str]) -> Episode:
    """The episode with only the trajectories that have trained tokens and passed the sweep."""
    living = tuple(trajectory for trajectory in episode.trajectories if trajectory.id in kept)
    if len(living) == len(episode.trajectories):
        return episode
    return episode.model_copy(update={"trajectories": living})
