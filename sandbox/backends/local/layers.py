"""What a sandbox wrote, as one tar: packed from a frozen one, unpacked where another begins.

Used by `birth` and `errands`. Invariants: packing follows no symlink and stays on the device that it began on, which
holds what the task may write and nothing of the host's; what was the task's becomes the new owner's.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from typing import IO

from sandbox.runtime.archives import walk

KEPT = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO})
"""Not sockets, which are nothing without their processes, nor devices."""
MTIME_NS = "AGENTRL.mtime_ns"
"""Header with the time of the last change, in nanoseconds since 1970."""


def part_of(path: str) -> str:
    """Where an archive is until it is whole."""
    return f"{path}.part"


def pack(root: str, file: IO[bytes], limit: int) -> None:
    """Everything below `root`; OSError when that is more than `limit` bytes. A sparse file counts whole."""
    total = 0
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, found in walk(root, device=os.lstat(root).st_dev):
            if stat.S_IFMT(found.st_mode) not in KEPT:
                continue
            info = archive.gettarinfo(path, arcname=os.path.relpath(path, root))
            # Exactly, and of any year: a number with a fraction holds neither.
            info.mtime, info.pax_headers = 0, {MTIME_NS: str(found.st_mtime_ns)}
            total += info.size
            if total > limit:
                raise OSError(errno.EFBIG, f"its files take more than its disk limit of {limit} bytes")
            if info.isreg():
                with open(path, "rb") as content:
                    archive.addfile(info, content)
            else:
                archive.addfile(info)
    # Whoever packs may be a fork that ends without closing `file`.
    file.flush()


def unpack(root: str, file: IO[bytes], owner: int) -> None:
    """What is there already stays. Files of the old owner become those of `owner`; -1: all are the caller's."""
    folders = []
    if os.fstat(file.fileno()).st_size % tarfile.RECORDSIZE:
        # Of which `tarfile` would read what there is, and say nothing.
        raise OSError(errno.EIO, "the snapshot was cut short")
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for info in archive:
            target = os.path.join(root, info.name)
            if info.isdir():
                folders.append((target, info))
                if not os.path.isdir(target):
                    os.mkdir(target)
            elif not os.path.lexists(target):
                _make(root, target, info, archive)
                if not info.islnk():
                    _adorn(target, info, owner)
    # Last, since a folder may forbid what was just done in it; and inside out, for their times.
    for target, info in reversed(folders):
        _adorn(target, info, owner)


def _make(root: str, target: str, info: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    if info.issym():
        os.symlink(info.linkname, target)
    elif info.islnk():
        os.link(os.path.join(root, info.linkname), target, follow_symlinks=False)
    elif info.isfifo():
        os.mkfifo(target)
    else:
        content = archive.extractfile(info)
        assert content is not None, "a regular member has content"
        with open(target, "xb") as file:
            while block := content.read(1 << 18):
                file.write(block)


def _adorn(target: str, info: tarfile.TarInfo, owner: int) -> None:
    if owner >= 0:
        new = owner if info.uid else 0
        os.chown(target, new, new, follow_symlinks=False)
    if not info.issym():
        os.chmod(target, info.mode & 0o1777)
        changed = int(info.pax_headers[MTIME_NS])
        os.utime(target, ns=(changed, changed))
