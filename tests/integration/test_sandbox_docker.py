"""The docker backend by itself on a real engine: images, adoption, pausing, and what it leaves alone."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_sandboxes import STATUS, run
from sandboxes import pids, sandbox_config, service

from agentrl.core.config import DockerConfig, SandboxConfig
from agentrl.core.errors import Blame, ConfigError, Ran, SandboxError, Unsupported
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.backends.docker.backend import DockerBackend
from sandbox.backends.docker.container import (
    CONTROLLER,
    OWNER,
    REPOSITORY,
    RUNTIME,
    SANDBOX,
    SNAPSHOT,
    without_quotas,
)
from sandbox.backends.docker.engine import Engine
from sandbox.runtime.interpreter import LOADER

BARE = "agentrl-test-bare:1"


@pytest.fixture
def config() -> DockerConfig:
    return sandbox_config("docker").docker


@pytest.fixture
async def backend(config: DockerConfig, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    made = DockerBackend(tmp_path, config)
    await made.start(lambda sandbox_id, cause: None)
    yield made
    await made.stop()


@pytest.fixture
def client(config: DockerConfig) -> Iterator[Any]:
    """The docker package's own client, to look at the engine with."""
    docker = pytest.importorskip("docker")
    made = docker.from_env()
    yield made
    made.close()


async def test_an_image_with_nothing_in_it_serves(backend: DockerBackend, client: Any) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("hello"))
    client.api.import_image_from_data(archive.getvalue(), repository=BARE.split(":")[0], tag="1")
    try:
        await backend.create("sb-bare", SandboxSpec(image=BARE, files={"a": "of the spec"}), "test")
        said = await run(backend, "sb-bare", f"{RUNTIME}/{LOADER}", "--version")
        assert (said.status, said.exit_code) == ("EXITED", 0)
        channel = backend.channel("sb-bare")
        assert (await channel.request("GET", "/files?path=a")).body == b"of the spec"
        assert (await channel.request("GET", "/tar?path=.")).status == 200
        channel.close()
        await backend.destroy("sb-bare")
    finally:
        client.images.remove(BARE)
    assert not (await backend.inventory()).live


