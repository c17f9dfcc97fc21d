"""Processes on terminals, in real sandboxes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.core.types import ProcessRequest, TerminalSize
from sandbox.client import RemoteSandbox

SCRIPT = """
import os, signal, time
def tell(*_):
    size = os.get_terminal_size()
    os.write(1, b'size %d %d\\n' % (size.lines, size.columns))
signal.signal(signal.SIGWINCH, tell)
tell()
try:
    while True:
        time.sleep(60)
except KeyboardInterrupt:
    print('interrupted', input(), open('/dev/tty').isatty())
"""


async def until(sandbox: RemoteSandbox, wanted: bytes, then: Callable[[], Awaitable[object]]) -> None:
    """Wait for output, then go on."""
    seen = b""
    async for chunk in sandbox.follow("t"):
        seen += chunk.data
        if wanted in seen:
            await then()
            return
    raise AssertionError(f"{wanted!r} did not come, but {seen!r}")


async def test_a_terminal_has_a_size_a_keyboard_and_control_characters(
    sandbox: RemoteSandbox, python: tuple[str, ...]
) -> None:
    size = TerminalSize(rows=31, columns=101)
    await sandbox.start(ProcessRequest(argv=(*python, SCRIPT), tty=size), key="t")
    await until(sandbox, b"size 31 101\r\n", lambda: sandbox.resize("t", TerminalSize(rows=7, columns=77)))
    await until(sandbox, b"size 7 77\r\n", lambda: sandbox.send_input("t", b"\x03"))
    await sandbox.send_input("t", b"typed\n")
    ended = await sandbox.process("t", wait_s=20.0)
    assert (ended.status, ended.exit_code, ended.stderr_total) == ("EXITED", 0, 0)
    chunk = await sandbox.output("t")
    assert chunk.data.endswith(b"interrupted typed True\r\n")


async def test_terminals_of_two_sandboxes_are_apart(sandbox: RemoteSandbox, python: tuple[str, ...]) -> None:
    """Each has the first of its own."""
    async with sandbox.running(
        ProcessRequest(argv=(*python, "import os; print(os.ttyname(0))"), tty=TerminalSize())
    ) as process:
        assert (await process.wait()).exit_code == 0
        assert (await sandbox.output(process.id)).data == b"/dev/pts/0\r\n"
