"""Containers without sandboxd: the same results and errors, through the engine's exec API and a shell."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import TOKEN, ControllerProcess, pids, sandbox_config, service, sh

from agentrl.core.config import SandboxConfig
from agentrl.core.errors import (
    Blame,
    Conflict,
    Ran,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    ServiceUnavailable,
    Unsupported,
)
from agentrl.core.types import ExecRequest, ExecResult, ProcessRequest, SandboxLimits, SandboxSpec
from sandbox.backends.docker.backend import DockerBackend
from sandbox.client import RemoteSandbox, SandboxClient

PLAIN = "AGENTRL_TEST_DOCKER_PLAIN"
SPEC = SandboxSpec(files={"note.txt": "hello\n"}, limits=SandboxLimits(pids=40, memory_mb=96, disk_mb=16), ttl_s=60.0)
TICKER = ["5"]
"""The runtime's own `sleep`, which wakes it for the lease."""


@pytest.fixture
def config() -> SandboxConfig:
    made = sandbox_config("docker")
    if PLAIN not in os.environ:
        pytest.skip(f"set {PLAIN} to an image with busybox and without Python to run this test on it")
    docker = made.docker.model_copy(update={"image": os.environ[PLAIN], "way_in": "exec"})
    return made.model_copy(update={"docker": docker})


@pytest.fixture
async def client(config: SandboxConfig, tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with service(tmp_path, config) as made:
        yield made


@pytest.fixture
async def sandbox(client: SandboxClient) -> AsyncIterator[RemoteSandbox]:
    async with client.acquire(SPEC, owner="test", key="one") as made:
        yield made


async def test_streams_codes_and_signals(sandbox: RemoteSandbox) -> None:
    result = await sandbox.exec(sh("cat; echo error >&2; cat note.txt; exit 3", stdin=b"\x00\xff in\n"))
    assert (result.status, result.exit_code) == ("EXITED", 3)
    assert (result.stdout, result.stderr) == (b"\x00\xff in\nhello\n", b"error\n")
    for code in (1, 126, 127, 137, 139, 255):
        assert ((await sandbox.exec(sh(f"exit {code}"))).exit_code) == code
    for number in (2, 9, 11, 13, 15):
        killed = await sandbox.exec(sh(f"kill -{number} $$"))
        assert (killed.status, killed.signal, killed.exit_code) == ("SIGNALED", number, None)
    request = ExecRequest(argv=("sh", "-c", "pwd; echo $COLOUR $HOME"), cwd="/tmp", env={"COLOUR": "red"})
    assert (await sandbox.exec(request)).stdout == b"/tmp\nred /work\n"


async def test_what_cannot_be_executed_is_the_agents_error(sandbox: RemoteSandbox) -> None:
    await sandbox.write("data", b"no program", mode=0o644)
    for argv, cwd in ((("no-such-program",), ""), (("/work/data",), ""), (("true",), "/nowhere")):
        with pytest.raises(SandboxError, match="cannot execute") as refused:
            await sandbox.exec(ExecRequest(argv=argv, cwd=cwd))
        assert (refused.value.ran, refused.value.blame) == (Ran.NO, Blame.AGENT)


@pytest.mark.parametrize(
    "script",
    [
        "while :; do :; done",
        "setsid sleep 8801 & (setsid sh -c '(sleep 8802; :) & :' &) ; env -i sleep 8803 & sleep 8804",
        "(env -i setsid sh -c '(sleep 8805; :) & :' &) ; sleep 8806",
        "trap '' TERM; (trap '' TERM; sleep 8807) & while :; do :; done",
        "(bomb() { bomb | bomb & }; bomb) & while :; do :; done",
    ],
    ids=["loop", "setsid and forked twice", "marker thrown away", "deaf to TERM", "fork bomb"],
)
async def test_a_timeout_leaves_no_process(sandbox: RemoteSandbox, script: str) -> None:
    result = await sandbox.exec(sh(f"echo partial; {script}", timeout_s=1))
    assert (result.status, result.exit_code, result.stdout) == ("TIMEOUT", None, b"partial\n")
    assert await pids(sandbox, "sleep") == TICKER
    # The init itself and the one that asks are left, and the ticker's shell.
    assert int((await sandbox.exec(sh("ls -d /proc/[0-9]* | wc -l"))).stdout) < 10


async def test_a_timeout_spares_other_commands_and_their_children(sandbox: RemoteSandbox) -> None:
    await sandbox.exec(sh("setsid sleep 2001 >/dev/null 2>&1 & true"))
    other = asyncio.create_task(sandbox.exec(sh("setsid sleep 2002 & sleep 2; echo whole")))
    timed_out = await sandbox.exec(sh("setsid sleep 2003 & echo out; sleep 2004", timeout_s=1))
    assert (timed_out.status, timed_out.stdout) == ("TIMEOUT", b"out\n")
    assert timed_out.duration_s < 3
    assert (await other).stdout == b"whole\n"
    assert await pids(sandbox, "sleep") == ["2001", "2002", *TICKER]


async def test_a_background_child_that_holds_stdout_delays_nothing(sandbox: RemoteSandbox) -> None:
    result = await sandbox.exec(sh("(sleep 1; echo late; echo alive > alive; sleep 60) & echo early"))
    assert result.stdout == b"early\n"
    assert result.duration_s < 1
    assert (await sandbox.exec(sh("until [ -s alive ]; do sleep 0.1; done; cat alive"))).stdout == b"alive\n"


async def test_48_mib_arrive_whole_or_capped(client: SandboxClient) -> None:
    data = os.urandom(1 << 20) * 48
    async with client.acquire(SPEC, owner="test", key="k") as sandbox:
        whole = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data), timeout_s=60))
        assert hashlib.sha256(whole.stdout).digest() == hashlib.sha256(data).digest()
        capped = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=1000, timeout_s=60))
        assert (capped.stdout, capped.stdout_total) == (data[:500] + data[-500:], len(data))
        ignored = await sandbox.exec(ExecRequest(argv=("true",), stdin=data, timeout_s=60))
        assert ignored.exit_code == 0


