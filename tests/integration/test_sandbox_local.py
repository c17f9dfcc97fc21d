"""Standing still and snapshots on local by each of its ways, the fork server's silence, and what stays hidden."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from sandboxes import NO_CGROUPS, NO_NAMESPACES, ONE_UID, SPEC, fork_server, local_service, sh, under

from agentrl.core.errors import Blame, Ran, SandboxError, SandboxFileError, Unsupported
from agentrl.core.http import Service
from agentrl.core.types import ProcessRequest, SandboxLimits, SandboxSpec
from sandbox.backends.local.backend import LocalBackend
from sandbox.client import SandboxClient

WAYS = {
    "cgroup": (),
    "signals in a namespace": NO_CGROUPS,
    "one uid": (*ONE_UID, *NO_CGROUPS),
    "no namespaces": NO_NAMESPACES,
    "signals to a tree": (*NO_CGROUPS, *NO_NAMESPACES),
}
SMALL = SandboxSpec(limits=SandboxLimits(disk_mb=4), ttl_s=60.0)


@pytest.fixture(params=WAYS)
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with under(tmp_path, WAYS[request.param]) as made:
        yield made


def tree(folder: Path) -> list[psutil.Process]:
    """Every process of every sandbox; forks that do something for the fork server come and go beside them."""
    found = []
    for child in fork_server(folder).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found += [child, *child.children(recursive=True)]
    return found


def used(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


async def test_a_paused_sandbox_stands_still_and_goes_on(client: SandboxClient, tmp_path: Path) -> None:
    async with client.acquire(SPEC, owner="test", key="k") as sandbox:
        for _ in range(3):
            await sandbox.start(ProcessRequest(argv=("sh", "-c", "while :; do :; done")))
        await sandbox.pause()
        everyone = tree(tmp_path)
        assert len(everyone) == 4
        before = used(everyone)
        await asyncio.sleep(0.5)
        assert used(everyone) == before
        await sandbox.resume()
        async with asyncio.timeout(20):
            while any(now <= then for now, then in zip(used(everyone)[1:], before[1:], strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        # Also while it is paused, nothing is left of it.
        await sandbox.pause()
    _, alive = await asyncio.to_thread(psutil.wait_procs, everyone, 20)
    assert not alive


async def test_a_fork_has_the_files_of_then(client: SandboxClient) -> None:
    make = (
        "mkdir -p deep/er; echo x > deep/er/file; chmod 500 deep/er; ln deep/er/file hard; ln -s /etc/shadow soft; "
        "mkfifo pipe; touch -d @1000000000 old; chmod 640 old; echo t > $TMPDIR/t"
    )
    look = (
        "cat deep/er/file hard; stat -c '%a %h' deep/er/file; stat -c %a deep/er; readlink soft; stat -c %F pipe; "
        "stat -c '%a %Y' old; cat $TMPDIR/t; id -u; stat -c %u old; echo more > deep/new"
    )
    spec = SPEC.model_copy(update={"env": {"TMPDIR": "/tmp"}}) if await isolated(client) else SPEC
    async with client.acquire(spec, owner="test", key="k") as sandbox:
        assert (await sandbox.exec(sh(make))).stderr == b""
        async with sandbox.fork() as fork:
            await sandbox.exec(sh("echo changed > deep/er/file"))
            looked = await fork.exec(sh(look))
            lines = looked.stdout.decode().splitlines()
            assert lines[:8] == ["x", "x", "644 2", "500", "/etc/shadow", "fifo", "640 1000000000", "t"], looked
            assert lines[8] == lines[9], "its files are its own user's"
            assert looked.stderr == b""


async def isolated(client: SandboxClient) -> bool:
    service = Service(client._urls[0])
    try:
        return bool((await service.request("GET", "/healthz")).json()["isolation"] != "none")
    finally:
        await service.close()


async def test_snapshots_are_made_while_other_sandboxes_come_and_go(client: SandboxClient) -> None:
    async def come_and_go(key: str) -> None:
        async with client.acquire(SPEC, owner="test", key=key) as other:
            await other.exec(sh("(setsid sleep 9305 &)"))

    async with client.acquire(SPEC, owner="test", key="kept") as sandbox:
        await sandbox.exec(sh("head -c 20000000 /dev/urandom > big"))
        for i in range(3):
            kept, *_ = await asyncio.gather(sandbox.snapshot(), *(come_and_go(f"{i}-{j}") for j in range(4)))
            await client.forget_snapshot(kept.id)
        assert (await sandbox.exec(sh("wc -c < big"))).stdout == b"20000000\n"


async def test_limits_count_for_snapshots(client: SandboxClient, tmp_path: Path) -> None:
    async with client.acquire(SMALL, owner="test", key="k") as sandbox:
        await sandbox.exec(sh("truncate -s 8M sparse"))
        with pytest.raises(SandboxError, match="disk limit"):
            await sandbox.snapshot()
        assert not list((tmp_path / "sandbox" / "snapshots").iterdir())
        # It goes on after an attempt that failed.
        assert (await sandbox.exec(sh("rm sparse; head -c 2000000 /dev/zero > big; echo on"))).stdout == b"on\n"
        kept = await sandbox.snapshot()
        if await isolated(client):
            smaller = SMALL.model_copy(update={"snapshot": kept.id, "limits": SandboxLimits(disk_mb=1)})
            with pytest.raises(SandboxError, match="No space left"):
                await client.create(smaller, owner="test", key="smaller")
        await client.forget_snapshot(kept.id)
        assert not list((tmp_path / "sandbox" / "snapshots").iterdir())


async def test_a_snapshot_that_is_forgotten_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    await backend.start(lambda sandbox_id, cause: None)
    spec = SandboxSpec(limits=SandboxLimits(memory_mb=256, disk_mb=200))
    await backend.create("sb-1", spec, "")
    channel = backend.channel("sb-1")
    write = b'{"argv": ["dd", "if=/dev/zero", "of=much", "bs=1M", "count=160"]}'
    assert b'"exit_code":0' in (await channel.request("POST", "/exec", body=write, key="k")).body
    channel.close()
    making, folder = asyncio.create_task(backend.snapshot("sb-1", "snap-1")), tmp_path / "snapshots"
    while not (folder.exists() and list(folder.iterdir())):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await backend.forget_snapshot("snap-1")
    await making
    assert not list(folder.iterdir())
    await backend.stop()


async def test_a_paused_sandbox_without_a_controller_ends_with_its_lease(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandbox", idle_s=0.3)
    await backend.start(lambda sandbox_id, cause: None)
    await backend.create("sb-left", SPEC.model_copy(update={"ttl_s": 0.5}), "o")
    await backend.pause("sb-left")
    server = fork_server(tmp_path)
    (init,) = server.children()
    await backend.detach()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [init, server], 30)
    assert not alive


async def test_a_fork_server_that_is_stopped_ends_paused_sandboxes_too(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandbox")
    await backend.start(lambda sandbox_id, cause: None)
    await backend.create("sb-still", SPEC, "o")
    await backend.pause("sb-still")
    everyone = [fork_server(tmp_path), *tree(tmp_path)]
    await backend.stop()
    _, alive = await asyncio.to_thread(psutil.wait_procs, everyone, 20)
    assert not alive


async def test_what_a_killed_fork_server_left_frozen_ends(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client:
        async with client.acquire(SPEC, owner="test", key="k") as sandbox:
            await sandbox.exec(sh("(setsid sleep 9302 &)"))
            await sandbox.pause()
            everyone = tree(tmp_path)
            fork_server(tmp_path).kill()
        async with client.acquire(SPEC, owner="test", key="next") as sandbox:
            assert await sandbox.read("note.txt") == b"hello\n"
            _, alive = await asyncio.to_thread(psutil.wait_procs, everyone, 20)
            assert not alive


async def test_without_namespaces_too_sandboxes_end_with_their_fork_server(tmp_path: Path) -> None:
    async with under(tmp_path, NO_NAMESPACES) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        await sandbox.exec(sh("sleep 9303 & (setsid sleep 9304 &)"))
        everyone = tree(tmp_path)
        assert len(everyone) == 3
        fork_server(tmp_path).kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, everyone, 20)
        assert not alive


async def test_a_fork_server_that_does_not_answer_is_an_error_in_time(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandbox", ask_s=0.5)
    await backend.start(lambda sandbox_id, cause: None)
    server = fork_server(tmp_path)
    server.send_signal(signal.SIGSTOP)
    with pytest.raises(SandboxError, match="has not answered 'create'") as late:
        await backend.create("sb-late", SPEC, "o")
    assert (late.value.ran, late.value.blame) == (Ran.MAYBE, Blame.INFRA)
    server.send_signal(signal.SIGCONT)
    await backend.destroy("sb-late")
    assert not (await backend.inventory()).live
    await backend.stop()


@pytest.fixture
def visible_folder() -> Iterator[Path]:
    """A run's folder in a place that sandboxes see."""
    if os.geteuid() != 0:
        pytest.skip("only root may put a run's folder below /opt")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-test-", dir="/opt"))
    folder.chmod(0o755)
    (folder / "beside.txt").write_text("seen")
    (folder / "run").mkdir(mode=0o755)
    (folder / "run" / "secret.txt").write_text("of the run")
    yield folder
    shutil.rmtree(folder)


