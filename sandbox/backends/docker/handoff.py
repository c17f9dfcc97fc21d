"""The controller's end of a container's start: gives sandboxd its listener and configuration. Used by `backend`.

Invariant: the container sees only the socket of the hand-over, which is closed for good once it has happened; the
socket that commands come through lies beside it on the host, where nothing inside can reach it.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import Blame, Ran, SandboxError
from sandbox.runtime.handoff import SIZE


class Handoff:
    """Both sockets of one sandbox that is being created; listening from the constructor on."""

    def __init__(self, folder: Path, folder_fd: int, sandbox_id: str) -> None:
        self.path = folder.resolve() / f"{sandbox_id}.handoff"
        near = f"/proc/self/fd/{folder_fd}"
        self._listener = _bind(f"{near}/{sandbox_id}.sock", 0o600)
        try:
            # Root inside may be another user outside, under user namespaces; the folder keeps others of the host away.
            self._door = _bind(f"{near}/{sandbox_id}.handoff", 0o666)
        except OSError:
            self._listener.close()
            raise

    async def hand_over(self, config: Mapping[str, Any], died: asyncio.Future[str], *, within_s: float) -> str:
        """Give the container its listener and configuration. Returns "" when it serves, or why it does not.

        SandboxError when it cannot be set up as it is asked to be.
        """
        serving = asyncio.create_task(self._serve(config))
        try:
            await asyncio.wait({serving, died}, timeout=within_s, return_when="FIRST_COMPLETED")
            if serving.done() and (refusal := serving.result()):
                if refusal == "ok":
                    return ""
                raise SandboxError(f"sandboxd could not be set up: {refusal}", blame=Blame.CALLER, ran=Ran.NO)
            return died.result() if died.done() else f"it did not serve within {within_s:.0f} s"
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def _serve(self, config: Mapping[str, Any]) -> str:
        """Hand over to whoever connects. Returns `ok`, what went wrong, or "" when the other side died."""
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(self._door)
        with peer:
            data = json.dumps(config).encode()
            fds = array.array("i", [self._listener.fileno()])
            answer = b""
            try:
                peer.sendmsg([SIZE.pack(len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                await loop.sock_sendall(peer, data)
                while chunk := await loop.sock_recv(peer, 4096):
                    answer += chunk
            except ConnectionError:
                return ""
            return answer.decode(errors="replace")

    def close(self) -> None:
        """The door's file stays, as a socket that nobody listens on: the engine wants to find what it mounted."""
        self._listener.close()
        self._door.close()


def listens(folder_fd: int, sandbox_id: str) -> bool:
    """Whether anyone holds the listener of a sandbox: only its sandboxd does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"/proc/self/fd/{folder_fd}/{sandbox_id}.sock")
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _bind(path: str, mode: int) -> socket.socket:
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
