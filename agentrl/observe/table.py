"""The table of every metric, from what the rooms declare; `docs/metrics.md` is its output.

python -m agentrl.observe.table > docs/metrics.md
"""

from __future__ import annotations

import agentrl.engine.metrics
import agentrl.reward.metrics
import agentrl.rollout.metrics
import agentrl.train.metrics
import agentrl.weights.metrics
import gateway.metrics
import sandbox.metrics
from agentrl.core.telemetry import MetricSpec

ROOMS = (
    agentrl.rollout.metrics,
    agentrl.train.metrics,
    agentrl.weights.metrics,
    gateway.metrics,
    agentrl.engine.metrics,
    sandbox.metrics,
    agentrl.reward.metrics,
)

HEAD = """# Metrics

Written by `python -m agentrl.observe.table`; a test holds this page to what the rooms declare.

Names are `room/quantity_unit`. Counters, gauges and histograms are on each service's `/metrics`, as
`agentrl_room_quantity_unit`. Kind `step` is one number a training step: in `metrics.jsonl`, in TensorBoard, and on the
trainer's `/metrics` as `agentrl_step_room_quantity_unit`. The engine's metrics have vLLM's own names (`vllm:...`).

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def metric_specs() -> list[MetricSpec]:
    """Every declared metric, by name."""
    return sorted((spec for room in ROOMS for spec in room.SPECS), key=lambda spec: spec.name)


def metrics_page() -> str:
    return HEAD + "".join(map(_row, metric_specs()))


def _row(spec: MetricSpec) -> str:
    meaning = spec.help.replace("|", "\\|")
    return f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels)} | {meaning} |\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
