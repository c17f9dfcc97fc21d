"""What a person wants to know of a running run, gathered in one place. Filled and shown by `live`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.core.config import RunConfig
from agentrl.observe.gauges import Gauges, StatusPage
from agentrl.observe.history import Row, Tail, numbers

TITLES = {
    "warm_start": "warm start",
    "services": "start services",
    "eval_before": "eval before",
    "train": "train",
    "eval_after": "eval after",
    "report": "report",
    "eval": "evaluate",
}
"""What people read for each phase."""

TRAINING = ("warm_start", "services", "eval_before", "train", "eval_after", "report")
EVALUATION = ("services", "eval")

ROLLOUT_PHASES = {
    "evaluating before": "eval_before",
    "training": "train",
    "evaluating after": "eval_after",
}
"""Phases by the rollout process's own words on its status page."""


@dataclass
class Phase:
    """A stretch of the run."""

    name: str
    began: float
    """Unix seconds."""
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.began


@dataclass
class RunView:
    """The state of the view; a Watcher of the launcher."""

    name: str
    config: RunConfig
    gauges: Gauges
    status: StatusPage
    metrics: Tail
    warm_metrics: Tail
    plan: Sequence[str] = TRAINING
    """The phases to come, in their order."""
    phases: list[Phase] = field(default_factory=list)
    processes: dict[str, str] = field(default_factory=dict)
    """State by role."""
    restarts: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)
    """Training steps so far."""
    warm: list[Row] = field(default_factory=list)
    """Warm-start steps so far."""
    token_counts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=20))
    """Time and the tokens that engines had sampled by then."""

    def process(self, role: str, state: str) -> None:
        self.processes[role] = state
        self.restarts[role] += state == "restarting"

    def phase(self, name: str) -> None:
        """Begin a phase; telling it again changes nothing."""
        if name == self.now:
            return
        now = time.time()
        if self.phases:
            self.phases[-1].ended = now
        self.phases.append(Phase(name, now))

    async def refresh(self) -> None:
        """Read what the run has written and what its services report."""
        self.rows += map(numbers, self.metrics.read())
        self.warm += map(numbers, self.warm_metrics.read())
        await asyncio.gather(self.gauges.refresh(), self.status.refresh())
        if (phase := ROLLOUT_PHASES.get(self.status.phase)) and self.now in {"services", *ROLLOUT_PHASES.values()}:
            self.phase(phase)
        if (sampled := self.gauges.total("vllm:generation_tokens_total")) is not None:
            self.token_counts.append((time.time(), sampled))

    @property
    def now(self) -> str:
        """The current phase's name."""
        return self.phases[-1].name if self.phases else ""

    @property
    def step(self) -> int:
        """Training steps taken."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def progress(self) -> tuple[int, int, str]:
        """Done, total and unit of the current phase; total 0 where there is nothing to count."""
        if self.now == "warm_start":
            return len(self.warm), self.config.warm_start.steps, "steps"
        if self.now in ("eval_before", "eval_after"):
            return self.status.evaluated(self.now.removeprefix("eval_")), self.config.eval.tasks, "tasks"
        return (self.step, self.config.train.steps, "steps") if self.now == "train" else (0, 0, "")

    def latest(self, name: str) -> float | None:
        return self.rows[-1].get(name) if self.rows else None

    def by_source(self) -> dict[str, float]:
        """The latest step's mean reward of each task source."""
        prefix = "reward/mean/"
        row = self.rows[-1] if self.rows else {}
        return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}

    def failures(self) -> dict[str, float]:
        """Episodes that got no reward, by code."""
        return self.gauges.by_label("agentrl_rollout_failures_total", "code")

    def success_rates(self) -> dict[str, float]:
        """Success on held-out tasks by evaluation."""
        return self.gauges.by_label("agentrl_rollout_eval_success_ratio", "label")

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled a second over the last ten seconds."""
        if len(self.token_counts) < 2:
            return None
        (began, before), (ended, after) = self.token_counts[0], self.token_counts[-1]
        # A restarted engine counts from zero again.
        return max(0.0, after - before) / max(ended - began, 1e-3)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, by the pace of the latest ten."""
        recent = self.rows[-11:]
        if len(recent) < 2:
            return None
        pace = (recent[-1]["time"] - recent[0]["time"]) / max(1, recent[-1]["step"] - recent[0]["step"])
        return max(0.0, (self.config.train.steps - self.step) * pace)
