"""Reading a run's numbers while and after they are written."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.core.telemetry import JsonlSink
from agentrl.observe.history import Tail, read_history


def test_a_step_that_was_taken_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        sink.write(step, {"reward/mean": reward})
    sink.close()
    assert read_history(path).series("reward/mean") == ([1, 2, 3], [0.1, 0.25, 0.3])


def test_values_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"train/loss": float("nan"), "train/lag_mean": 0.5})
    sink.close()
    assert read_history(path).values("train/loss") == []
    assert read_history(path).values("train/lag_mean") == [0.5]


def test_a_run_without_steps_has_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "metrics.jsonl").rows == ()


def test_a_tail_yields_each_line_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    first, second = json.dumps({"step": 1}) + "\n", json.dumps({"step": 2}) + "\n"
    path.write_text(first + second[:5])
    assert tail.read() == [{"step": 1}]
    path.write_text(first + second)
    assert tail.read() == [{"step": 2}]
    assert tail.read() == []
