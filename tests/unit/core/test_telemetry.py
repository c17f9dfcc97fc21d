"""Metrics and the sinks of a step's numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from agentrl.core.telemetry import JsonlSink, Metrics, MetricSpec, PrometheusSink, Sinks, TensorBoardSink, setup_logging

SPECS = (
    MetricSpec("room/calls_total", "counter", "Calls", ("code",)),
    MetricSpec("room/open_count", "gauge", "Open"),
    MetricSpec("room/call_seconds", "histogram", "Seconds"),
    MetricSpec("room/loss", "step", "Loss"),
)


def test_metrics_are_what_was_declared() -> None:
    metrics = Metrics(SPECS)
    metrics.inc("room/calls_total", code="200")
    metrics.inc("room/calls_total", 2, code="200")
    metrics.set("room/open_count", 5)
    metrics.observe("room/call_seconds", 0.2)
    assert metrics.value("room/calls_total", code="200") == 3
    text = generate_latest(metrics.registry).decode()
    assert 'agentrl_room_calls_total{code="200"} 3.0' in text
    assert 'agentrl_room_call_seconds_bucket{le="0.3"} 1.0' in text
    with pytest.raises(KeyError):
        metrics.inc("room/undeclared")


def test_jsonl_appends_one_object_a_step_and_nulls_what_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.write(step, {"train/loss": 0.5, "train/kl": float("nan")})
        sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["train/loss"], row["train/kl"]) for row in rows] == [(1, 0.5, None), (2, 0.5, None)]


def test_prometheus_shows_the_latest_step() -> None:
    metrics = Metrics(())
    sink = PrometheusSink(metrics.registry)
    sink.write(1, {"train/loss": 1.0})
    sink.write(2, {"train/loss": 0.25})
    sink.close()
    assert "agentrl_step_train_loss 0.25" in generate_latest(metrics.registry).decode()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        sink.write(step, {"train/loss": float(step)})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 1.0), (2, 2.0)]


class FullDisk:
    def __init__(self) -> None:
        self.asked = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.asked += 1
        raise OSError("no space left on device")

    def close(self) -> None: ...


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, path = FullDisk(), tmp_path / "m.jsonl"
    sinks = Sinks([broken, JsonlSink(path)])
    for step in range(3):
        sinks.write(step, {"a/b": 1.0})
    sinks.close()
    assert broken.asked == 1
    assert len(path.read_text().splitlines()) == 3
    assert caplog.text.count("FullDisk failed and is left out") == 1


def test_log_lines_name_their_process(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("gateway", "INFO", tmp_path / "gateway.log")
        logging.getLogger("room").info("ready")
        logging.getLogger("httpx").info("noise")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = (tmp_path / "gateway.log").read_text().splitlines()
    assert line.endswith("INFO gateway room ready")
