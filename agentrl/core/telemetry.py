"""Logging, metrics and metric sinks. Used by every process.

A metric exists only if its room declares it as a `MetricSpec`, so that `docs/metrics.md` is the whole table.
Names are `room/quantity_unit`; Prometheus sees `agentrl_room_quantity_unit`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from agentrl.core.protocols import MetricSink

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the metrics table."""

    name: str
    """`room/quantity_unit`."""
    kind: Literal["counter", "gauge", "histogram", "step"]
    """`step` is a per-step number that goes to the sinks; the others are service metrics on /metrics."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


class Metrics:
    """The live metrics of one process, built from the specs that its rooms declare."""

    def __init__(self, specs: Sequence[MetricSpec]) -> None:
        self.registry = CollectorRegistry()
        self._live: dict[str, Any] = {spec.name: self._build(spec) for spec in specs if spec.kind != "step"}

    def _build(self, spec: MetricSpec) -> Any:
        name = "agentrl_" + spec.name.replace("/", "_")
        if spec.kind == "counter":
            return Counter(name, spec.help, spec.labels, registry=self.registry)
        if spec.kind == "gauge":
            return Gauge(name, spec.help, spec.labels, registry=self.registry)
        return Histogram(name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)

    def _get(self, name: str, labels: Mapping[str, str]) -> Any:
        metric = self._live[name]
        return metric.labels(**labels) if labels else metric

    def inc(self, name: str, by: float = 1.0, **labels: str) -> None:
        self._get(name, labels).inc(by)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._get(name, labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._get(name, labels).observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The current number of a counter or gauge; for tests and live views."""
        return float(self._get(name, labels)._value.get())


class JsonlSink:
    """One JSON object a step, appended to a file; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")

    def close(self) -> None:
        self._file.close()


class PrometheusSink:
    """The latest step's numbers as gauges of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                plain = "agentrl_step_" + "".join(c if c.isalnum() else "_" for c in name)
                self._gauges[name] = Gauge(plain, f"{name} of the latest step", registry=self._registry)
            self._gauges[name].set(value)

    def close(self) -> None:
        """Nothing to release."""


class TensorBoardSink:
    """Scalars in TensorBoard's event format."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        rows = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=rows)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Writes to several sinks; one that fails is logged once and left out, and training goes on."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(step, values)
            except Exception:
                log.exception("metric sink %s failed and is left out from now on", type(sink).__name__)
                self._sinks.remove(sink)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def setup_logging(process: str, level: str = "INFO", path: Path | None = None) -> None:
    """Log lines `time level process logger message`, to stderr or to a file."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if path is None else logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "openai", "aiosqlite", "asyncio", "alembic", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