async def test_the_runs_folder_is_hidden_wherever_it_lies(visible_folder: Path) -> None:
    run = visible_folder / "run"
    async with local_service(run) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        seen = await sandbox.exec(
            sh(f"cat {visible_folder}/beside.txt; ls -A {run}; cat {run}/secret.txt; touch {run}/x")
        )
        assert seen.stdout == b"seen"
        assert seen.exit_code != 0
        for path in ("secret.txt", "sandbox.db", "sandbox/forkserver.sock"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(f"{run}/{path}")


async def test_the_runtime_imports_nothing_that_a_task_wrote(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        # Where the fork server looked for modules when it began, as far as a task can write there.
        places = [tmp_path / "sandbox", *(Path(path) for path in sys.path if path.startswith(("/tmp", "/work")))]
        for place in places:
            for module in ("tarfile", "pwd", "subprocess", "gzip"):
                await sandbox.exec(sh(f"mkdir -p {place} && echo 'raise SystemExit(9)' > {place}/{module}.py"))
        await sandbox.download_tar(".")
        async with sandbox.fork() as fork:
            assert await fork.read("note.txt") == b"hello\n"
        with pytest.raises(Unsupported):
            await sandbox.exec(sh("true").model_copy(update={"user": "nobody"}))
        assert await sandbox.read("note.txt") == b"hello\n"
