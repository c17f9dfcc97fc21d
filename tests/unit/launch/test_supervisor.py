"""The supervisor over tiny real processes: restarts after signals, ends on exceptions, leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrl.core.errors import LaunchError
from agentrl.core.http import free_port
from agentrl.launch.local import Supervisor, interruptible
from agentrl.launch.process import Role

SERVICE = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


class Seen:
    """A watcher that keeps what it was told."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []

    def process(self, role: str, state: str) -> None:
        self.states.append((role, state))


def python(name: str, code: str, *arguments: str, url: str = "") -> Role:
    return Role(name, (sys.executable, "-c", code, *arguments), url)


def service(name: str) -> Role:
    port = free_port()
    return python(name, SERVICE, str(port), url=f"http://127.0.0.1:{port}")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition lives in another process
        await asyncio.sleep(0.01)


async def test_a_run_succeeds_when_its_finite_roles_end_well(tmp_path: Path) -> None:
    seen = Seen()
    async with Supervisor(tmp_path, restarts=0, watcher=seen) as supervisor:
        await supervisor.start([service("gateway")])
        gateway = psutil.Process(supervisor.pid("gateway"))
        await supervisor.finish([python("trainer", ""), python("rollout", "")])
        assert gateway.is_running()
    assert not gateway.is_running()
    assert ("gateway", "ready") in seen.states
    assert seen.states[-1] == ("gateway", "ended")


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    seen = Seen()
    role = service("engine-0")
    async with Supervisor(tmp_path, restarts=1, watcher=seen) as supervisor:
        await supervisor.start([role])
        first = supervisor.pid("engine-0")
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pid("engine-0") != first)
        await supervisor.finish([python("trainer", "")])
        second = psutil.Process(supervisor.pid("engine-0"))
    assert ("engine-0", "restarting") in seen.states
    assert not second.is_running()


async def test_a_killed_finite_role_is_run_again_to_its_end(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = (
        "import os, pathlib, sys; p = pathlib.Path(sys.argv[1])\nif not p.exists(): p.touch(); os.kill(os.getpid(), 9)"
    )
    async with Supervisor(tmp_path, restarts=1, watcher=Seen()) as supervisor:
        await supervisor.finish([python("trainer", code, str(mark))])
    assert mark.exists()


async def test_restarts_are_bounded(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, restarts=1, watcher=Seen()) as supervisor:
        with pytest.raises(LaunchError, match="SIGKILL after 1 restarts"):
            await supervisor.finish([python("trainer", "import os; os.kill(os.getpid(), 9)")])


async def test_an_exception_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, restarts=5, watcher=Seen()) as supervisor:
        await supervisor.start([service("gateway")])
        gateway = psutil.Process(supervisor.pid("gateway"))
        with pytest.raises(LaunchError, match="rollout ended with exit code 1") as caught:
            await supervisor.finish([python("trainer", "import time; time.sleep(600)"), python("rollout", "1 / 0")])
        trainer = psutil.Process(supervisor.pid("trainer"))
    assert "ZeroDivisionError" in caught.value.detail["stderr"]
    assert not gateway.is_running()
    assert not trainer.is_running()


async def test_a_service_that_fails_while_another_is_awaited_ends_the_wait(tmp_path: Path) -> None:
    deaf = python("gateway", "import time; time.sleep(600)", url=f"http://127.0.0.1:{free_port()}")
    async with Supervisor(tmp_path, restarts=5, watcher=Seen()) as supervisor:
        with pytest.raises(LaunchError, match="engine-0 ended with exit code 1"):
            await supervisor.start([deaf, python("engine-0", "raise OSError('no weights')")])


async def test_a_process_that_ignores_term_is_killed_with_its_own_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    note = tmp_path / "pid"
    async with Supervisor(tmp_path, restarts=0, watcher=Seen(), grace_s=0.2) as supervisor:
        await supervisor.start([python("sandbox", code, str(note))])
        await until(lambda: note.exists() and note.read_text() != "")
        grandchild = psutil.Process(int(note.read_text()))
    await until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


async def test_an_interrupt_cleans_up(tmp_path: Path) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with Supervisor(tmp_path, restarts=0, watcher=Seen()) as supervisor:
            await supervisor.start([service("gateway")])
            pids.append(supervisor.pid("gateway"))
            os.kill(os.getpid(), signal.SIGINT)
            await supervisor.finish([python("trainer", "import time; time.sleep(600)")])

    with pytest.raises(asyncio.CancelledError):
        await interruptible(run)
    assert not psutil.pid_exists(pids[0])
