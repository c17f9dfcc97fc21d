"""Copies between this machine and a sandbox, of files and of folders as tar. Used by `agentrl sandbox cp`.

Invariant: what comes out of a sandbox is not trusted: nothing of it is written outside the target folder.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.core.errors import ConfigError, SandboxFileError
from sandbox.client import RemoteSandbox

Copy = Callable[[RemoteSandbox], Awaitable[int]]
"""Does the copy; returns how many bytes travelled."""


def put_file(source: Path, path: str) -> Copy:
    if not source.is_file():
        raise ConfigError(f"{source} is no file here (a folder's source ends in /)")
    target = f"{path}{source.name}" if not path or path.endswith("/") else path

    async def copy(sandbox: RemoteSandbox) -> int:
        data = source.read_bytes()
        await sandbox.write(target, data, mode=source.stat().st_mode & 0o777)
        return len(data)

    return copy


def get_file(path: str, target: Path) -> Copy:
    file = target / Path(path).name if target.is_dir() else target

    async def copy(sandbox: RemoteSandbox) -> int:
        return file.write_bytes(await sandbox.read(path))

    return copy


def put_folder(source: Path, path: str) -> Copy:
    if not source.is_dir():
        raise ConfigError(f"{source} is no folder here")

    async def copy(sandbox: RemoteSandbox) -> int:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(source, arcname=".")
        await sandbox.upload_tar(path or ".", buffer.getvalue())
        return buffer.tell()

    return copy


def get_folder(path: str, target: Path) -> Copy:
    async def copy(sandbox: RemoteSandbox) -> int:
        data = await sandbox.download_tar(path or ".")
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(target, filter="data")
        except tarfile.TarError as error:
            raise SandboxFileError(f"{path}: not all of it was unpacked here: {error}") from error
        return len(data)

    return copy