async def test_a_key_runs_once(sandbox: RemoteSandbox) -> None:
    twice = [sandbox.exec(sh("echo x >> log; sleep 0.3; cat log"), key="e") for _ in range(2)]
    assert [result.stdout for result in await asyncio.gather(*twice)] == [b"x\n"] * 2
    with pytest.raises(Conflict):
        await sandbox.exec(sh("echo other"), key="e")


async def test_kills_and_memory_and_disk(sandbox: RemoteSandbox) -> None:
    other = asyncio.create_task(sandbox.exec(sh("echo > begun; exec sleep 8808")))
    await sandbox.exec(sh("until [ -e begun ]; do sleep 0.05; done"))
    killed = await sandbox.exec(sh("kill -9 1; kill -9 -1; kill -9 $$", timeout_s=5))
    assert (killed.status, killed.signal) == ("SIGNALED", 9)
    assert ((await other).status, (await other).signal) == ("SIGNALED", 9)
    eaten = await sandbox.exec(ExecRequest(argv=("dd", "if=/dev/zero", "of=/dev/null", "bs=300M", "count=1")))
    assert (eaten.status, eaten.signal, eaten.exit_code) == ("OOM", 9, None)
    assert (await sandbox.exec(sh("kill -9 $$"))).status == "SIGNALED"
    full = await sandbox.exec(sh("head -c 64000000 /dev/zero > big"))
    assert full.exit_code == 1
    with pytest.raises(SandboxFileError, match="No space left"):
        await sandbox.write("more", b"x" * (1 << 20))
    # Whoever killed everything killed the ticker; the next command started another.
    assert await pids(sandbox, "sleep") == TICKER


