"""A small run through every process: what it leaves behind, how it resumes, and how it ends when something breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SMALL, processes_of, run_agentrl

from agentrl.launch.status import read_status
from agentrl.observe.history import read_history
from agentrl.observe.summary import Summary

pytestmark = pytest.mark.timeout(600)


def from_warm(run: Path, *settings: str) -> tuple[str, ...]:
    """Settings of a small run that starts with the policy of another one's warm start."""
    return (*SMALL, f"model.path={run / 'warm'}", "warm_start.steps=0", *settings)


def summary_of(folder: Path) -> Summary:
    return Summary.model_validate_json((folder / "summary.json").read_bytes())


def test_a_run_leaves_its_results(finished_run: Path) -> None:
    summary = summary_of(finished_run)
    assert summary.steps == 2
    assert [found.label for found in summary.evaluations] == ["before", "after"]
    assert summary.episodes["accepted"] >= 16
    assert summary.audit.ok, summary.audit.findings
    assert summary.mismatch_zero_lag_max is not None
    assert summary.mismatch_zero_lag_max <= 1e-5
    status = read_status(finished_run / "status.json")
    assert status is not None
    assert status.state == "done"
    assert [row["step"] for row in read_history(finished_run / "metrics.jsonl").rows] == [1, 2]
    assert (finished_run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((finished_run / "episodes").iterdir())


def test_the_commands_about_runs_read_it(finished_run: Path) -> None:
    place = finished_run.parent
    shown = {
        "list": run_agentrl("runs", "list", "--dir", str(place), cwd=place),
        "show": run_agentrl("runs", "show", str(finished_run), cwd=place),
        "check": run_agentrl("runs", "check", str(finished_run), cwd=place),
        "plot": run_agentrl("runs", "plot", str(finished_run), "-o", str(place / "again.png"), cwd=place),
        "transcript": run_agentrl("runs", "transcript", str(finished_run), "lost", cwd=place),
    }
    assert {name: done.returncode for name, done in shown.items()} == dict.fromkeys(shown, 0), shown
    assert "done" in shown["list"].stdout
    assert "2/2" in shown["list"].stdout
    assert "train.steps = 2" in shown["show"].stdout
    assert "sound" in shown["check"].stdout
    assert (place / "again.png").exists()
    assert shown["transcript"].stdout.startswith("# Episode eval-")


def test_eval_plays_the_newest_policy_and_leaves_the_run_alone(finished_run: Path) -> None:
    before = summary_of(finished_run)
    done = run_agentrl("eval", str(finished_run), "eval.tasks=3", cwd=finished_run.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "success rate" in done.stdout
    assert (finished_run / "evals" / "1" / "rollout.db").exists()
    assert summary_of(finished_run) == before
    assert not processes_of(finished_run)


def test_a_run_whose_trainer_was_killed_is_resumed(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    settings = [
        *SMALL,
        "train.steps=6",
        "launch.restarts=0",
        f"model.path={finished_run / 'warm'}",
        "warm_start.steps=0",
    ]
    command = [sys.executable, "-m", "agentrl.cli.main", "train", *settings, f"dir={tmp_path}", "name=killed"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    while not read_history(folder / "metrics.jsonl").rows:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    (trainer,) = [p for p in processes_of(folder) if "trainer" in p.cmdline()]
    os.kill(trainer.pid, signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "trainer was ended by SIGKILL" in said
    assert not processes_of(folder)

    done = run_agentrl("train", "--resume", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(folder)
    assert summary.steps == 6
    assert summary.audit.ok, summary.audit.findings
    assert run_agentrl("runs", "check", str(folder), cwd=tmp_path).returncode == 0


def test_a_bug_in_an_environment_ends_the_run_with_its_traceback(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from envs.vault.environment import Vault\n\n\n"
        "class Broken(Vault):\n"
        "    def messages(self, task):\n"
        "        return super().messages(task)[self.no_such_thing :]\n"
    )
    settings = from_warm(finished_run, "env.name=broken:Broken")
    done = run_agentrl("train", *settings, f"dir={tmp_path}", "name=broken", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 1
    assert "AttributeError: 'Broken' object has no attribute 'no_such_thing'" in done.stderr
    assert "broken.py" in done.stderr
    assert "rollout ended with exit code 1" in done.stderr
    assert not processes_of(tmp_path / "broken")
    status = read_status(tmp_path / "broken" / "status.json")
    assert status is not None
    assert status.state == "failed"


def test_ctrl_c_stops_everything(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    settings = from_warm(finished_run, "train.steps=500")
    command = [sys.executable, "-m", "agentrl.cli.main", "train", *settings, f"dir={tmp_path}", "name=interrupted"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    while not read_history(folder / "metrics.jsonl").rows:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"agentrl train --resume {folder}" in said
    assert not processes_of(folder)
    status = read_status(folder / "status.json")
    assert status is not None
    assert status.state == "stopped"
