"""The report of a finished run, made from a real store and metrics file."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.config import RunConfig, load_config
from agentrl.core.db import Database, sqlite_url
from agentrl.core.telemetry import JsonlSink
from agentrl.core.types import Failed, Limits, Outcome, Sampling, Scored, ScoreRequest, Task
from agentrl.observe.gauges import Gauges, StatusPage
from agentrl.observe.history import Tail
from agentrl.observe.report import Places, find_episode, write_report
from agentrl.observe.results import summary_table
from agentrl.observe.summary import fingerprint, read_summary
from agentrl.observe.view import Phase, RunView
from agentrl.rollout.acceptance import judge
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.episode import Player
from agentrl.rollout.evaluate import evaluate, held_out
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import Issue, Store, open_store_database
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.episodes import scripted_episode
from agentrl.testing.rewards import ScriptedRewards
from agentrl.testing.sessions import ScriptedSessions

TASKS = 4


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(
        metrics=tmp_path / "metrics.jsonl",
        store_url=sqlite_url(tmp_path / "rollout.db"),
        summary=tmp_path / "summary.json",
        curve=tmp_path / "curve.png",
        episodes=tmp_path / "episodes",
    )


@pytest.fixture
async def store(places: Places) -> AsyncIterator[Database]:
    database = await open_store_database(places.store_url)
    yield database
    await database.close()


@pytest.fixture
async def view(places: Places) -> AsyncIterator[RunView]:
    config = load_config(None, ["name=demo", "train.steps=2"])
    gauges, status = Gauges({}), StatusPage("http://127.0.0.1:1", "")
    now = time.time()
    phases = [Phase("warm_start", now - 9, now - 5), Phase("train", now - 5, now - 1), Phase("report", now - 1)]
    yield RunView("demo", config, gauges, status, Tail(places.metrics), Tail(places.metrics), phases=phases)
    await gauges.close()
    await status.close()


async def evaluated(database: Database, label: str, wins: int) -> None:
    """An evaluation in which the first `wins` tasks succeed."""
    environment = PlainEnvironment(count=TASKS)
    tasks = held_out(environment, seed=0, count=TASKS, limits=Limits())
    won = {task.id for task in tasks[:wins]}

    def outcome(request: ScoreRequest) -> Outcome:
        return Scored(reward=float(request.task.id in won))

    player = Player(
        environment=environment, agent=ScriptedAgent(), sessions=ScriptedSessions(), sandboxes=None,
        rewards=ScriptedRewards(outcome), sampling=Sampling(), owner="test",
    )  # fmt: skip
    await evaluate(player, database, label=label, tasks=tasks, concurrency=2, retries=0)


async def trained(database: Database) -> None:
    """One group that is ready: one accepted attempt, one that infra lost."""
    store = Store(database)
    await store.issue(Issue("g1", Task(env="plain", id="g1", source="plain"), ("e0", "e1")), position=1, version=0)
    for index, outcome in enumerate((Scored(reward=1.0, verifier="1"), Failed(code="SANDBOX_LOST", verifier="1"))):
        episode = scripted_episode(f"e{index}", group_id="g1", index=index, outcome=outcome)
        await store.finish(episode, judge(episode))
    await store.end_group("g1", None, version=0)


def written_metrics(places: Places) -> None:
    sink = JsonlSink(places.metrics)
    common = {"train/lag_mean": 0.5, "train/lag_max": 1.0, "train/trained_tokens": 40.0}
    sink.write(1, {"reward/mean": 0.25, "weights/mismatch_mean_abs": 1e-7, **common})
    sink.write(
        2, {"reward/mean": 0.75, "train/mismatch_zero_lag_mean_abs": 3e-7, "weights/mismatch_mean_abs": 2e-7, **common}
    )
    sink.close()


async def test_the_summary_holds_what_happened(places: Places, store: Database, view: RunView) -> None:
    await evaluated(store, "before", 1)
    await evaluated(store, "step-1", 2)
    await evaluated(store, "after", 3)
    await trained(store)
    buffer = Buffer(store, staleness=Staleness(limit=0, groups=1, paced=True), min_scored=1)
    await buffer.take(1, version=0, groups=1)
    await buffer.commit(1, version=0, checkpoint="c1")
    written_metrics(places)
    summary = await write_report(places, view.config, view)
    assert read_summary(places.summary) == summary
    assert (summary.eval_before, summary.eval_after, summary.steps) == (0.25, 0.75, 1)
    assert [found.label for found in summary.evaluations] == ["before", "step-1", "after"]
    assert (summary.reward_first, summary.reward_last) == (0.25, 0.75)
    assert (summary.mismatch_zero_lag_max, summary.mismatch_zero_lag_steps) == (3e-7, 2)
    assert (summary.lag_mean, summary.lag_max, summary.trained_tokens) == (0.5, 1.0, 80)
    assert summary.failures == {"SANDBOX_LOST": 1}
    assert summary.episodes == {"accepted": 1, "failed": 1}
    assert summary.phases_s["train"] == pytest.approx(4.0, abs=0.1)
    assert summary.trained_tokens_per_s == pytest.approx(20.0, rel=0.05)
    assert places.curve.read_bytes().startswith(b"\x89PNG")


async def test_one_example_was_won_and_one_was_lost(places: Places, store: Database, view: RunView) -> None:
    await evaluated(store, "before", 2)
    await write_report(places, view.config, view)
    assert "reward 1" in (places.episodes / "won.md").read_text()
    assert "reward 0" in (places.episodes / "lost.md").read_text()
    lost = await find_episode(store, "lost")
    assert lost.outcome == Scored(reward=0.0, verifier=lost.outcome.verifier)
    assert await find_episode(store, lost.id) == lost


async def test_a_run_without_evaluations_has_a_report_too(places: Places, store: Database, view: RunView) -> None:
    await trained(store)
    written_metrics(places)
    summary = await write_report(places, view.config, view)
    assert (summary.eval_before, summary.eval_after, summary.evaluations) == (None, None, ())
    assert not list(places.episodes.iterdir())
    assert "0.250 at first, 0.750 at last" in shown(summary_table(summary))


async def test_the_table_sets_before_against_after(places: Places, store: Database, view: RunView) -> None:
    await evaluated(store, "before", 1)
    await evaluated(store, "after", 3)
    table = shown(summary_table(await write_report(places, view.config, view)))
    assert "success rate" in table
    assert table.index("before") < table.index("after")
    assert table.index("0.250") < table.index("0.750")


def shown(renderable: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_fingerprint_follows_what_is_computed_and_not_where() -> None:
    config = RunConfig()
    assert fingerprint(load_config(None, ["name=x", "dir=/y", "launch.live=false"])) == fingerprint(config)
    assert fingerprint(load_config(None, ["seed=1"])) != fingerprint(config)
    assert fingerprint(load_config(None, ["train.lr=0.1"])) != fingerprint(config)