async def test_what_an_image_tells_loaders_and_pythons_is_for_tasks_alone(
    tmp_path: Path, config: DockerConfig, client: Any
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    given = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LANG": "xx_XX", "LD_LIBRARY_PATH": "/lib/nowhere"}
    words = " ".join(f"{name}={value}" for name, value in {"LD_PRELOAD": "/none.so", **given}.items())
    (folder / "none.so").write_bytes(b"no library")
    (folder / "ld.so.preload").write_text("/none.so\n")
    (folder / "Dockerfile").write_text(
        f"FROM {config.image}\nCOPY none.so /none.so\nCOPY ld.so.preload /etc/ld.so.preload\nENV {words}\n"
    )
    backend = DockerBackend(tmp_path / "b", config.model_copy(update={"builds": {"odd": str(folder)}}))
    await backend.start(lambda sandbox_id, cause: None)
    try:
        await backend.create("sb-odd", SandboxSpec(image="odd", env={"LD_BIND_NOW": "1"}), "test")
        said = await run(backend, "sb-odd", "env")
        found = dict(line.split("=", 1) for line in said.stdout.decode().splitlines())
        assert {"LD_BIND_NOW": "1", **given}.items() <= found.items()
        assert not {"LD_PRELOAD", "LC_CTYPE"} & found.keys()
        logs = await backend.engine.call("logs", "agentrl-sb-odd")
        assert logs == b"", "the loader tried something"
    finally:
        await backend.stop()
        for image in client.images.list(filters={"label": "agentrl.build=odd"}):
            client.images.remove(image.id, force=True)


@pytest.mark.parametrize("way_in", ["socket", "exec"])
async def test_a_task_that_may_write_everywhere_puts_nothing_in_the_runtimes_place(
    tmp_path: Path, config: DockerConfig, way_in: str
) -> None:
    backend = DockerBackend(tmp_path, config.model_copy(update={"disk": "unlimited", "way_in": way_in}))
    await backend.start(lambda sandbox_id, cause: None)
    try:
        await backend.create("sb-moved", SandboxSpec(), "test")
        place = f"{RUNTIME}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        moves = "; ".join(f"mv {path} /gone" for path in (Path(RUNTIME), *Path(RUNTIME).parents[:-1]))
        evil = f'mkdir -p {place}; echo \'open("/pwned", "w")\' > {place}/tarfile.py'
        assert (await run(backend, "sb-moved", "sh", "-c", f"{moves}; {evil}")).exit_code != 0
        channel = backend.channel("sb-moved")
        assert (await channel.request("GET", "/tar?path=.")).status == 200
        channel.close()
        assert (await run(backend, "sb-moved", "ls", "/pwned")).exit_code != 0
    finally:
        await backend.stop()


async def test_an_image_that_is_not_there_is_the_callers_doing(backend: DockerBackend) -> None:
    with pytest.raises(SandboxError, match="agentrl-no-such-image") as missing:
        await backend.create("sb-none", SandboxSpec(image="agentrl-no-such-image:1"), "test")
    assert (missing.value.blame, missing.value.ran) == (Blame.CALLER, Ran.NO)


async def test_a_container_that_cannot_serve_is_an_error_with_its_output(tmp_path: Path, config: DockerConfig) -> None:
    backend = DockerBackend(tmp_path, config)
    await backend.start(lambda sandbox_id, cause: None)
    (runtime,) = (path for path in tmp_path.iterdir() if path.name != "controller")
    (runtime / LOADER).write_text("#!/bin/sh\necho broken loader; exit 1\n")
    with pytest.raises(SandboxError, match="broken loader") as broken:
        await backend.create("sb-broken", SandboxSpec(), "test")
    assert broken.value.ran is Ran.NO
    await backend.destroy("sb-broken")
    assert not (await backend.inventory()).live
    assert sorted(path.name for path in tmp_path.iterdir()) == ["controller", runtime.name]
    await backend.stop()


async def test_pause_and_resume_and_destroy_while_paused(backend: DockerBackend) -> None:
    await backend.create("sb-p", SandboxSpec(), "test")
    await run(backend, "sb-p", "sh", "-c", "echo kept > a")
    await backend.pause("sb-p")
    asking = asyncio.create_task(run(backend, "sb-p", "cat", "a"))
    await asyncio.sleep(0.3)
    assert not asking.done()
    assert (await backend.inventory()).live == {"sb-p"}
    await backend.resume("sb-p")
    assert (await asking).stdout == b"kept\n"
    await backend.pause("sb-p")
    await backend.destroy("sb-p")
    await backend.destroy("sb-p")
    assert not (await backend.inventory()).live


async def test_a_controller_adopts_its_own_and_touches_nothing_else(
    tmp_path: Path, config: DockerConfig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one"
    first = DockerBackend(folder, config)
    await first.start(lambda sandbox_id, cause: None)
    await first.create("sb-mine", SandboxSpec(), "test")
    await run(first, "sb-mine", "sh", "-c", "echo kept > a")
    mine = (folder / "controller").read_text()
    labels = {CONTROLLER: mine, SANDBOX: "sb-half"}
    half = client.containers.create(config.image, ["sleep", "60"], labels=labels)
    foreign = client.containers.create(config.image, ["sleep", "60"], labels={**labels, CONTROLLER: "another"})
    try:
        await first.detach()
        # Of another version, and half packed.
        (used,) = folder.glob("runtime-*")
        for name in ("runtime-0123456789ab", "runtime-x_y"):
            (folder / name / "lib").mkdir(parents=True)
        monkeypatch.setattr("sandbox.backends.docker.carried._version", lambda: "newer")
        again = DockerBackend(folder, config)
        await again.start(lambda sandbox_id, cause: None)
        found = await again.inventory()
        assert found.live == {"sb-mine"}
        assert "while creating" in found.ended["sb-half"]
        assert (await run(again, "sb-mine", "cat", "a")).stdout == b"kept\n"
        assert {path.name for path in folder.glob("runtime-*")} == {used.name, "runtime-newer"}
        await again.destroy("sb-half")
        await again.stop()
        await again.start(lambda sandbox_id, cause: None)
        assert [path.name for path in folder.glob("runtime-*")] == ["runtime-newer"]
        await again.stop()
        left = {container.id for container in client.containers.list(all=True, ignore_removed=True)}
        assert foreign.id in left
        assert half.id not in left
        assert not client.containers.list(all=True, filters={"label": f"{CONTROLLER}={mine}"})
    finally:
        foreign.remove()


async def test_a_named_network_reaches_the_container(tmp_path: Path, config: DockerConfig, client: Any) -> None:
    network = client.networks.create("agentrl-test", internal=True)
    backend = DockerBackend(tmp_path, config.model_copy(update={"network": network.name}))
    try:
        await backend.start(lambda sandbox_id, cause: None)
        await backend.create("sb-net", SandboxSpec(), "test")
        assert b"eth0" in (await run(backend, "sb-net", "cat", "/proc/net/dev")).stdout
    finally:
        await backend.stop()
        network.remove()


async def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path, config: DockerConfig, client: Any) -> None:
    info = client.info()
    assert "runsc" not in info["Runtimes"], "this test needs an engine without gVisor"
    quotas = not without_quotas(info)
    for settings, why in (
        ({"runtime": "runsc"}, r"'runsc'.*knows only .*runc.*daemon\.json"),
        ({"host": f"unix://{tmp_path}/none.sock"}, "no Docker Engine answers"),
    ):
        with pytest.raises(ConfigError, match=why):
            await DockerBackend(tmp_path, config.model_copy(update=settings)).start(lambda sandbox_id, cause: None)
    if not quotas:
        backend = DockerBackend(tmp_path, config.model_copy(update={"disk": "quota"}))
        with pytest.raises(ConfigError, match="has no quotas"):
            await backend.start(lambda sandbox_id, cause: None)


async def test_an_engine_that_is_gone_is_an_error_of_the_infrastructure(config: DockerConfig) -> None:
    engine = await asyncio.to_thread(Engine, config.host)
    with pytest.raises(SandboxError, match="Docker, inspect_container") as absent:
        await engine.call("inspect_container", "nothing-of-this-name")
    assert (absent.value.ran, absent.value.blame) == (Ran.NO, Blame.INFRA)
    assert json.dumps(absent.value.detail) == '{"docker_status": 404}'
    await engine.close()


async def test_a_folder_is_built_once_for_each_content(
    tmp_path: Path, config: DockerConfig, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {config.image}\nCOPY version /version\nENV COLOUR=red\n")
    (folder / "version").write_text("one\n")
    (folder / "ignored").write_text("x")
    (folder / ".dockerignore").write_text("ignored\n")
    backend = DockerBackend(tmp_path / "b", config.model_copy(update={"builds": {"Tools": str(folder)}}))
    caplog.set_level(logging.INFO, "sandbox")
    await backend.start(lambda sandbox_id, cause: None)
    try:
        spec = SandboxSpec(image="Tools")
        await asyncio.gather(*(backend.create(f"sb-b{i}", spec, "test") for i in range(2)))
        assert (await run(backend, "sb-b0", "sh", "-c", "cat /version; echo $COLOUR")).stdout == b"one\nred\n"
        (folder / "ignored").write_text("y")
        await backend.create("sb-b2", spec, "test")
        assert caplog.text.count("building image agentrl-build-tools:") == 1
        assert ": COPY version /version" in caplog.text
        (folder / "version").write_text("two\n")
        await backend.create("sb-b3", spec, "test")
        assert (await run(backend, "sb-b3", "cat", "/version")).stdout == b"two\n"
        (folder / "Dockerfile").write_text(f"FROM {config.image}\nRUN echo almost there; false\n")
        with pytest.raises(SandboxError, match="almost there") as failed:
            await backend.create("sb-b4", spec, "test")
        assert (failed.value.blame, failed.value.ran) == (Blame.CALLER, Ran.NO)
    finally:
        await backend.stop()
        for image in client.images.list(filters={"label": "agentrl.build=Tools"}):
            client.images.remove(image.id, force=True)


async def test_a_build_without_a_dockerfile_is_refused_at_the_start(tmp_path: Path, config: DockerConfig) -> None:
    backend = DockerBackend(tmp_path, config.model_copy(update={"builds": {"tools": str(tmp_path)}}))
    with pytest.raises(ConfigError, match="there is no file"):
        await backend.start(lambda sandbox_id, cause: None)


async def test_an_image_that_was_committed_for_a_killed_controller_goes(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.snapshots.COMPARE_S", 0.0)
    async with (
        service(tmp_path, sandbox_config("docker")) as sandboxes,
        sandboxes.acquire(SandboxSpec(), owner="test", key="k") as sandbox,
    ):
        kept = await sandbox.snapshot()
        (container,) = client.containers.list(filters={"label": f"{SANDBOX}={sandbox.id}"})
        controller = container.labels[CONTROLLER]
        label = f"LABEL {CONTROLLER}={controller} {SNAPSHOT}=snap-late"
        container.commit(REPOSITORY, "snap-late", changes=label, pause=False)
        await sandboxes.sweep()
        left = client.images.list(filters={"label": f"{CONTROLLER}={controller}"})
        assert [tag for image in left for tag in image.tags] == [f"{REPOSITORY}:{kept.id}"]
        await sandboxes.forget_snapshot(kept.id)


@pytest.mark.parametrize("disk", ["tmpfs", "unlimited"])
async def test_snapshots_are_images_that_go_when_they_are_forgotten(
    disk: str, tmp_path: Path, config: DockerConfig, client: Any
) -> None:
    backend = DockerBackend(tmp_path, config.model_copy(update={"disk": disk}))
    await backend.start(lambda sandbox_id, cause: None)
    await backend.create("sb-s1", SandboxSpec(files={"a": "kept\n"}), "test")
    await run(backend, "sb-s1", "sh", "-c", "ln a b; mkfifo pipe; mkdir -m 750 d; echo t > /tmp/t")
    for snapshot in ("snap-1", "snap-2"):
        await backend.snapshot("sb-s1", snapshot)
    await run(backend, "sb-s1", "sh", "-c", "echo later > a")
    await backend.create("sb-s2", SandboxSpec(snapshot="snap-1"), "test")
    await backend.forget_snapshot("snap-1")
    await backend.forget_snapshot("snap-1")
    look = await run(
        backend, "sb-s2", "sh", "-c", "cat a b /tmp/t; stat -c %a d; [ a -ef b ] && [ -p pipe ] && echo same"
    )
    assert look.stdout == b"kept\nkept\nt\n750\nsame\n"
    with pytest.raises(SandboxError, match="no snapshot 'snap-1'"):
        await backend.create("sb-s3", SandboxSpec(snapshot="snap-1"), "test")
    mine = {"label": f"{CONTROLLER}={(tmp_path / 'controller').read_text()}"}
    await backend.destroy("sb-s2")
    assert [image.tags for image in client.images.list(filters=mine)] == [["agentrl-snapshot:snap-2"]]
    await backend.stop()
    assert not client.images.list(filters=mine)
    assert not client.volumes.list(filters=mine)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["controller", "runtime"]


async def test_commands_run_as_other_users_of_the_image(config: DockerConfig, tmp_path: Path, client: Any) -> None:
    settings = SandboxConfig(backend="docker", docker=config)
    async with (
        service(tmp_path, settings) as sandboxes,
        sandboxes.acquire(SandboxSpec(), owner="run-7", key="k") as sandbox,
    ):
        container = client.containers.get(f"agentrl-{sandbox.id}")
        assert container.labels[OWNER] == "run-7"
        for user, ids in (("", b"0 0"), ("nobody", b"65534 65534"), ("1234", b"1234 1234"), ("0", b"0 0")):
            said = (await sandbox.exec(ExecRequest(argv=STATUS, user=user))).stdout.split()
            assert b" ".join(said[:2]) == ids
            assert set(said[3::2]) == {b"0" * 16}, f"user {user!r} has a capability"
        slow = "setsid sleep 7701 & trap '' TERM; while :; do sleep 0.1; done"
        ended = await sandbox.exec(ExecRequest(argv=("sh", "-c", slow), user="nobody", timeout_s=0.3))
        assert (ended.status, ended.signal) == ("TIMEOUT", 9)
        assert await pids(sandbox, "sleep") == []
        refused = await sandbox.exec(ExecRequest(argv=("sh", "-c", "kill -9 1; echo x > /etc/x"), user="nobody"))
        assert refused.exit_code != 0
        with pytest.raises(SandboxError, match="no user 'no-such'") as unknown:
            await sandbox.exec(ExecRequest(argv=("true",), user="no-such"))
        assert (unknown.value.blame, unknown.value.ran) == (Blame.AGENT, Ran.NO)


async def test_other_users_are_unsupported_without_the_capabilities(config: DockerConfig, tmp_path: Path) -> None:
    settings = SandboxConfig(backend="docker", docker=config.model_copy(update={"users": False}))
    async with (
        service(tmp_path, settings) as sandboxes,
        sandboxes.acquire(SandboxSpec(), owner="a", key="k") as sandbox,
    ):
        with pytest.raises(Unsupported, match="may not change users"):
            await sandbox.exec(ExecRequest(argv=("true",), user="nobody"))
        said = (await sandbox.exec(ExecRequest(argv=STATUS))).stdout.split()
        assert set(said[3::2]) == {b"0" * 16}


async def test_what_a_task_writes_into_the_image_does_not_come_into_the_runtime(
    config: DockerConfig, tmp_path: Path
) -> None:
    settings = SandboxConfig(backend="docker", docker=config.model_copy(update={"disk": "unlimited"}))
    async with (
        service(tmp_path, settings) as client,
        client.acquire(SandboxSpec(), owner="test", key="k") as sandbox,
    ):
        replace = (
            "import gzip, subprocess, tarfile\n"
            "for module in gzip, subprocess, tarfile:\n"
            "    with open(module.__file__, 'w') as file:\n"
            '        file.write(\'open("/work/came", "w"); raise SystemExit(9)\')\n'
        )
        assert (await sandbox.exec(ExecRequest(argv=("python3", "-c", replace)))).exit_code == 0
        assert (await sandbox.exec(ExecRequest(argv=("python3", "-c", "import tarfile")))).exit_code == 9
        assert (await sandbox.exec(ExecRequest(argv=("rm", "came")))).exit_code == 0
        assert await sandbox.download_tar(".")
        assert (await sandbox.exec(ExecRequest(argv=("true",), user="12345"))).exit_code == 0
        assert (await sandbox.exec(ExecRequest(argv=("sh", "-c", "[ -e came ]")))).exit_code == 1
