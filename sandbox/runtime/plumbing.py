"""The descriptors between a command and us: three pipes, or one terminal. Used by `commands`.

Invariant: whatever could not be opened whole is closed again. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import os
from typing import Any

from sandbox.runtime.wire import Refused

END_OF_INPUT = b"\x04"
"""What a terminal's reader takes for the end of its input."""


class Ends:
    """Both ends of what a command reads and writes."""

    def __init__(self, theirs: tuple[int, ...], stdin: int, stdout: int, stderr: int, tty: str = "") -> None:
        self.theirs = theirs
        """The command's descriptors 0, 1 and 2."""
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        """Ours, none of which blocks; -1 for one that there is not."""
        self.tty = tty
        """Path of the terminal, "" for pipes."""
        for fd in self.ours:
            os.set_blocking(fd, False)

    @property
    def ours(self) -> list[int]:
        return [fd for fd in (self.stdin, self.stdout, self.stderr) if fd >= 0]

    def close_theirs(self) -> None:
        for fd in set(self.theirs):
            os.close(fd)

    def close_ours(self) -> None:
        for fd in self.ours:
            os.close(fd)


def pipes(*, stdin: bool) -> Ends:
    """Pipes for output, and for input where there is any to come."""
    out, err = os.pipe(), os.pipe()
    inp = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
    return Ends((inp[0], out[1], err[1]), inp[1], out[0], err[0])


def terminal(size: dict[str, Any]) -> Ends:
    """A terminal of `size`; all that is written to it comes out as stdout."""
    rows, columns = size.get("rows", 24), size.get("columns", 80)
    try:
        ours, theirs = os.openpty()
    except OSError as error:
        raise Refused(501, "UNSUPPORTED", f"there are no terminals in this sandbox: {error.strerror}") from None
    try:
        resize(ours, rows, columns)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return Ends((theirs, theirs, theirs), os.dup(ours), ours, -1, os.ttyname(theirs))


def resize(fd: int, rows: int, columns: int) -> None:
    """Tell a terminal its size; the kernel tells what runs in it."""
    import fcntl  # only here: few sandboxes have terminals
    import struct
    import termios

    if not (0 < rows < 1 << 16 and 0 < columns < 1 << 16):
        raise ValueError("rows and columns must be from 1 to 65535")
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
