"""What a sandbox is as a container, and what a container's end means: pure functions. Used by `backend`.

Invariant: a container has its labels from its creation on, no capability but what sandboxd keeps to itself, no more
than its limits, and nothing of the host's but the runtime, read-only.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, Ran, SandboxError
from agentrl.core.types import SandboxSpec
from sandbox.runtime.handoff import PATH
from sandbox.runtime.hardening import UNHEARD
from sandbox.runtime.interpreter import PLACE, command
from sandbox.runtime.sandboxd import LEASE_ENDED

CONTROLLER, SANDBOX, OWNER = "agentrl.controller", "agentrl.sandbox", "agentrl.owner"
"""Labels: whose container it is, which sandbox, and for whom."""
SNAPSHOT, REPOSITORY = "agentrl.snapshot", "agentrl-snapshot"
"""Label of images: which snapshot they are; and what their names begin with."""
CARRIERS = 8
"""Processes that carry commands into a container, beside those of the task, where there are any."""
INSIDE = posixpath.dirname(PATH)
EGRESS, PROXY = f"{INSIDE}/egress", "proxy.sock"
"""The folder with the way out, and its socket there."""
RUNTIME = PLACE
"""Where a container sees the Python and the sandboxd that it is brought."""
START = "from sandbox.runtime.handoff import main; main()"
MIB = 1 << 20
QUOTA_DRIVERS = ("btrfs", "zfs", "devicemapper", "windowsfilter")


def image_of(spec: SandboxSpec, config: DockerConfig) -> str:
    image = spec.image or config.image
    if not image:
        message = "a container needs an image: set the spec's image, or sandbox.docker.image for those without"
        raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)
    if REPOSITORY in image:
        # By its own name it would be there for every tenant.
        raise SandboxError(f"image {image!r} is a snapshot: name it as such", blame=Blame.CALLER, ran=Ran.NO)
    return image


def volumes(spec: SandboxSpec) -> tuple[str, ...]:
    """What is a volume in memory, where nothing else may be written to."""
    return tuple(dict.fromkeys((spec.workdir.rstrip("/") or "/", "/tmp")))


@dataclass(frozen=True, slots=True)
class Start:
    """How sandboxd begins in a container, and what it gets."""

    mounts: tuple[Mapping[str, Any], ...]
    """One of them is the runtime."""
    code: str
    """What its Python runs."""
    config: str = ""
    """JSON in its arguments; empty where it comes by a mounted socket."""
    env: Mapping[str, str] = field(default_factory=dict)


def handed_over(runtime: Path, handoff: Path, egress: Path | None = None) -> Start:
    """With what lies on this machine."""
    sources = {RUNTIME: runtime, PATH: handoff} | ({EGRESS: egress} if egress is not None else {})
    mounts = ({"Type": "bind", "Source": str(s), "Target": t, "ReadOnly": True} for t, s in sources.items())
    return Start(tuple(mounts), START)


def creation(
    sandbox_id: str, spec: SandboxSpec, config: DockerConfig, image: str, *, controller: str, owner: str, start: Start
) -> Any:  # fmt: skip
    """The body of the engine's request to create it."""
    host = {**_limits(spec, config), **_walls(config), "Mounts": list(start.mounts)}
    if config.disk == "tmpfs":
        host["Mounts"] += [_volume(path, spec.limits.disk_mb, controller) for path in volumes(spec)]
    if config.users:
        # For sandboxd, which gives up SETPCAP at once, and of the others passes nothing on to commands.
        host["CapAdd"] = ["SETUID", "SETGID", "KILL", "SETPCAP"]
    if start.config:
        host["PidsLimit"] += CARRIERS
    return {
        "Image": image,
        "Entrypoint": command(RUNTIME, start.code),
        "Cmd": [start.config] if start.config else [],
        "Env": [f"{name}={value}" for name, value in {**dict.fromkeys(UNHEARD, ""), **start.env}.items()],
        "User": "0:0",
        "Hostname": "sandbox",
        "WorkingDir": "/",
        "StopTimeout": 1,  # of an engine that stops, since an init is deaf to TERM
        "Labels": {CONTROLLER: controller, SANDBOX: sandbox_id, OWNER: owner},
        "HostConfig": host,
    }


def without_quotas(info: Mapping[str, Any]) -> str:
    """Why an engine cannot limit a container's writable layer, from what it says of itself; "" when it can."""
    driver, facts = info["Driver"], dict(pair for pair in info.get("DriverStatus") or () if len(pair) == 2)
    if driver in QUOTA_DRIVERS:
        return ""
    on = facts.get("Backing Filesystem", "an unknown file system")
    if driver == "overlay2" and on == "xfs":
        return ""  # and mounted with pquota, which only a creation shows
    return f"the engine's storage driver {driver} on {on} has no quotas: overlay2 has them on xfs mounted with pquota"


def _limits(spec: SandboxSpec, config: DockerConfig) -> dict[str, Any]:
    limits, disk = spec.limits, f"{spec.limits.disk_mb}m"
    # Files in a tmpfs count as memory of the container; they are paid from the disk limit.
    memory = (limits.memory_mb + (limits.disk_mb if config.disk == "tmpfs" else 0)) * MIB
    found: dict[str, Any] = {
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids + 1,  # sandboxd itself
        "NanoCpus": int(limits.cpus * 1e9),
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
    }
    if config.disk == "tmpfs":
        found["ReadonlyRootfs"] = True
    elif config.disk == "quota":
        found["StorageOpt"] = {"size": disk}
    return found


def _volume(path: str, size_mb: int, controller: str) -> dict[str, Any]:
    """Unlike the engine's own tmpfs, a volume can be archived from outside; it is removed with its container."""
    options = {"type": "tmpfs", "device": "tmpfs", "o": f"nosuid,nodev,mode=1777,size={size_mb}m"}
    driver = {"Name": "local", "Options": options}
    return {
        "Type": "volume", "Target": path,
        "VolumeOptions": {"NoCopy": True, "DriverConfig": driver, "Labels": {CONTROLLER: controller}},
    }  # fmt: skip


def _walls(config: DockerConfig) -> dict[str, Any]:
    return {
        "NetworkMode": config.network,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "Runtime": config.runtime,
    }


def cause_of(code: int, *, oom: bool) -> str:
    """Why a container ended by itself, from its exit code."""
    if code == LEASE_ENDED:
        return "the lease ended without renewal"
    if code == 137 and oom:
        return "out of memory: the kernel killed sandboxd"
    if code > 128:
        return f"sandboxd was killed by signal {code - 128}"
    return f"sandboxd exited with code {code}"


def state_cause(state: Mapping[str, Any]) -> str:
    """The same, from what `inspect` says of a container that is not running."""
    return str(state.get("Error") or "") or cause_of(int(state["ExitCode"]), oom=bool(state.get("OOMKilled")))