async def test_files_and_folders(sandbox: RemoteSandbox) -> None:
    data = bytes(range(256)) * 1000
    await sandbox.write('deep/er/it\'s a "file"', data, mode=0o755)
    assert await sandbox.read('deep/er/it\'s a "file"') == data
    assert await sandbox.read_range('/work/deep/er/it\'s a "file"', 250, 10) == data[250:260]
    await sandbox.exec(sh("ln -s /etc/passwd link; ln -s /tmp dir; ln -s ok inside; echo fine > ok; mkfifo pipe"))
    for path in ("../etc/passwd", "link", "dir/x", "pipe", "/dev/zero", "/work", "nothing"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
    for path in ("../escape", "link", "dir/x", "pipe", "/work"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")
    assert await sandbox.read("inside") == b"fine\n"
    assert (await sandbox.read("/etc/passwd")).startswith(b"root:")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("bin/tool")
        info.size, info.mode, info.uid = 17, 0o755, 1234
        tar.addfile(info, io.BytesIO(b"#!/bin/sh\necho hi"))
    await sandbox.upload_tar("up", buffer.getvalue())
    assert (await sandbox.exec(ExecRequest(argv=("up/bin/tool",)))).stdout == b"hi\n"
    await sandbox.exec(sh("ln -s /etc/passwd up/link; mkfifo up/pipe"))
    with tarfile.open(fileobj=io.BytesIO(await sandbox.download_tar("up"))) as tar:
        assert sorted(tar.getnames()) == [".", "./bin", "./bin/tool", "./link"]
    await sandbox.exec(sh("rm -r up/bin; ln -s /tmp up/bin"))
    with pytest.raises(SandboxFileError, match="symlink"):
        await sandbox.upload_tar("up", buffer.getvalue())


async def test_what_needs_the_runtime_is_unsupported(client: SandboxClient, sandbox: RemoteSandbox) -> None:
    with pytest.raises(Unsupported, match="Python"):
        await sandbox.exec(ExecRequest(argv=("true",), user="nobody"))
    with pytest.raises(Unsupported, match="Python"):
        await sandbox.start(ProcessRequest(argv=("true",)))
    with pytest.raises(Unsupported, match="Python"):
        await sandbox.open_shell()
    health = (await client.fetch("GET", "/healthz")).json()
    assert "exec API" in health["isolation"]


async def test_a_root_without_programs_is_the_agents_error(config: SandboxConfig, tmp_path: Path) -> None:
    docker = config.docker.model_copy(update={"disk": "unlimited"})
    writable = config.model_copy(update={"docker": docker})
    async with service(tmp_path, writable) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        await sandbox.exec(sh("rm -rf /bin"))
        with pytest.raises(SandboxError, match="cannot execute") as broken:
            await sandbox.exec(sh("echo alive"))
        assert (broken.value.blame, broken.value.ran) == (Blame.AGENT, Ran.NO)


async def test_a_killed_controller_adopts_it_and_runs_no_key_again(config: SandboxConfig, tmp_path: Path) -> None:
    process = ControllerProcess(tmp_path, settings=config.model_dump(mode="json"))
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    async with client.acquire(SPEC, owner="test", key="k") as sandbox:
        running = asyncio.create_task(sandbox.exec(sh("echo ran >> log; sleep 1.5; echo end >> log"), key="e"))
        await sandbox.exec(sh("until grep ran log; do sleep 0.1; done"))
        await process.signal(signal.SIGKILL)
        await process.start()
        with pytest.raises(SandboxError, match="may have run") as forgotten:
            await running
        assert forgotten.value.ran is Ran.MAYBE
        log = await sandbox.exec(sh("until grep end log; do sleep 0.1; done; cat log"))
        assert log.stdout.endswith(b"ran\nend\n")
    await client.close()
    await process.signal(signal.SIGTERM)


async def test_without_a_controller_the_lease_ends_it(config: SandboxConfig, tmp_path: Path) -> None:
    first = DockerBackend(tmp_path, config.docker)
    await first.start(lambda sandbox_id, cause: None)
    await first.create("sb-lease", SPEC.model_copy(update={"ttl_s": 1.0}), "test")
    await first.detach()
    await asyncio.sleep(11)
    again = DockerBackend(tmp_path, config.docker)
    await again.start(lambda sandbox_id, cause: None)
    found = await again.inventory()
    assert (found.live, dict(found.ended)) == (frozenset(), {"sb-lease": "the lease ended without renewal"})
    await again.stop()


async def test_a_paused_one_runs_nothing_and_is_kept_as_it_is(config: SandboxConfig, tmp_path: Path) -> None:
    backend = DockerBackend(tmp_path, config.docker)
    await backend.start(lambda sandbox_id, cause: None)
    try:
        await backend.create("sb-paused", SPEC, "test")
        await backend.pause("sb-paused")
        channel, body = backend.channel("sb-paused"), sh("echo ran >> log; cat log").model_dump_json().encode()
        with pytest.raises(ServiceUnavailable, match="paused") as refused:
            await channel.request("POST", "/exec", body=body, key="e")
        assert refused.value.ran is Ran.NO
        await backend.snapshot("sb-paused", "snap-plain")
        assert (await backend.inventory()).paused == {"sb-paused"}
        await backend.resume("sb-paused")
        answers = [await channel.request("POST", "/exec", body=body, key="e") for _ in range(2)]
        assert [ExecResult.model_validate_json(answer.body).stdout for answer in answers] == [b"ran\n"] * 2
        await backend.create("sb-fork", SPEC.model_copy(update={"files": {}, "snapshot": "snap-plain"}), "test")
        copied = await backend.channel("sb-fork").request("GET", "/files?path=note.txt")
        assert copied.body == b"hello\n"
    finally:
        await backend.stop()


async def test_one_that_is_killed_is_lost(sandbox: RemoteSandbox, config: SandboxConfig, tmp_path: Path) -> None:
    docker = pytest.importorskip("docker")
    running = asyncio.create_task(sandbox.exec(sh("sleep 60", timeout_s=90)))
    await sandbox.exec(sh("true"))
    engine = docker.from_env()
    engine.containers.get(f"agentrl-{sandbox.id}").kill()
    engine.close()
    for work in (running, sandbox.exec(sh("true"))):
        with pytest.raises(SandboxLost, match="killed by signal 9"):
            await work
