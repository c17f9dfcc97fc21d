"""`agentrl sandbox shell` and `logs -f` as a person has them: on a terminal, in a pipe, and cut short."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from sandboxes import TOKEN, ControllerProcess, sh

from agentrl.core.types import ExecRequest, ProcessRequest, SandboxSpec
from sandbox.client import RemoteSandbox, SandboxClient

PATIENCE_S = 20.0
SWEEP_S = 3.0
"""How often the controller sweeps."""


class Terminal:
    """A person's terminal: `agentrl sandbox WORDS` runs on it."""

    def __init__(self, url: str, *words: str) -> None:
        self.ours, self._theirs = pty.openpty()
        self.resize(40, 120)
        self.before = termios.tcgetattr(self.ours)
        ends = {"stdin": self._theirs, "stdout": self._theirs, "stderr": self._theirs}
        self.run = subprocess.Popen(
            command(*words), **ends, env=environment(url), start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.shown = b""

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def until(self, wanted: bytes) -> bytes:
        """What was shown up to and with `wanted`, since the last time."""
        while wanted not in self.shown:
            assert select.select([self.ours], [], [], PATIENCE_S)[0], f"{wanted!r} did not come, but {self.shown!r}"
            self.shown += os.read(self.ours, 65536)
        seen, self.shown = self.shown[: self.shown.index(wanted) + len(wanted)], self.shown.partition(wanted)[2]
        return seen

    def close(self) -> None:
        os.close(self.ours)
        os.close(self._theirs)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.ours) == self.before


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", "sandbox", *words]


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "AGENTRL_SANDBOX_URL": url, "AGENTRL_TOKEN": TOKEN, "TERM": "dumb", "COLUMNS": "100"}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner) -> Iterator[ControllerProcess]:
    made = ControllerProcess(tmp_path_factory.mktemp("controller"))
    runner.run(made.start())
    yield made
    runner.run(made.signal(signal.SIGTERM))


@pytest.fixture(scope="module")
def client(controller: ControllerProcess, runner: asyncio.Runner) -> Iterator[SandboxClient]:
    made = SandboxClient(controller.url, token=TOKEN)
    yield made
    runner.run(made.close())


