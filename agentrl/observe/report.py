"""What is left when a run has ended: the summary, the learning curve, two example episodes.

Called by `agentrl train` after the last process; everything is read from the run's folder and its store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.config import RunConfig
from agentrl.core.db import Database
from agentrl.core.types import Episode
from agentrl.observe.curve import Curve, draw
from agentrl.observe.curve import Evaluation as Point
from agentrl.observe.history import History, read_history
from agentrl.observe.summary import (
    AuditSummary,
    EvalSummary,
    Summary,
    fingerprint,
    largest,
    mean,
    reward_ends,
)
from agentrl.observe.transcript import transcript
from agentrl.observe.view import RunView
from agentrl.rollout.audit import Finding, audit
from agentrl.rollout.evaluate import evaluated_episodes, load_evaluation, succeeded
from agentrl.rollout.service import AFTER, BEFORE
from agentrl.rollout.store import Store, open_store_database


@dataclass(frozen=True, slots=True)
class Places:
    """Where a report reads and writes."""

    metrics: Path
    store_url: str
    summary: Path
    curve: Path
    episodes: Path


async def write_report(places: Places, config: RunConfig, view: RunView) -> Summary:
    """Write summary.json, curve.png and episodes/; returns the summary."""
    history = read_history(places.metrics)
    database = await open_store_database(places.store_url)
    try:
        summary = await summarise(database, config, history, view)
        await write_examples(database, places.episodes)
        curve = await curve_of(database, config, history)
    finally:
        await database.close()
    places.summary.write_text(summary.model_dump_json(indent=2) + "\n")
    draw(curve, places.curve)
    return summary


async def summarise(database: Database, config: RunConfig, history: History, view: RunView) -> Summary:
    """The run's facts from its store and its numbers."""
    audited = await audit(database)
    labels = await evaluation_steps(database, audited.steps)
    evaluations = [found for label in labels if (found := await evaluation(database, label))]
    rates = {found.label: found.success_rate for found in evaluations}
    first, last = reward_ends(history)
    probed = history.values("weights/mismatch_mean_abs")
    mismatch = [*history.values("train/mismatch_zero_lag_mean_abs"), *probed]
    tokens = sum(history.values("train/trained_tokens"))
    phases = {phase.name: round(phase.seconds, 2) for phase in view.phases}
    return Summary(
        name=config.name, config_fingerprint=fingerprint(config), seed=config.seed, env=config.env.name,
        form=config.rollout.form, steps=audited.steps, eval_before=rates.get(BEFORE), eval_after=rates.get(AFTER),
        evaluations=tuple(evaluations), reward_first=first, reward_last=last,
        episodes=audited.episodes, groups=audited.groups, failures=await Store(database).failures(),
        mismatch_zero_lag_max=largest(mismatch), mismatch_zero_lag_steps=len(probed),
        lag_mean=mean(history.values("train/lag_mean")), lag_max=largest(history.values("train/lag_max")),
        trained_tokens=int(tokens), trained_tokens_per_s=tokens / phases["train"] if phases.get("train") else None,
        wall_s=round(time.time() - view.phases[0].began, 2), phases_s=phases,
        restarts={role: count for role, count in view.restarts.items() if count},
        audit=AuditSummary(ok=audited.ok, findings=tuple(map(finding_line, audited.findings))),
    )  # fmt: skip


async def evaluation_steps(database: Database, steps: int) -> dict[str, int]:
    """The stored evaluations in their order, each with the training steps behind its policy."""
    prefix, during = "evaluations/", "step-"
    labels = [name.removeprefix(prefix) for name in await Store(database).counts() if name.startswith(prefix)]
    known = {BEFORE: 0, AFTER: steps}
    found = {label: known[label] for label in labels if label in known}
    found |= {label: int(label.removeprefix(during)) for label in labels if label.startswith(during)}
    return dict(sorted(found.items(), key=lambda item: (item[0] == AFTER, item[1])))


async def evaluation(database: Database, label: str) -> EvalSummary | None:
    found = await load_evaluation(database, label)
    if found is None:
        return None
    return EvalSummary(
        label=label, success_rate=found.success_rate, mean_reward=found.mean_reward, tasks=found.tasks,
        infra_failures=found.infra_failures, mean_turns=found.mean_turns, mean_tokens=found.mean_tokens,
    )  # fmt: skip


async def write_examples(database: Database, folder: Path) -> None:
    """won.md from the last evaluation that has a success, lost.md from the last that has a failure."""
    folder.mkdir(exist_ok=True)
    found: dict[str, Episode] = {}
    for label in (AFTER, BEFORE):
        for episode in await evaluated_episodes(database, label):
            found.setdefault("won" if succeeded(episode.outcome) else "lost", episode)
    for name, episode in found.items():
        (folder / f"{name}.md").write_text(transcript(episode))


async def find_episode(database: Database, name: str) -> Episode:
    """An episode by id, of training or of an evaluation; `won` and `lost` name the examples."""
    evaluated = [episode for label in (AFTER, BEFORE) for episode in await evaluated_episodes(database, label)]
    for episode in evaluated:
        if name in (episode.id, "won" if succeeded(episode.outcome) else "lost"):
            return episode
    return await Store(database).episode(name)


def finding_line(finding: Finding) -> str:
    return f"{finding.promise}: {finding.where}: {finding.detail}"


async def curve_of(database: Database, config: RunConfig, history: History) -> Curve:
    """Rewards and lag by step, with the evaluations that are stored so far."""
    steps, rewards = history.series("reward/mean")
    points = []
    for label, step in (await evaluation_steps(database, int(max(steps, default=0)))).items():
        found = await load_evaluation(database, label)
        if found is not None and found.success_rate is not None:
            points.append(Point(step, found.success_rate, found.answered))
    title = f"{config.name}: {config.env.name}, {config.rollout.form}, seed {config.seed}"
    return Curve(title, steps, rewards, points, history.values("train/lag_mean"))
