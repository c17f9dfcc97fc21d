"""The rollout process's metrics. Set by the producer and the service."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec

SPECS: tuple[MetricSpec, ...] = (
    MetricSpec("rollout/episodes_total", "counter", "Episodes by the state they ended in.", ("state", "source")),
    MetricSpec("rollout/failures_total", "counter", "Failed episodes by code and blame.", ("code", "blame")),
    MetricSpec("rollout/quarantined_total", "counter", "Quarantined episodes by defect.", ("defect",)),
    MetricSpec("rollout/reissued_total", "counter", "Attempts issued again after an infra failure or a quarantine."),
    MetricSpec("rollout/groups_total", "counter", "Groups by what became of them: ready or why dropped.", ("end",)),
    MetricSpec(
        "rollout/reward_sum", "counter", "Sum of the accepted episodes' |reward|, by sign.", ("source", "sign")
    ),
    MetricSpec("rollout/running_episodes", "gauge", "Episodes in flight."),
    MetricSpec("rollout/open_groups", "gauge", "Groups with an attempt that has not ended."),
    MetricSpec("rollout/ready_groups", "gauge", "Groups that wait for the trainer."),
    MetricSpec("rollout/room_groups", "gauge", "Groups that admission would issue now."),
    MetricSpec("rollout/version", "gauge", "Newest policy version that replicas serve."),
    MetricSpec("rollout/steps", "gauge", "Committed training steps."),
    MetricSpec("rollout/eval_success_ratio", "gauge", "Success rate of an evaluation on held-out tasks.", ("label",)),
    MetricSpec("rollout/episode_seconds", "histogram", "Seconds from start to outcome."),
    MetricSpec(
        "rollout/phase_seconds_total", "counter",
        "Episode seconds by phase: queue, sandbox, model, reward, other; and idle, the unused places.", ("phase",),
    ),
)  # fmt: skip
