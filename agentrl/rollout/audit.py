"""Proves from the store that nothing accepted was lost or trained twice. Called by `agentrl runs check` and by tests.

It reads only, and may run beside a live run. Invariant: it recomputes every promise from rows and payloads,
and trusts no counter; a report without findings is the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database
from agentrl.core.types import Episode, Failed, Scored
from agentrl.rollout.acceptance import judge, trained_tokens
from agentrl.rollout.tables import (
    INTERRUPTED,
    PRUNED,
    ClaimState,
    EpisodeState,
    GroupState,
    claims,
    cursors,
    episodes,
    groups,
    samples,
    steps,
    unpack,
)

Rows = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise."""

    promise: str
    where: str
    """The group, episode or step."""
    detail: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    groups: Mapping[str, int]
    """Groups by state; dropped ones as `dropped/reason`."""
    episodes: Mapping[str, int]
    """Episodes by state."""
    steps: int
    """Committed steps."""
    trained_samples: int
    swept_samples: int
    swept_tokens: int
    """Tokens of the samples that were dropped for their lag."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Tables:
    """One consistent reading of the store, without payloads."""

    groups: Rows
    episodes: Rows
    samples: Rows
    claims: Rows
    steps: Rows
    cursor: int


async def audit(database: Database) -> AuditReport:
    """Check the whole store."""
    async with database.read() as connection:
        tables = await _read(connection)
        findings = [*_counted(tables), *_claimed_once(tables), *_states_agree(tables), *_slots(tables)]
        findings += await _payloads(connection, tables)
    states = Counter(f"dropped/{g.reason}" if g.state == GroupState.DROPPED else g.state for g in tables.groups)
    trained = {g.id for g in tables.groups if g.state == GroupState.TRAINED}
    swept = [sample for sample in tables.samples if sample.swept_step is not None]
    return AuditReport(
        groups=dict(states),
        episodes=dict(Counter(episode.state for episode in tables.episodes)),
        steps=len(tables.steps),
        trained_samples=sum(s.group_id in trained and s.swept_step is None for s in tables.samples),
        swept_samples=len(swept),
        swept_tokens=sum(sample.tokens for sample in swept),
        findings=tuple(findings),
    )


async def _read(connection: AsyncConnection) -> _Tables:
    light = [column for column in episodes.c if column is not episodes.c.payload]
    heads = select(groups.c.id, groups.c.seq, groups.c.size, groups.c.state, groups.c.reason)
    attempts = select(*light).order_by(episodes.c.group_id, episodes.c.slot, episodes.c.issue)
    return _Tables(
        groups=(await connection.execute(heads.order_by(groups.c.seq))).all(),
        episodes=(await connection.execute(attempts)).all(),
        samples=(await connection.execute(select(samples))).all(),
        claims=(await connection.execute(select(claims).order_by(claims.c.id))).all(),
        steps=(await connection.execute(select(steps).order_by(steps.c.step))).all(),
        cursor=await connection.scalar(select(cursors.c.position)) or 0,
    )


def _counted(tables: _Tables) -> Iterator[Finding]:
    """Every task that was drawn is a group, and every step follows the one before it."""
    numbers = [group.seq for group in tables.groups]
    if numbers != list(range(1, tables.cursor + 1)):
        detail = f"the cursor is at {tables.cursor}, but the groups are numbered {numbers[:3]}..{numbers[-3:]}"
        yield Finding("every task drawn is a group", "cursor", detail)
    for before, after in zip(tables.steps, tables.steps[1:], strict=False):
        if after.step != before.step + 1:
            yield Finding("steps have no hole", f"step {after.step}", f"the step before it is {before.step}")
    for step in tables.steps:
        if not step.checkpoint:
            yield Finding("a step names its checkpoint", f"step {step.step}", "no checkpoint")


def _claimed_once(tables: _Tables) -> Iterator[Finding]:
    """At most one claim of a group stands, and it is final exactly when its step is committed."""
    committed = {step.step for step in tables.steps}
    standing = [claim for claim in tables.claims if claim.state != ClaimState.VOID]
    for group_id, count in Counter(claim.group_id for claim in standing).items():
        if count > 1:
            yield Finding("a group trains once", group_id, f"{count} claims stand")
    for claim in standing:
        if (claim.state == ClaimState.FINAL) != (claim.step in committed):
            detail = (
                f"claim {claim.id} is {claim.state}, the step is {'' if claim.step in committed else 'not '}committed"
            )
            yield Finding("claims follow their step", f"step {claim.step}", detail)
    for step in committed - {claim.step for claim in standing}:
        yield Finding("a committed step has groups", f"step {step}", "no claim stands")
    sessions = Counter(sample.trajectory_id for sample in tables.samples)
    for trajectory_id, count in sessions.items():
        if count > 1:
            yield Finding("a trajectory is one sample", trajectory_id, f"it is a sample of {count} episodes")


def _states_agree(tables: _Tables) -> Iterator[Finding]:
    """A group's state says what its claims say, and a dropped one says why."""
    standing = {claim.group_id: claim.state for claim in tables.claims if claim.state != ClaimState.VOID}
    expected = {GroupState.CLAIMED: ClaimState.OPEN, GroupState.TRAINED: ClaimState.FINAL}
    for group in tables.groups:
        claim = standing.get(group.id)
        if claim != expected.get(group.state):
            yield Finding("states agree with claims", group.id, f"state {group.state}, standing claim {claim}")
        if (group.state == GroupState.DROPPED) != bool(group.reason):
            yield Finding("a dropped group says why", group.id, f"state {group.state}, reason {group.reason!r}")


