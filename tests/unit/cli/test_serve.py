"""One service alone: it answers with its token only, and ends in good order on Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core.errors import Unauthorized
from agentrl.core.http import Service, free_port
from sandbox.client import SandboxClient


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`agentrl serve sandbox` and its URL."""
    port = free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "serve", "sandbox", "sandbox.capacity=3"]
    command += ["--port", str(port), "--token", "secret", "--dir", str(tmp_path / "state")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    yield run, f"http://127.0.0.1:{port}"
    run.kill()
    run.communicate()


async def test_a_service_alone(controller: tuple[subprocess.Popen[str], str]) -> None:
    run, url = controller
    service = Service(url, token="wrong")
    while not await service.healthy():
        assert run.poll() is None, run.communicate()
        await asyncio.sleep(0.05)
    with pytest.raises(Unauthorized):
        await service.request("GET", "/v1/sandboxes")
    await service.close()
    client = SandboxClient(url, token="secret")
    assert not await client.list()
    await client.close()
    run.send_signal(signal.SIGINT)
    said, _ = await asyncio.to_thread(run.communicate, timeout=30)
    assert run.returncode == 0, said
    assert "Traceback" not in said
    assert url in said


def test_a_model_is_asked_for_by_its_setting(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli.main", "serve", "gateway", "--dir", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "model.path" in done.stderr


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "status.json").touch()
    command = [sys.executable, "-m", "agentrl.cli.main", "serve", "sandbox", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds a run" in done.stderr
    assert not (tmp_path / "config.toml").exists()
