"""Turns what the producer does into metrics and log lines. Called by the producer only.

Invariant: it decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from agentrl.core.telemetry import Metrics
from agentrl.core.types import Episode, Failed, Scored
from agentrl.rollout.acceptance import Verdict
from agentrl.rollout.dispatcher import Dispatcher, GroupEnd
from agentrl.rollout.tables import EpisodeState

log = logging.getLogger(__name__)


class Reporter:
    """The counters and gauges of `metrics.SPECS`."""

    def __init__(self, metrics: Metrics, *, concurrency: int) -> None:
        self._metrics = metrics
        self._concurrency = concurrency
        self._ticked = time.monotonic()
        self._failures: Counter[str] = Counter()

    def episode(self, episode: Episode, verdict: Verdict) -> None:
        outcome, source = episode.outcome, episode.task.source
        self._metrics.inc("rollout/episodes_total", state=verdict.state.value, source=source)
        if isinstance(outcome, Failed):
            self._metrics.inc("rollout/failures_total", code=outcome.code, blame=outcome.blame.value)
        if verdict.state is EpisodeState.QUARANTINED:
            self._metrics.inc("rollout/quarantined_total", defect=verdict.reason)
        if verdict.state is EpisodeState.ACCEPTED and isinstance(outcome, Scored):
            # A counter cannot go down, so negative rewards are summed apart.
            sign = "negative" if outcome.reward < 0 else "positive"
            self._metrics.inc("rollout/reward_sum", abs(outcome.reward), source=source, sign=sign)
        else:
            self._failures[verdict.reason] += 1
            log.info("episode %s %s: %s: %s", episode.id, verdict.state.value, verdict.reason, verdict.detail)
        self._phases(episode)

    def _phases(self, episode: Episode) -> None:
        spent = episode.timings
        known = spent.sandbox_s + spent.model_s + spent.reward_s
        phases = {
            "queue": spent.queue_s, "sandbox": spent.sandbox_s, "model": spent.model_s, "reward": spent.reward_s,
            "other": max(0.0, spent.total_s - known),
        }  # fmt: skip
        for phase, seconds in phases.items():
            self._metrics.inc("rollout/phase_seconds_total", seconds, phase=phase)
        self._metrics.observe("rollout/episode_seconds", spent.total_s)

    def reissued(self) -> None:
        self._metrics.inc("rollout/reissued_total")

    def group(self, end: GroupEnd) -> None:
        self._metrics.inc("rollout/groups_total", end=end.reason.value if end.reason else "ready")

    def tick(self, dispatcher: Dispatcher) -> None:
        """Refresh the gauges, and count the places that were unused since the last tick."""
        now = time.monotonic()
        idle = (self._concurrency - dispatcher.running) * (now - self._ticked)
        self._ticked = now
        self._metrics.inc("rollout/phase_seconds_total", max(0.0, idle), phase="idle")
        ledger = dispatcher.ledger
        gauges = {
            "running_episodes": dispatcher.running, "open_groups": dispatcher.open_groups,
            "ready_groups": ledger.ready, "room_groups": dispatcher.room, "version": ledger.version,
            "steps": ledger.steps,
        }  # fmt: skip
        for name, value in gauges.items():
            self._metrics.set(f"rollout/{name}", value)

    def failures(self) -> str:
        """What kept episodes from being accepted so far, most frequent first."""
        if not self._failures:
            return "no episode has failed"
        return "unaccepted so far: " + ", ".join(f"{reason} x{n}" for reason, n in self._failures.most_common(5))
