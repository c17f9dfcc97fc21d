"""Runs `agentrl` as people do, in processes of its own. Used by the tests of whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

SMALL = (
    "warm_start.steps=30",
    "warm_start.batch=8",
    "rollout.groups=2",
    "rollout.group_size=4",
    "rollout.concurrency=8",
    "rollout.resample_flat=false",
    "train.steps=2",
    "eval.tasks=4",
)
"""A run of seconds: it learns nothing, but every part of it works."""


def processes_of(folder: Path) -> list[psutil.Process]:
    """What still runs on behalf of a run: processes that name its folder, or work in it."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = [*(process.info["cmdline"] or ()), process.info["cwd"] or ""]
        if any(str(folder) in word for word in words) and process.pid != os.getpid():
            found.append(process)
    return found


def run_agentrl(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One command to its end; `path` is a further place for Python to import plugins from."""
    environment = {**os.environ, "COLUMNS": "200"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-m", "agentrl.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=600)
