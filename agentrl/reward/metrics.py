"""What the reward service measures."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec

SPECS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "reward/outcomes_total", "counter", "Outcomes by kind (scored, failed), code and environment",
        ("kind", "code", "env"),
    ),
    MetricSpec("reward/score_seconds", "histogram", "Time to score one episode, waiting for a slot included"),
    MetricSpec("reward/running_count", "gauge", "Episodes being scored or waiting for a slot"),
    MetricSpec("reward/replays_total", "counter", "Requests answered from an outcome already known or under way"),
)  # fmt: skip
