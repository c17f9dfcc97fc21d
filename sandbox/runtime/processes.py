"""Processes inside a sandbox: starting one, finding and killing its whole tree, OOM kills. Used by `commands`.

Invariant: a descendant is found by its parents or, once orphaned to us (the subreaper), by the mark that it inherited
as a resource limit, or else in its environment. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

MARKER = "AGENTRL_COMMAND"
"""Environment variable that names the command a process belongs to."""
RLIMIT_RTTIME, MARKS = 15, 1 << 61
"""The limit of time at real-time priority, which nobody here has. Its soft value is inherited by all that a command
starts, whatever that does to its session and its environment, and seen by all: so one from MARKS on is a mark."""
OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
PR_SET_CHILD_SUBREAPER = 36
CAP_SETUID = 7
LOOKS = 3
"""How often in a row nobody must be seen until nobody is there."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


_libc = ctypes.CDLL(None, use_errno=True)


def set_subreaper() -> None:
    """Orphans below us become our children, as if we were the init."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def processes() -> dict[int, tuple[int, float]]:
    """Every live process that we see: pid to (parent's pid, start in seconds since boot). Zombies are left out."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            table[int(name)] = (int(fields[1]), int(fields[19]) / CLOCK_TICKS)
    return table


def descendants(roots: set[int], table: dict[int, tuple[int, float]]) -> set[int]:
    """The roots and all below them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found, queue = set(), list(roots)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return found


@contextlib.contextmanager
def marked(marker: str) -> Iterator[None]:
    """What is started meanwhile bears the command's mark, where this kernel has such limits."""
    soft, hard = resource.getrlimit(RLIMIT_RTTIME)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(RLIMIT_RTTIME, (_mark(marker), hard))
    try:
        yield
    finally:
        resource.setrlimit(RLIMIT_RTTIME, (soft, hard))


def bears(pid: int, marker: str) -> bool:
    """Whether a process has the mark of that command."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            line = next((line for line in file if line.startswith(b"Max realtime timeout")), b"")
    except OSError:
        return False
    return b" %d " % _mark(marker) in line


def _mark(marker: str) -> int:
    return MARKS + int(hashlib.sha256(marker.encode(errors="surrogatepass")).hexdigest()[:15], 16)


def marker_of(pid: int) -> str | None:
    """Which command a process belongs to; None when its environment does not say."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return None
    for pair in environ.split(b"\0"):
        if pair.startswith(MARKER.encode() + b"="):
            # A task may have put anything there.
            return pair.partition(b"=")[2].decode(errors="replace")
    return None


def kill_all(victims: Callable[[], set[int]], within_s: float = 5.0) -> None:
    """STOP until nobody new appears, then KILL: one that is stopped keeps its place under the process limit, so what
    forks faster than we look comes to its end there. Again until nobody is left, which takes a process a moment, and
    longer where its cgroup has used up its CPU time. One look may miss what was forked during it: `LOOKS` settle it."""
    stopped: set[int] = set()
    until, empty = time.monotonic() + within_s, 0
    while empty < LOOKS and time.monotonic() < until:
        alive = victims()
        empty = 0 if alive else empty + 1
        if not alive:
            continue
        fresh = alive - stopped
        for pid in fresh or alive:
            send(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
        if not fresh:
            time.sleep(0.001)
            stopped = {pid for pid in stopped if pid in alive}
        stopped |= fresh


def send(pid: int, number: int) -> bool:
    """Signal a process; False when it is gone, or is not ours to signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: tuple[int, ...], user: str = "", tty: str = "") -> int:
    """Start `argv` in a session of its own, which `tty` controls, and return its pid. OSError when it cannot be."""
    path = find(argv[0], env.get("PATH", ""), cwd)
    os.chdir(cwd)
    if user or not hasattr(os, "posix_spawn"):
        return _spawn_as(path, argv, env, stdio, user, tty)
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
    if tty:
        # Whoever leads a session and opens a terminal is controlled by it.
        actions.append((os.POSIX_SPAWN_OPEN, 0, tty, os.O_RDWR, 0))
    defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT]
    return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=defaults)


def _spawn_as(path: str, argv: list[str], env: dict[str, str], stdio: tuple[int, ...], user: str, tty: str) -> int:
    """By fork and exec: posix_spawn is of Python 3.8, and cannot become another user."""
    import subprocess  # only here, since it doubles what the runtime keeps in memory

    become = become_user(user) if user else None
    stdin, stdout, stderr = stdio[:3]

    def prepare() -> None:
        for number, fd in enumerate(stdio[3:], 3):
            os.dup2(fd, number)
        if tty:
            os.dup2(os.open(tty, os.O_RDWR), 0)
        if become is not None:
            become()

    try:
        process = subprocess.Popen(
            argv, executable=path, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
            preexec_fn=prepare, pass_fds=range(3, len(stdio)),
        )  # fmt: skip
    except subprocess.SubprocessError:
        raise PermissionError(1, f"may not become user {user!r}") from None
    # Its end is ours to collect: a Popen with a return code does not look for one.
    process.returncode = 0
    return process.pid


def may_change_user() -> bool:
    """Whether we have the capability to."""
    try:
        with open("/proc/self/status") as status:
            effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return os.geteuid() == 0
    return bool(effective & 1 << CAP_SETUID)


def become_user(user: str) -> Callable[[], None]:
    """What turns a child into `user`: a name of /etc/passwd, or a uid. OSError when there is no such name."""
    field = 2 if user.isdigit() else 0
    entry = next((fields for fields in _entries("/etc/passwd") if fields[field] == user and fields[3].isdigit()), None)
    if entry is None and not user.isdigit():
        raise FileNotFoundError(2, f"no user {user!r} in /etc/passwd")
    uid, gid = (int(entry[2]), int(entry[3])) if entry else (int(user), int(user))
    member = [int(f[2]) for f in _entries("/etc/group") if entry and entry[0] in f[3].split(",")]
    groups = sorted({gid, *member}) if entry else []

    def become() -> None:
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)

    return become


def _entries(path: str) -> list[list[str]]:
    """The lines of an account file. Not asked of libc, which would load what a task may have named in nsswitch.conf."""
    try:
        # A task may have put a FIFO there, which must not stop us.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="surrogateescape") as file:
            found = [line.split(":") for line in file.read(1 << 20).split("\n")]
    except FileNotFoundError:
        return []
    return [fields for fields in found if len(fields) >= 4 and fields[2].isdigit()]


def find(program: str, path: str, cwd: str) -> str:
    """The file to execute, looked up as a shell would."""
    if "/" in program:
        return program
    for folder in path.split(":"):
        full = os.path.join(cwd, folder, program)
        if os.access(full, os.X_OK) and not os.path.isdir(full):
            return full
    raise FileNotFoundError(2, f"{program}: not found in PATH {path}")


def oom_counter() -> int:
    """A descriptor of the file that counts the kernel's kills for memory in our cgroup; -1 where none is visible."""
    for path in OOM_FILES:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def oom_kills(counter: int) -> int:
    """How often that was so far."""
    if counter < 0:
        return 0
    for line in os.pread(counter, 4096, 0).splitlines():
        name, _, count = line.partition(b" ")
        if name == b"oom_kill":
            return int(count)
    return 0
