"""The metrics that the sandbox controller declares."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec

SPECS: tuple[MetricSpec, ...] = (
    MetricSpec("sandbox/live_sandboxes", "gauge", "sandboxes that have not ended"),
    MetricSpec("sandbox/state_sandboxes", "gauge", "live sandboxes by state, at the last sweep", labels=("state",)),
    MetricSpec("sandbox/oldest_seconds", "gauge", "age of the oldest live sandbox, at the last sweep"),
    MetricSpec("sandbox/kept_snapshots", "gauge", "snapshots that sandboxes can begin from"),
    MetricSpec("sandbox/warm_sandboxes", "gauge", "sandboxes made ahead that nobody has yet"),
    MetricSpec("sandbox/warm_total", "counter", "creations by whether the pool had one", labels=("outcome",)),
    MetricSpec("sandbox/isolated_info", "gauge", "1 when sandboxes are kept apart by the kernel, 0 when they are NOT"),
    MetricSpec("sandbox/ended_total", "counter", "sandboxes that ended, by terminal state", labels=("state",)),
    MetricSpec("sandbox/refused_total", "counter", "creations refused for lack of capacity"),
    MetricSpec("sandbox/orphans_total", "counter", "sandboxes destroyed because the store did not know them"),
    MetricSpec("sandbox/egress_total", "counter", "connections out of sandboxes through the controller's proxy"),
    MetricSpec("sandbox/egress_refused_total", "counter", "connections that sandbox.egress did not allow"),
    MetricSpec("sandbox/create_seconds", "histogram", "from the request to READY"),
    MetricSpec("sandbox/exec_seconds", "histogram", "one command through sandboxd, its run time included"),
    MetricSpec("sandbox/close_seconds", "histogram", "from CLOSING to CLOSED"),
)
