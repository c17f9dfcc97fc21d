"""What keeps a runtime safe from the tasks that run beside it, in the same image. Used by `handoff`, `pod` and `carry`.

Invariants: no task may trace the runtime or read its memory; nothing that a task may write is imported into it.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from importlib.machinery import PathFinder

PR_SET_DUMPABLE = 4
LATER = (
    "bz2", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "fcntl", "gzip", "lzma", "struct", "subprocess",
    "tarfile", "termios", "unicodedata",
)  # fmt: skip
"""What is otherwise imported by the first request that needs it."""
UNHEARD = ("LD_AUDIT", "LD_PRELOAD")
"""Variables that a loader obeys; backends leave them empty for the Python that they bring."""


def given_environment() -> dict[str, str]:
    """What the image and whoever started us set; Python may have added a locale of its own to os.environ."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(pair).partition("=") for pair in file.read().split(b"\0") if b"=" in pair]
    return {name: value for name, _, value in pairs if value or name not in UNHEARD}


def hide_memory() -> None:
    """OSError where the kernel refuses it, or where a task was faster and traces us already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    with open("/proc/self/status") as status:
        if any(line.split() != ["TracerPid:", "0"] for line in status if line.startswith("TracerPid:")):
            raise PermissionError(1, "a task traces the runtime")


def import_no_more() -> None:
    """Import now all that may be needed, and nothing from a file afterwards: for where tasks may write the image."""
    for name in LATER:
        # An interpreter may come without some of them.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The first file with text looks for the locale's encoding, and the first terminal may load a library.
    with contextlib.suppress(OSError), open(os.devnull):
        for fd in os.openpty():
            os.close(fd)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not PathFinder]
