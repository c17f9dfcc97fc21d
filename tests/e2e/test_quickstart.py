"""The demo through every process: the policy gets better, and all that a run promises is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.observe.summary import Summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

FILES = ("config.toml", "curve.png", "episodes/won.md", "episodes/lost.md", "metrics.jsonl", "weights/latest")


def test_the_quickstart_learns(quickstart: Path) -> None:
    summary = Summary.model_validate_json((quickstart / "summary.json").read_bytes())
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_before <= 0.70
    assert summary.eval_after >= 0.85
    assert [found.tasks for found in summary.evaluations] == [128, 128]
    assert [found.infra_failures for found in summary.evaluations] == [0, 0]
    assert summary.audit.ok, summary.audit.findings


def test_engine_and_trainer_agree_in_every_step(quickstart: Path) -> None:
    summary = Summary.model_validate_json((quickstart / "summary.json").read_bytes())
    assert summary.mismatch_zero_lag_steps == summary.steps
    assert summary.mismatch_zero_lag_max is not None
    assert summary.mismatch_zero_lag_max <= 1e-5


def test_everything_to_look_at_is_there(quickstart: Path) -> None:
    sizes = {file: (quickstart / file).stat().st_size for file in FILES}
    assert all(sizes.values()), sizes
    assert list((quickstart / "tensorboard").iterdir())
