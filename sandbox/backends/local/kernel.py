"""The Linux calls that Python 3.11 lacks: unshare, setns, mount, pivot_root, prctl. Used by its neighbours here.

Invariant: a call that fails raises OSError naming the call and what it was applied to.
"""

from __future__ import annotations

import ctypes
import errno
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 28, 38
NOROOT_LOCKED = 0b11
"""SECBIT_NOROOT and its lock: uid 0 regains no capability by executing a file."""
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    args = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*args), f"mount {source} on {target}")


def pivot_root(folder: str) -> None:
    """Make `folder`, a mount point, the root, and let go of the old one."""
    os.chdir(folder)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, b".", b"."), f"pivot_root {folder}")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {what}")


def drop_bounding_set() -> None:
    """Whatever is executed from now on gains no capability; those held now stay."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            # EINVAL: the kernel has no capability of this number, nor of a higher one.
            _check(ctypes.get_errno() != errno.EINVAL, f"prctl CAPBSET_DROP {capability}")
            return


def clear_capabilities() -> None:
    """Empty this thread's effective, permitted and inheritable sets (capset, version 3)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
