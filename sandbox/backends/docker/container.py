"""What a sandbox is as a container, and what a container's end means: pure functions. Used by `backend`.

Invariant: a container has its labels from its creation on, no capability, no more than its limits, and nothing of
the host's but the runtime, read-only.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sandbox.runtime
from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, Ran, SandboxError
from agentrl.core.types import SandboxSpec
from sandbox.runtime.handoff import PATH
from sandbox.runtime.sandboxd import LEASE_ENDED

CONTROLLER, SANDBOX = "agentrl.controller", "agentrl.sandbox"
"""Labels: whose container it is, and which sandbox."""
INSIDE = posixpath.dirname(PATH)
START = f"import sys; sys.path.insert(0, {INSIDE!r}); from sandbox.runtime.handoff import main; main()"
MIB = 1 << 20


def image_of(spec: SandboxSpec, config: DockerConfig) -> str:
    image = spec.image or config.image
    if not image:
        message = "a container needs an image: set the spec's image, or sandbox.docker.image for those without"
        raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)
    return image


def creation(sandbox_id: str, spec: SandboxSpec, config: DockerConfig, *, controller: str, handoff: Path) -> Any:
    """The body of the engine's request to create it."""
    # -I and -S: nothing of the image's environment or site directories reaches the runtime.
    return {
        "Image": image_of(spec, config),
        "Entrypoint": [config.python, "-I", "-S", "-c", START],
        "Cmd": [],
        "User": "0:0",
        "Hostname": "sandbox",
        "WorkingDir": "/",
        "StopTimeout": 1,  # of an engine that stops, since an init is deaf to TERM
        "Labels": {CONTROLLER: controller, SANDBOX: sandbox_id},
        "HostConfig": {**_limits(spec, config), **_walls(config, handoff)},
    }


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
        options = f"rw,exec,nosuid,nodev,mode=1777,size={disk}"
        found |= {"ReadonlyRootfs": True, "Tmpfs": {spec.workdir: options, "/tmp": options}}
    elif config.disk == "quota":
        found["StorageOpt"] = {"size": disk}
    return found


def _walls(config: DockerConfig, handoff: Path) -> dict[str, Any]:
    runtime = Path(sandbox.runtime.__file__).parent
    return {
        "NetworkMode": config.network,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "Runtime": config.runtime,
        "Mounts": [
            {"Type": "bind", "Source": str(runtime), "Target": f"{INSIDE}/sandbox/runtime", "ReadOnly": True},
            {"Type": "bind", "Source": str(handoff), "Target": PATH, "ReadOnly": True},
        ],
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
