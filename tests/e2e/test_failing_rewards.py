"""A fifth of the rewards fail as `infra`, in the form `sync`: none becomes a number, and the run still learns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from runs import run_agentrl
from sqlalchemy import select

from agentrl.core.db import sqlite_url
from agentrl.core.types import Episode, Failed, Scored
from agentrl.observe.summary import Summary
from agentrl.rollout.store import open_store_database
from agentrl.rollout.tables import GroupState, episodes, groups, samples, unpack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SUPPORT = Path(__file__).parents[1] / "support"
SETTINGS = (
    "env.name=flaky_vault:FlakyVault",
    "rollout.form=sync",
    "rollout.reissues=0",
    "rollout.resample_flat=false",
    "warm_start.steps=0",
    "train.steps=10",
    "eval.tasks=128",
    "name=flaky",
)


@pytest.fixture(scope="module")
def flaky_run(quickstart: Path) -> Path:
    """Starts from the quickstart's warm policy; a failed attempt is not tried again, so groups have gaps."""
    place = quickstart.parent
    settings = (f"model.path={quickstart / 'warm'}", f"dir={place}", *SETTINGS)
    example = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    done = run_agentrl("train", str(example), *settings, cwd=place, path=SUPPORT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return place / "flaky"


def test_the_run_still_learns(flaky_run: Path) -> None:
    summary = Summary.model_validate_json((flaky_run / "summary.json").read_bytes())
    assert summary.audit.ok, summary.audit.findings
    assert summary.lag_max == 0
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_after >= summary.eval_before + 0.1


async def test_no_failed_reward_became_a_sample(flaky_run: Path) -> None:
    database = await open_store_database(sqlite_url(flaky_run / "rollout.db"))
    async with database.read() as connection:
        rows = (await connection.execute(select(episodes))).all()
        sampled = set((await connection.execute(select(samples.c.episode_id))).scalars())
        trained = await connection.execute(select(groups.c.id).where(groups.c.state == GroupState.TRAINED))
        trained_groups = set(trained.scalars())
    await database.close()
    played = {row.id: Episode.model_validate_json(unpack(row.payload)) for row in rows if row.payload}
    failed = {id_ for id_, episode in played.items() if isinstance(episode.outcome, Failed)}
    assert 0.1 < len(failed) / len(played) < 0.3
    assert all(row.reward is None for row in rows if row.id in failed)
    assert not failed & sampled
    assert all(isinstance(played[id_].outcome, Scored) for id_ in sampled)
    scored = Counter(row.group_id for row in rows if row.id in sampled)
    assert any(scored[group] < 8 for group in trained_groups)