@pytest.fixture
def sandbox(client: SandboxClient, runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[RemoteSandbox]:
    spec = SandboxSpec(files={"note.txt": "hello\n"}, env={"PS1": "in $PWD$ "}, ttl_s=30.0)
    view = runner.run(client.create(spec, owner="test", key=request.node.name))
    yield client.handle(view.id)
    runner.run(client.handle(view.id).close())


@pytest.fixture
def on_terminal(controller: ControllerProcess, sandbox: RemoteSandbox) -> Iterator[Terminal]:
    """A shell of `sh`, at its first prompt."""
    with opened(controller, "shell", sandbox.id, "sh") as terminal:
        terminal.until(b"$ ")
        yield terminal


@contextmanager
def opened(controller: ControllerProcess, *words: str) -> Iterator[Terminal]:
    terminal = Terminal(controller.url, *words)
    try:
        yield terminal
    finally:
        terminal.run.kill()
        terminal.run.wait()
        terminal.close()


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_shell_keeps_its_state_and_its_exit_code_is_ours(on_terminal: Terminal) -> None:
    on_terminal.type(b"mkdir -p 'a b' && cd 'a b' && who=me\n")
    on_terminal.until(b"/work/a b$ ")
    on_terminal.type(b'echo "I am $who"; test -t 0 && test -t 2 && echo on a terminal\n')
    on_terminal.until(b"I am me\r\non a terminal\r\n")
    on_terminal.type(b"exit 7\n")
    assert on_terminal.run.wait(PATIENCE_S) == 7
    assert on_terminal.is_as_before


def test_its_size_follows_ours(on_terminal: Terminal) -> None:
    on_terminal.type(b"stty size\n")
    on_terminal.until(b"40 120\r\n")
    on_terminal.until(b"$ ")
    on_terminal.resize(11, 77)
    on_terminal.type(b"while :; do stty size; sleep 0.1; done\n")
    on_terminal.until(b"11 77\r\n")
    on_terminal.type(b"\x03")
    on_terminal.until(b"$ ")


def test_ctrl_c_reaches_what_runs_and_ctrl_d_ends(on_terminal: Terminal) -> None:
    on_terminal.type(b"sh -c 'echo wait''ing; exec sleep 1000'\n")
    on_terminal.until(b"waiting\r\n")
    on_terminal.type(b"\x03")
    on_terminal.until(b"$ ")
    on_terminal.type(b"echo code $?\n")
    on_terminal.until(b"code 130\r\n")
    on_terminal.until(b"$ ")
    on_terminal.type(b"(exit 9)\n\x04")
    assert on_terminal.run.wait(PATIENCE_S) == 9
    assert on_terminal.is_as_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_before(
    number: signal.Signals, on_terminal: Terminal, sandbox: RemoteSandbox, runner: asyncio.Runner
) -> None:
    assert not on_terminal.is_as_before
    on_terminal.run.send_signal(number)
    assert on_terminal.run.wait(PATIENCE_S) == 128 + number
    assert on_terminal.is_as_before
    (left,) = runner.run(sandbox.processes())
    assert left.status == "SIGNALED", "the shell must not go on without us"


def test_a_sandbox_that_ends_ends_the_shell(
    on_terminal: Terminal, sandbox: RemoteSandbox, runner: asyncio.Runner
) -> None:
    runner.run(sandbox.close())
    on_terminal.until(b"SANDBOX_LOST")
    assert on_terminal.run.wait(PATIENCE_S) == 1
    assert on_terminal.is_as_before


def test_an_idle_shell_keeps_its_lease(
    controller: ControllerProcess, client: SandboxClient, runner: asyncio.Runner
) -> None:
    view = runner.run(client.create(SandboxSpec(env={"PS1": "$ "}, ttl_s=1.0), owner="test", key="idle"))
    with opened(controller, "shell", view.id, "sh") as terminal:
        terminal.until(b"$ ")
        time.sleep(2 * SWEEP_S)
        terminal.type(b"echo still he''re\n")
        terminal.until(b"still here\r\n")
    eventually(lambda: not any(found.id == view.id for found in runner.run(client.list())))


def test_a_controller_that_restarts_is_waited_for(
    on_terminal: Terminal, controller: ControllerProcess, runner: asyncio.Runner
) -> None:
    on_terminal.type(b"kept=here\n")
    on_terminal.until(b"$ ")
    runner.run(controller.signal(signal.SIGKILL))
    runner.run(controller.start())
    eventually(lambda: answers(controller, runner))
    on_terminal.type(b"echo still $kept\n")
    on_terminal.until(b"still here\r\n")


def answers(controller: ControllerProcess, runner: asyncio.Runner) -> bool:
    async def ask() -> bool:
        client = SandboxClient(controller.url, token=TOKEN)
        try:
            await client.list()
        finally:
            await client.close()
        return True

    return runner.run(ask())


def test_a_pipe_is_read_as_a_script(controller: ControllerProcess, sandbox: RemoteSandbox) -> None:
    script = b"cat note.txt; echo no >&2\ntest -t 0 || echo no terminal\nexit 5\n"
    ran = subprocess.run(
        command("shell", sandbox.id), input=script, capture_output=True, env=environment(controller.url), check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (5, b"hello\nno terminal\n", b"no\n")


def test_a_pipe_carries_bytes_both_ways(controller: ControllerProcess, sandbox: RemoteSandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    (tmp_path / "data").write_bytes(data)
    with (tmp_path / "data").open("rb") as file:
        ran = subprocess.run(
            command("shell", sandbox.id, "cat"), stdin=file, capture_output=True, env=environment(controller.url),
            check=True,
        )  # fmt: skip
    assert ran.stdout == data


def test_a_shell_that_ends_early_does_not_wait_for_the_pipe(
    controller: ControllerProcess, sandbox: RemoteSandbox
) -> None:
    run = subprocess.Popen(
        command("shell", sandbox.id, "sh", "-c", "exit 3"), stdin=subprocess.PIPE, env=environment(controller.url)
    )
    assert run.wait(PATIENCE_S) == 3
    assert run.stdin is not None
    run.stdin.close()


def test_logs_follow_commands_and_processes_until_the_sandbox_ends(
    controller: ControllerProcess, sandbox: RemoteSandbox, runner: asyncio.Runner
) -> None:
    runner.run(sandbox.exec(ExecRequest(argv=("echo", "before")), key="old"))
    with opened(controller, "logs", "-f", sandbox.id) as terminal:
        terminal.until(b"before\r\n[EXITED 0")
        runner.run(sandbox.exec(sh("echo now; echo wrong >&2; exit 4"), key="new"))
        terminal.until(b"new\r\nnow\r\nwrong\r\n[EXITED 4")
        request = ProcessRequest(argv=("sh", "-c", "echo first; read line; echo then $line"), interactive=True)
        runner.run(sandbox.start(request, key="server"))
        terminal.until(b"first\r\n")
        runner.run(sandbox.send_input("server", b"input\n"))
        terminal.until(b"then input\r\n[EXITED 0]")
        runner.run(sandbox.close())
        terminal.until(b"CLOSED: closed]")
        assert terminal.run.wait(PATIENCE_S) == 0


def test_logs_show_processes_as_they_are(
    controller: ControllerProcess, sandbox: RemoteSandbox, runner: asyncio.Runner
) -> None:
    runner.run(sandbox.start(ProcessRequest(argv=("sh", "-c", "echo up; exec sleep 1000")), key="server"))
    eventually(lambda: runner.run(sandbox.process("server")).stdout_total > 0)
    with opened(controller, "logs", "--key", "server", sandbox.id) as terminal:
        terminal.until(b"up\r\n[RUNNING ]")
        assert terminal.run.wait(PATIENCE_S) == 0
