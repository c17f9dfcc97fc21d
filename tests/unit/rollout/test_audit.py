"""The audit finds every way in which a store could break its promises. Each test breaks one by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, text, update
from sqlalchemy.sql import Executable

from agentrl.core.db import Database, sqlite_url
from agentrl.core.types import Failed, Scored
from agentrl.rollout.audit import AuditReport, audit
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.tables import claims, cursors, episodes, groups, pack, samples, steps
from agentrl.testing.episodes import scripted_episode


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """SQLite alone: the audit only reads, by statements that the store's tests run on Postgres too."""
    return sqlite_url(tmp_path / "store.db")


@pytest.fixture
async def trained(database: Database, buffer: Buffer, filler: Any) -> Database:
    """Two trained groups, one ready, one with a failed attempt still running: nothing to find."""
    for group_id in ("g1", "g2", "g3"):
        await filler.ready(group_id)
    await filler.issue("g4", size=3)
    await filler.finish("g4-0", group_id="g4", index=0, outcome=Failed(code="REWARD"), versions=(0,))
    await buffer.take(1, version=0, groups=2)
    await buffer.commit(1, version=0, checkpoint="c1")
    report = await audit(database)
    assert report.ok, report.findings
    return database


async def _after(database: Database, *broken: Executable) -> AuditReport:
    async with database.engine.begin() as connection:
        for statement in broken:
            await connection.execute(statement)
    return await audit(database)


CLAIM = {"step": 1, "version": 0, "claimed_at": 0.0}


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        ([delete(samples).where(samples.c.group_id == "g3")], "nothing accepted is lost"),
        ([update(episodes).where(episodes.c.id == "g1-0").values(payload=None)], "nothing accepted is lost"),
        (
            [text("DROP INDEX rollout_claims_one"), insert(claims).values(group_id="g1", state="final", **CLAIM)],
            "a group trains once",
        ),
        ([delete(steps)], "claims follow their step"),
        ([update(claims).values(state="open")], "claims follow their step"),
        ([insert(steps).values(step=2, version=1, checkpoint="c2", committed_at=0.0)], "a committed step has groups"),
        ([insert(steps).values(step=3, version=1, checkpoint="c3", committed_at=0.0)], "steps have no hole"),
        ([update(steps).values(checkpoint="")], "a step names its checkpoint"),
        ([update(groups).where(groups.c.id == "g1").values(state="ready")], "states agree with claims"),
        ([update(groups).where(groups.c.id == "g3").values(state="claimed")], "states agree with claims"),
        ([update(groups).where(groups.c.id == "g3").values(state="dropped")], "a dropped group says why"),
        ([update(cursors).values(position=9)], "every task drawn is a group"),
        ([delete(episodes).where(episodes.c.id == "g4-2")], "no slot is lost"),
        ([update(groups).where(groups.c.id == "g4").values(state="ready")], "an ended group has no running episode"),
        ([update(groups).where(groups.c.id == "g4").values(state="ready")], "a group that trains has a baseline"),
        ([update(episodes).where(episodes.c.id == "g4-0").values(reward=0.0)], "only the accepted have a reward"),
        ([update(episodes).where(episodes.c.id == "g1-0").values(reward=0.5)], "the reward is the verifier's"),
        ([update(episodes).where(episodes.c.id == "g4-0").values(state="accepted")], "the judgement stands"),
        ([update(episodes).where(episodes.c.id == "g1-1").values(slot=0, issue=1)], "a slot is accepted once"),
    ],
)
async def test_a_broken_promise_is_found(trained: Database, broken: list[Executable], promise: str) -> None:
    report = await _after(trained, *broken)
    assert promise in {finding.promise for finding in report.findings}


async def test_a_failed_scoring_that_became_a_sample_is_found(trained: Database) -> None:
    """The promise that matters most: no path by which a failure becomes a number."""
    failed = scripted_episode("g1-0", group_id="g1", outcome=Failed(code="REWARD"))
    report = await _after(trained, update(episodes).where(episodes.c.id == "g1-0").values(payload=pack(failed)))
    assert {"no failure is a sample", "the judgement stands"} <= {finding.promise for finding in report.findings}


async def test_one_session_in_two_groups_is_found(trained: Database) -> None:
    stolen = scripted_episode("g1-0", group_id="g3", outcome=Scored(reward=0.0, verifier="1"))
    sample = {
        "trajectory_id": stolen.trajectories[0].id, "episode_id": "g3-0", "group_id": "g3", "tokens": 1,
        "trained_tokens": 1, "min_version": 0, "max_version": 0,
    }  # fmt: skip
    report = await _after(trained, insert(samples).values(sample))
    assert "a trajectory is one sample" in {finding.promise for finding in report.findings}


async def test_the_database_itself_refuses_a_second_claim(trained: Database) -> None:
    with pytest.raises(Exception, match="UNIQUE"):
        await _after(trained, insert(claims).values(group_id="g1", state="open", **CLAIM))


async def test_the_report_counts(trained: Database) -> None:
    report = await audit(trained)
    assert report.groups == {"trained": 2, "ready": 1, "running": 1}
    assert report.episodes == {"accepted": 6, "failed": 1, "running": 2}
    assert (report.steps, report.trained_samples, report.swept_samples) == (1, 4, 0)
