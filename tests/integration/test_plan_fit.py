"""A real run held against the model of a step."""

from __future__ import annotations

from pathlib import Path

from runs import SMALL, run_agentrl

PHASES = ("wait", "prepare", "forward", "update", "checkpoint", "publish", "apply", "step")


def test_a_measured_run_is_fitted_by_phase(finished_run: Path, tmp_path: Path) -> None:
    settings = (*SMALL, f"model.path={finished_run / 'warm'}", "warm_start.steps=0", "train.steps=16", "eval.tasks=0")
    done = run_agentrl("train", *settings, f"dir={tmp_path / 'runs'}", "name=measured", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    found = run_agentrl("plan", "--fit", "measured", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = {line.split()[0]: line.split() for line in found.stdout.splitlines() if line.split()[:1]}
    assert set(PHASES) <= set(rows)
    predicted, measured = (sum(float(rows[name][column]) for name in PHASES[:-1]) for column in (1, 2))
    assert float(rows["step"][1]) - predicted < 0.01
    # The laps of a step add up to it.
    assert abs(measured - float(rows["step"][2])) < 0.1 * measured
    assert "fitted on 8 steps, compared on 7 others" in found.stdout


def test_a_run_that_is_too_short_says_so(finished_run: Path) -> None:
    done = run_agentrl("plan", "--fit", str(finished_run), cwd=finished_run.parent)
    assert done.returncode == 2
    assert "2 steps are too few to fit; at least 7" in done.stderr
