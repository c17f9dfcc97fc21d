"""The metrics of publishing and applying weights. Declared here, written by `updater` and `replica`."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec

SPECS: tuple[MetricSpec, ...] = (
    MetricSpec("weights/updates", "counter", "Updates of one replica, by how they ended.", ("outcome",)),
    MetricSpec("weights/stage_s", "histogram", "Seconds to load a version beside the one that serves."),
    MetricSpec("weights/pause_s", "histogram", "Seconds that a replica's calls were held for an update."),
    MetricSpec("weights/verified_s", "histogram", "Seconds that a replica took no new calls: from pause to verified."),
    MetricSpec("weights/version", "gauge", "The verified version of a replica, -1 before the first.", ("url",)),
    MetricSpec("weights/probe_max_abs", "gauge", "Largest |logprob difference| on the last probe.", ("url",)),
)
