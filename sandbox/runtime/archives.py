"""What lies below a folder, and the folder as tar in pieces. Used by `files`, and by `layers` of the local backend.

Invariants: however large a folder is and however deep, little of it is in memory; nothing is asked of libc about users,
which would load what a task may have named in nsswitch.conf. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile

PIECE = 1 << 18
"""Bytes, or few more."""


def walk(root: str, *, device: int = -1) -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder, each folder before what is in it, and what vanishes meanwhile left out.

    With a `device`, folders on others are left out too.
    """
    left = [root]
    while left:
        folder = left.pop()
        try:
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(found.st_mode):
                if device not in (-1, found.st_dev):
                    continue
                left.append(path)
            yield path, found


def packed(root: str, most: int) -> Generator[bytes, None, None]:
    """A folder, or a file, as tar: symlinks as such, hard links as files, devices, pipes and sockets left out.

    OSError that says which file cannot be read, or that it all is more than `most` bytes.
    """
    total, piece = 0, bytearray()
    for part in _parts(root):
        total += len(part)
        if total > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes as tar")
        piece += part
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    # The end of an archive is two empty blocks, and fills its last record.
    yield bytes(piece) + bytes(1024 + -(total + 1024) % 10240)


def _parts(root: str) -> Iterator[bytes]:
    top = os.lstat(root)
    if not stat.S_ISDIR(top.st_mode):
        yield from _member(root, top, os.path.basename(root))
        return
    yield from _member(root, top, ".")
    for path, found in walk(root):
        yield from _member(path, found, "./" + os.path.relpath(path, root))


def _member(path: str, found: os.stat_result, name: str) -> Iterator[bytes]:
    import tarfile  # only here, since few sandboxes need it and all would pay for it in memory

    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    info.uid, info.gid = found.st_uid, found.st_gid
    try:
        if stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
            yield _head(info)
        elif stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            yield _head(info)
        elif stat.S_ISREG(found.st_mode):
            yield from _file(path, info)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from None


def _file(path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    # It may be something else by now, at which we must not stop.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        info.size = left = os.fstat(fd).st_size
        yield _head(info)
        while left:
            data = file.read(min(PIECE, left))
            if not data:
                raise OSError(errno.EIO, "became shorter while it was read")
            left -= len(data)
            yield data
    yield bytes(-info.size % 512)


def _head(info: tarfile.TarInfo) -> bytes:
    import tarfile

    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
