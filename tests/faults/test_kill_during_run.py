"""`kill -9` of each process of a real run, one at a time, while it trains: the run goes on, the store stays sound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

STEPS = 16
SETTINGS = [
    "warm_start.steps=30",
    "warm_start.batch=8",
    f"train.steps={STEPS}",
    "eval.tasks=8",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.concurrency=16",
    "rollout.resample_flat=false",
    "name=kill",
]


def children(role: str, folder: Path) -> list[psutil.Process]:
    """The live processes of a role of the run in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "agentrl.launch.child" in line and role in line and str(folder) in line:
            found.append(process)
    return found


def wait_for(what: str, condition: Callable[[], bool], run: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, f"the run ended with {run.returncode} while waiting for {what}"
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.1)


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(row)["step"] for row in rows), default=-1)


def restarted(role: str, folder: Path, old: int) -> bool:
    return [process.pid for process in children(role, folder)] not in ([], [old])


def gone_on(folder: Path, before: int) -> bool:
    return steps_done(folder) > before


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `agentrl train` in tmp_path; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentrl.cli.main", "train", *arguments]
        with (tmp_path / "train.log").open("ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def audit(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrl.cli.main", "runs", "check", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_process_killed_once(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "kill"
    run = start(*SETTINGS, f"dir={tmp_path / 'runs'}")
    wait_for("first step", lambda: steps_done(folder) >= 1, run, 240)
    for role in ("engine-0", "gateway", "sandbox", "reward", "trainer", "rollout"):
        before = steps_done(folder)
        (victim,) = children(role, folder)
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(f"restart of {role}", partial(restarted, role, folder, victim.pid), run)
        wait_for(f"step after the kill of {role}", partial(gone_on, folder, before), run)
    assert run.wait(timeout=240) == 0, (tmp_path / "train.log").read_text()[-4000:]
    assert steps_done(folder) == STEPS
    checked = audit(folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_launcher_killed_then_resumed(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "kill"
    run = start(*SETTINGS, "train.steps=6", f"dir={tmp_path / 'runs'}")
    wait_for("second step", lambda: steps_done(folder) >= 2, run, 240)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while any(children(role, folder) for role in ("trainer", "rollout", "gateway", "engine-0", "reward", "sandbox")):
        assert time.monotonic() < deadline, "children outlive the launcher"
        time.sleep(0.1)
    resumed = start("--resume", str(folder))
    assert resumed.wait(timeout=300) == 0, (tmp_path / "train.log").read_text()[-4000:]
    assert steps_done(folder) == 6
    checked = audit(folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
