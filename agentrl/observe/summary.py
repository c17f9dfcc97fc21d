"""The facts of a finished run, as `summary.json` holds them. Made by `report`, read by `agentrl runs` and benches."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from agentrl.core.config import RunConfig
from agentrl.core.types import Value
from agentrl.observe.history import History

WHERE_FROM = ("name", "dir", "launch", "telemetry")
"""Settings that say where a run lies and how it is watched, not what it computes."""


class EvalSummary(Value):
    """One evaluation on held-out tasks."""

    label: str
    success_rate: float | None
    """Of the answered tasks; None when nothing was answered."""
    mean_reward: float | None
    tasks: int
    infra_failures: int
    """Tasks without a result of the policy's; in no rate."""
    mean_turns: float
    mean_tokens: float
    """Sampled tokens of an episode."""


class AuditSummary(Value):
    ok: bool
    findings: tuple[str, ...] = ()
    """What the checker over the store found wrong."""


class Summary(Value):
    name: str
    config_fingerprint: str
    """Of everything that the run computes from; equal for equal runs."""
    seed: int
    env: str
    form: str
    steps: int
    """Training steps that are committed; a step may lack its row of numbers."""
    eval_before: float | None
    """Success rate on held-out tasks after the warm start."""
    eval_after: float | None
    evaluations: tuple[EvalSummary, ...]
    reward_first: float | None
    """Mean training reward of the first tenth of the steps."""
    reward_last: float | None
    episodes: Mapping[str, int]
    """Training episodes by the state they ended in."""
    groups: Mapping[str, int]
    """Groups by state, dropped ones by reason."""
    failures: Mapping[str, int]
    """Episodes without a reward, by code."""
    mismatch_zero_lag_max: float | None
    """The largest of the steps' mean |trainer - engine| logprob at lag 0, on the batch and on the probe."""
    mismatch_zero_lag_steps: int
    """Steps whose new version was compared with the trainer on a replica."""
    lag_mean: float | None
    lag_max: float | None
    trained_tokens: int
    trained_tokens_per_s: float | None
    """Over the training phase."""
    wall_s: float
    """Seconds of the launcher, all phases."""
    phases_s: Mapping[str, float] = Field(default_factory=dict)
    """Wall seconds by phase."""
    restarts: Mapping[str, int] = Field(default_factory=dict)
    """Restarts by role in this launch."""
    audit: AuditSummary


def fingerprint(config: RunConfig) -> str:
    """Twelve hex digits over the settings that change what a run computes."""
    tree = config.model_dump(mode="json", exclude=set(WHERE_FROM))
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def largest(values: list[float]) -> float | None:
    return max(values, default=None)


def reward_ends(history: History) -> tuple[float | None, float | None]:
    """Mean training reward over the first and the last tenth of the steps."""
    rewards = history.values("reward/mean")
    width = max(1, len(rewards) // 10)
    return mean(rewards[:width]), mean(rewards[-width:])


def read_summary(path: Path) -> Summary | None:
    """None when the run has not ended well yet."""
    return Summary.model_validate_json(path.read_bytes()) if path.exists() else None
