"""What the docker backend asks of the engine for a sandbox, and how it reads a container's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, Ran, SandboxError
from agentrl.core.types import SandboxLimits, SandboxSpec
from sandbox.backends.docker.container import (
    RUNTIME,
    Start,
    cause_of,
    creation,
    handed_over,
    image_of,
    state_cause,
    without_quotas,
)

SPEC = SandboxSpec(image="img:1", limits=SandboxLimits(memory_mb=100, disk_mb=10, pids=20, cpus=0.5))


def asked(**settings: Any) -> Any:
    start = handed_over(Path("/run/x/runtime-1"), Path("/run/x/sb-1.handoff"))
    return creation("sb-1", SPEC, DockerConfig(**settings), "img:1", controller="c", owner="run-1", start=start)


def test_the_walls_are_there_whatever_is_configured() -> None:
    for settings in ({}, {"disk": "quota"}, {"disk": "unlimited"}, {"network": "egress", "runtime": "runsc"}):
        body = asked(**settings)
        host = body["HostConfig"]
        assert body["Labels"] == {"agentrl.controller": "c", "agentrl.sandbox": "sb-1", "agentrl.owner": "run-1"}
        assert host["CapDrop"] == ["ALL"]
        assert set(host["CapAdd"]) == {"SETUID", "SETGID", "KILL", "SETPCAP"}, "of which sandboxd gives commands none"
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["NanoCpus"] == 500_000_000
        assert host["PidsLimit"] == 21, "sandboxd is one of them"
        assert host["MemorySwap"] == host["Memory"], "no swap beyond the limit"
        assert all(mount["ReadOnly"] for mount in host["Mounts"] if mount["Type"] == "bind")
        assert not {"Privileged", "Binds", "PidMode", "UsernsMode", "Devices"} & host.keys()


def test_the_network_is_none_unless_one_is_named() -> None:
    assert asked()["HostConfig"]["NetworkMode"] == "none"
    assert asked(network="egress")["HostConfig"]["NetworkMode"] == "egress"


def test_each_kind_of_disk_limit() -> None:
    tmpfs = asked()["HostConfig"]
    assert tmpfs["ReadonlyRootfs"]
    options = {
        m["Target"]: m["VolumeOptions"]["DriverConfig"]["Options"] for m in tmpfs["Mounts"] if "VolumeOptions" in m
    }
    assert options.keys() == {"/work", "/tmp"}
    assert {made["o"].rpartition("size=")[2] for made in options.values()} == {"10m"}
    assert tmpfs["Memory"] == 110 << 20, "files in a tmpfs are paid from the disk limit"
    quota = asked(disk="quota")["HostConfig"]
    assert quota["StorageOpt"] == {"size": "10m"}
    assert quota["Memory"] == 100 << 20
    assert not {"StorageOpt", "ReadonlyRootfs"} & asked(disk="unlimited")["HostConfig"].keys()


@pytest.mark.parametrize("image", ["agentrl-snapshot:snap-1", "host/library/agentrl-snapshot:snap-1"])
def test_a_snapshot_is_no_image_for_those_who_know_its_name(image: str) -> None:
    with pytest.raises(SandboxError, match="is a snapshot: name it as such") as refused:
        image_of(SandboxSpec(image=image), DockerConfig())
    assert (refused.value.blame, refused.value.ran) == (Blame.CALLER, Ran.NO)


def test_no_capability_is_given_where_commands_have_one_user() -> None:
    assert "CapAdd" not in asked(users=False)["HostConfig"]


def test_elsewhere_nothing_of_this_machine_is_mounted() -> None:
    volume = {"Type": "volume", "Source": "runtime-1", "Target": RUNTIME, "ReadOnly": True}
    start = Start((volume,), "code", '{"ttl_s": 1}', {"TOKEN": "t"})
    body = creation("sb-1", SPEC, DockerConfig(), "img:1", controller="c", owner="", start=start)
    assert {mount["Type"] for mount in body["HostConfig"]["Mounts"]} == {"volume"}
    assert body["Cmd"] == ['{"ttl_s": 1}']
    assert {"TOKEN=t", "LD_PRELOAD=", "LD_AUDIT="} == set(body["Env"])
    assert body["HostConfig"]["PidsLimit"] > 21, "what carries commands is there too"


def test_an_image_is_needed_from_somewhere() -> None:
    assert image_of(SPEC, DockerConfig(image="default:1")) == "img:1"
    assert image_of(SandboxSpec(), DockerConfig(image="default:1")) == "default:1"
    with pytest.raises(SandboxError, match=r"sandbox\.docker\.image") as refused:
        image_of(SandboxSpec(), DockerConfig())
    assert (refused.value.blame, refused.value.ran) == (Blame.CALLER, Ran.NO)


def test_causes() -> None:
    assert cause_of(3, oom=False) == "the lease ended without renewal"
    assert cause_of(137, oom=False) == "sandboxd was killed by signal 9"
    assert cause_of(137, oom=True) == "out of memory: the kernel killed sandboxd"
    assert cause_of(143, oom=True) == "sandboxd was killed by signal 15"
    assert cause_of(70, oom=False) == "sandboxd exited with code 70"
    assert state_cause({"ExitCode": 137, "OOMKilled": True, "Error": ""}).startswith("out of memory")
    assert state_cause({"ExitCode": 127, "Error": "no such device"}) == "no such device"


def test_which_engines_have_quotas() -> None:
    def info(driver: str, on: str) -> dict[str, object]:
        return {"Driver": driver, "DriverStatus": [["Backing Filesystem", on], ["Supports d_type", "true"]]}

    assert without_quotas(info("overlay2", "xfs")) == ""
    assert without_quotas({"Driver": "zfs", "DriverStatus": None}) == ""
    assert "overlay2 on extfs has no quotas" in without_quotas(info("overlay2", "extfs"))
    assert "overlayfs on" in without_quotas({"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd"]]})
