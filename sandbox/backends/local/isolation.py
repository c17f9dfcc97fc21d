"""What a local sandbox sees: its own namespaces, a read-only root, a private workdir and /tmp. Called by `forkserver`.

Invariant: nothing of the host is visible but the listed read-only folders; the host's homes, runtime folders and
the run's state are not among them, wherever that lies. After `drop_privileges` it holds no capability.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from typing import Any

from sandbox.backends.local import kernel as k

VISIBLE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt")
"""Folders of the host's root that a sandbox may read."""
EGRESS = "/run/agentrl/egress"
"""Where the folder with the way out is inside, if there is one."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS
FIRST_UID = 200_000
"""Sandbox number n runs as uid FIRST_UID + n, so that its process limit and its files are its own."""
MIN_DATA = 64 << 20
"""Bytes of data that the runtime itself needs; a smaller memory limit is raised to it."""
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def claim_namespaces() -> None:
    """Put the caller's children into a pid namespace of its own, with mounts that no longer reach the host."""
    flags = k.CLONE_NEWPID | k.CLONE_NEWNS
    if os.geteuid() == 0:
        k.unshare(flags)
    else:
        uid, gid = os.getuid(), os.getgid()
        k.unshare(flags | k.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    k.mount("none", "/", flags=k.MS_REC | k.MS_PRIVATE)


def build_template(folder: str) -> None:
    """Mount the read-only part of every sandbox once under `folder`; sandboxes bind from it."""
    hidden = _run_folder(folder)
    os.makedirs(folder, exist_ok=True)
    k.mount("tmpfs", folder, "tmpfs", k.MS_NOSUID, "mode=755,size=1m")
    for name in VISIBLE:
        source = f"/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"{folder}/{name}")
        elif os.path.isdir(source):
            _bind_read_only(source, f"{folder}/{name}", hidden)
    prefix = os.path.realpath(sys.base_prefix)
    if prefix.split("/")[1] not in VISIBLE:
        _bind_read_only(prefix, folder + prefix, hidden)
    os.mkdir(f"{folder}/dev")
    for name in DEVICES:
        _device(f"/dev/{name}", f"{folder}/dev/{name}")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{folder}/dev/{name}")
    os.symlink("/tmp", f"{folder}/dev/shm")
    os.mkdir(f"{folder}/dev/pts")
    os.symlink("pts/ptmx", f"{folder}/dev/ptmx")


def _run_folder(template: str) -> str:
    """What must stay hidden where it lies in a folder that is shown: the run's state, of which ours is a part."""
    own = os.path.dirname(template)
    run = os.path.dirname(own)
    return own if run.count("/") == 1 else run


def _bind_read_only(source: str, target: str, hidden: str) -> None:
    os.makedirs(target, exist_ok=True)
    k.mount(source, target, flags=k.MS_BIND)
    walls = k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV
    k.mount("none", target, flags=k.MS_REMOUNT | k.MS_BIND | walls)
    below = target + hidden[len(source) :]
    if hidden.startswith(f"{source}/") and os.path.isdir(below):
        k.mount("tmpfs", below, "tmpfs", walls | k.MS_NOEXEC, "mode=555,size=4k")


def _device(source: str, target: str) -> None:
    try:
        os.mknod(target, 0o666 | stat.S_IFCHR, os.stat(source).st_rdev)
        os.chmod(target, 0o666)
    except PermissionError:
        # A user namespace may not make devices, but it may show the host's.
        os.close(os.open(target, os.O_CREAT))
        k.mount(source, target, flags=k.MS_BIND)


def enter(template: str, mount_point: str, name: str, owner: int, spec: Mapping[str, Any], *, egress: str = "") -> None:
    """Turn the calling process, the first of a new pid namespace, into the init of a sandbox that `owner` works in.

    `egress` is a folder of the host to show at EGRESS, or empty.
    Every call here is paid for by every sandbox; what can be done once is in `build_template` and `forswear`.
    """
    k.unshare(NAMESPACES)
    socket.sethostname(name)
    _loopback_up()
    size = f"mode=755,size={spec['limits']['disk_mb']}m"
    k.mount("tmpfs", mount_point, "tmpfs", k.MS_NOSUID | k.MS_NODEV, size)
    for entry in os.scandir(template):
        inside = f"{mount_point}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), inside)
        else:
            os.mkdir(inside)
            k.mount(entry.path, inside, flags=k.MS_BIND | k.MS_REC)
    if egress:
        _bind_read_only(egress, mount_point + EGRESS, hidden="")
    os.mkdir(f"{mount_point}/proc")
    k.mount("proc", f"{mount_point}/proc", "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC)
    k.pivot_root(mount_point)
    # Without them, a request for a terminal says so.
    with contextlib.suppress(OSError):
        k.mount("devpts", "/dev/pts", "devpts", k.MS_NOSUID | k.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    os.mkdir("/tmp")
    os.chmod("/tmp", 0o1777)
    os.mkdir("/var")
    os.symlink("/tmp", "/var/tmp")
    workdir = spec["workdir"]
    if not os.path.isdir(workdir):
        os.makedirs(workdir)
    os.chown(workdir, owner, owner)


def limit_resources(memory_mb: int | None, pids: int | None) -> None:
    """Memory per process and processes per uid, which is all that rlimits can say.

    `memory_mb` is None where a cgroup limits the sandbox as a whole; `pids` where sandboxes share a uid: the limit
    would count them all together.
    """
    values = {resource.RLIMIT_CORE: 0}
    if memory_mb is not None:
        values[resource.RLIMIT_DATA] = max(memory_mb << 20, MIN_DATA)
    if pids is not None:
        values[resource.RLIMIT_NPROC] = pids
    for kind, value in values.items():
        _, hard = resource.getrlimit(kind)
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))


def forswear() -> None:
    """Give up, for all that we fork, to gain privileges by executing something. Done once, by the fork server."""
    k.drop_bounding_set()
    k.prctl(k.PR_SET_SECUREBITS, k.NOROOT_LOCKED, "SET_SECUREBITS")
    k.prctl(k.PR_SET_NO_NEW_PRIVS, 1, "SET_NO_NEW_PRIVS")


def drop_privileges(uid: int) -> None:
    """Become `uid` (0: stay who we are) and hold no capability any more."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    k.clear_capabilities()
    # No task may trace us or read our memory, also where it runs under the same uid.
    k.prctl(k.PR_SET_DUMPABLE, 0, "SET_DUMPABLE")


def has_many_uids() -> bool:
    """Whether this user namespace has more than our own uid."""
    with open("/proc/self/uid_map") as file:
        return any(int(line.split()[2]) > FIRST_UID for line in file)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def probe(folder: str) -> str:
    """Why this kernel gives us no sandbox namespaces; "" when it does. Tried out in a child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            claim_namespaces()
            build_template(f"{folder}/root")
            inner = os.fork()
            if inner == 0:
                limits = {"disk_mb": 1}
                enter(f"{folder}/root", f"{folder}/mnt", "probe", 0, {"limits": limits, "workdir": "/work"})
                os._exit(0)
            _, status = os.waitpid(inner, 0)
            os._exit(0 if status == 0 else 1)
        except BaseException as error:
            os.write(write, str(error).encode())
            os._exit(1)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with open(read, "rb") as pipe:
        why = pipe.read().decode()
    return "" if status == 0 else why or "a namespace could be made but not entered"