def _slots(tables: _Tables) -> Iterator[Finding]:
    """Each slot of an ended group has ended, and was accepted at most once; only accepted episodes have rewards."""
    sizes = {group.id: group.size for group in tables.groups}
    ended = {group.id for group in tables.groups if group.state != GroupState.RUNNING}
    accepted = Counter((e.group_id, e.slot) for e in tables.episodes if e.state == EpisodeState.ACCEPTED)
    for (group_id, slot), count in accepted.items():
        if count > 1:
            yield Finding("a slot is accepted once", group_id, f"slot {slot} has {count} accepted episodes")
    baseline = Counter(group_id for group_id, _ in accepted)
    for group in tables.groups:
        if group.state in (GroupState.READY, GroupState.CLAIMED, GroupState.TRAINED) and baseline[group.id] < 2:
            yield Finding("a group that trains has a baseline", group.id, f"{baseline[group.id]} accepted episodes")
    seen: dict[str, set[int]] = {}
    for episode in tables.episodes:
        seen.setdefault(episode.group_id, set()).add(episode.slot)
        if episode.state == EpisodeState.RUNNING and episode.group_id in ended:
            yield Finding("an ended group has no running episode", episode.id, f"in group {episode.group_id}")
        if (episode.state == EpisodeState.ACCEPTED) != (episode.reward is not None):
            yield Finding("only the accepted have a reward", episode.id, f"{episode.state}, reward {episode.reward}")
    for group_id, size in sizes.items():
        if seen.get(group_id, set()) != set(range(size)):
            yield Finding("no slot is lost", group_id, f"slots {sorted(seen.get(group_id, set()))} of {size}")


async def _payloads(connection: AsyncConnection, tables: _Tables) -> list[Finding]:
    """Judge every stored episode again, and compare its samples with its trajectories."""
    rows = {episode.id: episode for episode in tables.episodes}
    stored: dict[str, dict[str, Row[Any]]] = {}
    for sample in tables.samples:
        stored.setdefault(sample.episode_id, {})[sample.trajectory_id] = sample
    states = {group.id: group.state for group in tables.groups}
    findings: list[Finding] = []
    wanted = (EpisodeState.ACCEPTED, EpisodeState.FAILED)
    query = select(episodes.c.id, episodes.c.payload).where(episodes.c.state.in_(wanted))
    async for episode_id, blob in await connection.stream(query):
        row = rows.get(episode_id)
        if row is None or row.reason == INTERRUPTED:
            continue
        if blob == PRUNED:
            findings += _pruned(row, states[row.group_id], stored.get(episode_id, {}))
            continue
        if blob is None:
            findings.append(Finding("nothing accepted is lost", episode_id, "it has no payload"))
            continue
        try:
            episode = Episode.model_validate_json(unpack(blob))
        except ValidationError as error:
            findings.append(Finding("nothing accepted is lost", episode_id, f"its payload does not parse: {error}"))
            continue
        findings += _payload(episode, row, stored.get(episode_id, {}))
    return findings


def _pruned(row: Row[Any], state: str, rows: Mapping[str, Row[Any]]) -> Iterator[Finding]:
    """What can still be said of an episode whose retention is over."""
    if state not in (GroupState.TRAINED, GroupState.DROPPED):
        yield Finding("nothing accepted is lost", row.id, f"its payload is pruned, but its group is {state}")
    if row.state == EpisodeState.ACCEPTED and not rows:
        yield Finding("nothing accepted is lost", row.id, "it has no sample")


def _payload(episode: Episode, row: Row[Any], rows: Mapping[str, Row[Any]]) -> Iterator[Finding]:
    verdict = judge(episode)
    if verdict.state != row.state:
        yield Finding("the judgement stands", episode.id, f"stored as {row.state}, judged {verdict.state}")
    if isinstance(episode.outcome, Failed) and rows:
        yield Finding("no failure is a sample", episode.id, f"{episode.outcome.code}, {len(rows)} samples")
    if row.state != EpisodeState.ACCEPTED:
        return
    if not isinstance(episode.outcome, Scored) or episode.outcome.reward != row.reward:
        yield Finding("the reward is the verifier's", episode.id, f"stored {row.reward}, outcome {episode.outcome!r}")
    expected = {t.id: trained_tokens(t) for t in episode.trajectories if trained_tokens(t)}
    found = {id_: sample.trained_tokens for id_, sample in rows.items()}
    if expected != found:
        yield Finding("nothing accepted is lost", episode.id, f"trajectories {expected}, samples {found}")
