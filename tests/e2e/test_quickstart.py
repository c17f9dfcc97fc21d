"""The demo for one seed, through every process: the policy gets better, and all that a run promises is there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.observe.summary import Summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


def test_the_quickstart_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(ROOT / "examples" / "quickstart.toml")]
    began = time.monotonic()
    done = subprocess.run([*command, f"dir={tmp_path}"], capture_output=True, text=True, cwd=tmp_path)
    print(done.stdout, f"{time.monotonic() - began:.0f} s")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    folder = tmp_path / "quickstart"
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_before <= 0.70
    assert summary.eval_after >= 0.85
    assert [found.tasks for found in summary.evaluations] == [128, 128]
    assert [found.infra_failures for found in summary.evaluations] == [0, 0]
    assert summary.audit.ok, summary.audit.findings
    assert summary.mismatch_zero_lag_steps > 0
    assert summary.mismatch_zero_lag_max is not None
    assert summary.mismatch_zero_lag_max <= 1e-5
    for file in ("config.toml", "curve.png", "episodes/won.md", "episodes/lost.md", "metrics.jsonl", "weights/latest"):
        assert (folder / file).stat().st_size > 0, file
    assert list((folder / "tensorboard").iterdir())
