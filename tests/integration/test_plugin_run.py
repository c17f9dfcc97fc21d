"""A plugin package outside the repository: written by `agentrl env new`, installed with pip, trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, processes_of, run_agentrl

from agentrl.observe.summary import Summary

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def plugin_site(tmp_path: Path) -> Path:
    """A folder of installed packages that holds the new plugin."""
    done = run_agentrl("env", "new", "adder", "--folder", str(tmp_path / "adder"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(tmp_path / "adder")], check=True)
    return site


def test_a_new_plugin_trains_two_steps(plugin_site: Path, tmp_path: Path) -> None:
    listed = run_agentrl("env", "list", cwd=tmp_path, path=plugin_site)
    assert "adder" in listed.stdout
    settings = (*SMALL, "env.name=adder", f"dir={tmp_path / 'runs'}", "name=plugin")
    done = run_agentrl("train", *settings, cwd=tmp_path, path=plugin_site)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "plugin"
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert (summary.env, summary.steps) == ("adder", 2)
    assert summary.audit.ok, summary.audit.findings
    assert not processes_of(folder)
