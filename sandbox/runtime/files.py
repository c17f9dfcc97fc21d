"""Files inside a sandbox: whole, by range, and folders as tar. Routes of `sandboxd`.

Invariant: a relative path stays inside the workdir, symlinks included, and nothing of an archive is written outside
the folder that it is unpacked in. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Generator
from typing import TYPE_CHECKING

from sandbox.runtime.archives import PIECE, packed
from sandbox.runtime.wire import MAX_BODY, Refused

if TYPE_CHECKING:
    import tarfile

    from sandbox.runtime.sandboxd import Config
    from sandbox.runtime.wire import Connection

BINARY = "application/octet-stream"


def refused(path: str, why: str, status: int = 404) -> Refused:
    return Refused(status, "SANDBOX_FILE", f"{path}: {why}", blame="agent")


def check_digest(path: str, body: bytes, digest: str) -> None:
    if digest and hashlib.sha256(body).hexdigest() != digest:
        raise refused(path, "the bytes that arrived do not have the digest that was sent", 400)


class Files:
    """The routes /files and /tar."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._roots = [os.path.realpath(config.home), os.path.realpath(config.scratch or config.home)]

    def route(self, connection: Connection, route: str, query: dict[str, str], body: bytes) -> None:
        path = query["path"]
        if route == "GET /files":
            size, pieces = self._read(path, int(query.get("offset", "0")), int(query.get("length", "-1")))
            connection.stream(pieces, BINARY, f"x-size: {size}\r\n")
        elif route == "PUT /files":
            check_digest(path, body, query.get("sha256", ""))
            self._write(path, body, int(query.get("mode", "420")))
            connection.reply(200, b"{}")
        elif route == "GET /tar":
            connection.stream(self._pack(path), BINARY)
        elif route == "PUT /tar":
            check_digest(path, body, query.get("sha256", ""))
            self._unpack(path, body)
            connection.reply(200, b"{}")
        else:
            raise Refused(404, "NOT_FOUND", f"sandboxd has no route {route}")

    # --- paths ---------------------------------------------------------------------------------

    def real(self, path: str) -> str:
        """Where a path of the sandbox is. Relative ones stay inside the workdir, symlinks included."""
        config = self._config
        logical = os.path.normpath(os.path.join(config.workdir, path))
        real = logical
        for prefix, actual in ((config.workdir, config.home), ("/tmp", config.scratch)):
            if actual and (logical == prefix or logical.startswith(prefix.rstrip("/") + "/")):
                real = os.path.normpath(actual + "/" + logical[len(prefix) :])
                break
        resolved = os.path.realpath(real)
        if not os.path.isabs(path):
            self._inside(path, resolved, self._roots[:1])
        elif config.scratch:
            self._inside(path, resolved, self._roots)
        return resolved

    def _inside(self, path: str, resolved: str, roots: list[str]) -> None:
        for root in roots:
            if resolved == root or resolved.startswith(root.rstrip("/") + "/"):
                return
        raise refused(path, f"leads out of {self._config.workdir}", 403)

    # --- one file ------------------------------------------------------------------------------

    def _open(self, path: str, real: str, flags: int) -> int:
        """A regular file of the sandbox. NONBLOCK, since opening a FIFO must not stop the loop."""
        fd = os.open(real, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise refused(path, "not a regular file")
        return fd

    def _read(self, path: str, offset: int, length: int) -> tuple[int, Generator[bytes, None, None]]:
        """The file's size, and its bytes from `offset` on, `length` at most; all when that is negative."""
        if offset < 0:
            raise ValueError("offset must not be negative")
        try:
            fd = self._open(path, self.real(path), os.O_RDONLY)
        except OSError as error:
            raise refused(path, str(error.strerror)) from None
        most = MAX_BODY + 1 if length < 0 else min(length, MAX_BODY + 1)
        return os.fstat(fd).st_size, self._pieces(path, fd, offset, most)

    def _pieces(self, path: str, fd: int, offset: int, most: int) -> Generator[bytes, None, None]:
        """At most `most` bytes of an open file, which is closed then."""
        left = most
        try:
            with os.fdopen(fd, "rb", buffering=0) as file:
                file.seek(offset)
                # Told before anything is sent, if that is known; but a file may grow, and those of /proc have no size.
                if min(most, os.fstat(fd).st_size - offset) <= MAX_BODY:
                    data = file.read(min(PIECE, left))
                    while data:
                        left -= len(data)
                        yield data
                        data = file.read(min(PIECE, left))
                    if most - left <= MAX_BODY:
                        return
        except OSError as error:
            raise refused(path, str(error.strerror)) from None
        raise refused(path, f"larger than {MAX_BODY} bytes: read it by ranges", 413)

    def _write(self, path: str, data: bytes, mode: int) -> None:
        try:
            real = self.real(path)
            if not os.path.isdir(os.path.dirname(real)):
                os.makedirs(os.path.dirname(real))
            with os.fdopen(self._open(path, real, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.truncate(0)
                os.fchmod(file.fileno(), mode & 0o777)
                file.write(data)
        except OSError as error:
            raise refused(path, str(error.strerror)) from None

    def write_all(self, files: dict[str, str]) -> None:
        """The files of the spec, before anyone is served. Refused when one cannot be written."""
        for path, text in files.items():
            self._write(path, text.encode(), 0o644)

    # --- folders -------------------------------------------------------------------------------

    def _pack(self, path: str) -> Generator[bytes, None, None]:
        try:
            yield from packed(self.real(path), MAX_BODY)
        except OSError as error:
            raise refused(path, str(error.strerror), 413 if error.errno == errno.EFBIG else 404) from None

    def _unpack(self, path: str, data: bytes) -> None:
        """An archive into a folder, which is made. Names and kinds are checked before anything is written."""
        import tarfile

        try:
            folder = self.real(path)
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                members = archive.getmembers()
                for member in members:
                    check_member(path, member)
                if not os.path.isdir(folder):
                    os.makedirs(folder)
                for member in members:
                    _extract(path, folder, archive, member)
        except tarfile.TarError as error:
            raise refused(path, f"not a tar archive: {error}", 400) from None
        except OSError as error:
            raise refused(path, str(error.strerror or error)) from None


def check_member(path: str, member: tarfile.TarInfo) -> None:
    name = os.path.normpath(member.name)
    if os.path.isabs(name) or name.split("/")[0] == "..":
        raise refused(path, f"the archive's member {member.name!r} leads out of it", 403)
    if not (member.isreg() or member.isdir() or member.issym()):
        raise refused(path, f"the archive's member {member.name!r} is no file, folder or symlink", 403)
    # A symlink may point anywhere, as inside a running sandbox; what is refused is to write through one.


def _extract(path: str, folder: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    name = os.path.normpath(member.name)
    target = os.path.join(folder, name)
    parent = os.path.dirname(target) if name != "." else folder
    if os.path.realpath(parent) != os.path.normpath(parent):
        raise refused(path, f"the archive's member {member.name!r} leads through a symlink", 403)
    if not os.path.isdir(parent):
        os.makedirs(parent)
    if member.isdir():
        if os.path.islink(target):
            raise refused(path, f"the archive's member {member.name!r} leads through a symlink", 403)
        if not os.path.isdir(target):
            os.mkdir(target)
        return
    if os.path.lexists(target) and not os.path.isdir(target):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
        return
    content = archive.extractfile(member)
    assert content is not None, "a regular member has content"
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file, content:
        os.fchmod(fd, member.mode & 0o777)
        while True:
            block = content.read(1 << 18)
            if not block:
                break
            file.write(block)
