"""The local backend's cgroups on recorded trees: v2 as systemd lays it out, v1 with a hierarchy each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.backends.local.cgroups import Cgroups, find

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "32 31 0:29 /docker/c1 /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "40 31 0:37 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
LIMITS = {"memory_mb": 100, "disk_mb": 28, "pids": 7, "cpus": 1.5}


def record(root: Path, mounts: str, own: str, files: dict[str, str]) -> None:
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(mounts)
    (proc / "cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def placed(groups: Cgroups, counter: str, text: str) -> None:
    """Place a sandbox; a real kernel makes the counter's file with the folder."""
    path = Path(groups.bases["memory"]) / "sb-1" / counter
    path.parent.mkdir(parents=True)
    path.write_text(text)
    fd = groups.place("sb-1", LIMITS)
    assert os.pread(fd, 100, 0) == text.encode()
    os.close(fd)


def test_v2_takes_the_nearest_ancestor_that_can_have_children_with_controllers(tmp_path: Path) -> None:
    scope = "user.slice/user-0.slice/session-1.scope"
    record(tmp_path, V2_MOUNT, f"0::/{scope}\n", {
        "cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma\n",
        "user.slice/cgroup.controllers": "cpu memory pids\n",
        "user.slice/user-0.slice/cgroup.controllers": "memory pids\n",
        f"{scope}/cgroup.controllers": "memory pids\n",
    })  # fmt: skip
    groups = find("agentrl-x", str(tmp_path))
    base = tmp_path / "sys/fs/cgroup/user.slice/agentrl-x"
    assert groups.unified
    assert set(groups.bases.values()) == {str(base)}
    for folder in (base, base.parent):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (base / "memory.swap.max").write_text("max\n")
    placed(groups, "memory.events", "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n")
    written = {name: (base / "sb-1" / name).read_text() for name in os.listdir(base / "sb-1")}
    del written["memory.events"]
    assert written == {
        "memory.max": str(128 << 20),
        "memory.swap.max": "0",
        "pids.max": "7",
        "cpu.max": "150000 100000",
        "cgroup.procs": "0",
    }
    assert groups.oom_kills("sb-1") == 2
    assert groups.oom_kills("sb-of-nobody") == 0


def test_v2_without_the_controllers_says_so(tmp_path: Path) -> None:
    record(tmp_path, V2_MOUNT, "0::/\n", {"cgroup.controllers": "hugetlb\n"})
    with pytest.raises(OSError, match="has the controllers memory, pids, cpu"):
        find("agentrl-x", str(tmp_path))


def test_v1_writes_to_each_hierarchy(tmp_path: Path) -> None:
    own = "9:pids:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/docker/c1/inner\n1:name=systemd:/\n0::/\n"
    record(tmp_path, V1_MOUNTS, own, {"memory/jobs/7/agentrl-x/memory.memsw.limit_in_bytes": "9\n"})
    groups = find("agentrl-x", str(tmp_path))
    top = f"{tmp_path}/sys/fs/cgroup"
    assert not groups.unified
    assert groups.bases == {
        "memory": f"{top}/memory/jobs/7/agentrl-x",
        "cpu": f"{top}/cpu,cpuacct/inner/agentrl-x",
        "pids": f"{top}/pids/agentrl-x",
    }
    placed(groups, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert Path(groups.bases["cpu"], "sb-1/cpu.cfs_quota_us").read_text() == "150000"
    assert Path(groups.bases["memory"], "sb-1/memory.memsw.limit_in_bytes").read_text() == str(128 << 20)
    assert all(Path(base, "sb-1/tasks").read_text() == "0" for base in groups.bases.values())
    assert groups.oom_kills("sb-1") == 4


def test_nothing_mounted_says_so(tmp_path: Path) -> None:
    record(tmp_path, "", "0::/\n", {})
    with pytest.raises(OSError, match="no cgroup hierarchy"):
        find("agentrl-x", str(tmp_path))
