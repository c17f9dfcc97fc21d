"""`python -m agentrl.launch.child ROLE RUN_FOLDER [ARGUMENT]`: one process of a run. Started by the launcher only.

Invariant: it ends with its launcher, with exit code 0 only when its work is done, with a traceback on stderr and
exit code 1 when an exception ended it, and by the signal itself when a signal ended it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop

from agentrl.core.telemetry import setup_logging
from agentrl.launch.context import RoleContext, role_main
from agentrl.launch.endpoints import Endpoints
from agentrl.launch.layout import RunFolder

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the launcher ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


async def until_done_or_told(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; False when TERM cancelled it."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    # Not the loop's own handler: a server that shuts down in good order replaces this one meanwhile, and raises the
    # signal again afterwards.
    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(task.cancel))
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    die_with_parent()
    role, path, *rest = arguments
    folder = RunFolder(Path(path))
    config = folder.config()
    setup_logging(role, config.telemetry.log_level, folder.log(role))
    try:
        context = RoleContext(role, folder, config, Endpoints.read(folder.endpoints), *rest)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            done = runner.run(until_done_or_told(role_main(context)))
    except Exception:
        log.exception("%s ended by an exception", role)
        traceback.print_exc()
        return 1
    if not done:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
