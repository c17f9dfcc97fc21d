"""Warm pools, groups and tenants through the whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sandboxes import TOKEN, fork_server, sh

from agentrl.core.config import SandboxConfig, TenantConfig
from agentrl.core.errors import CapacityError, Conflict, SandboxError
from agentrl.core.http import serving
from agentrl.core.types import SandboxSpec
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient
from sandbox.controller import Controller


@asynccontextmanager
async def service(folder: Path, store_url: str = "", **settings: Any) -> AsyncIterator[tuple[SandboxClient, FastAPI]]:
    app = create_sandbox_app(SandboxConfig(**settings), folder=folder, store_url=store_url, token=TOKEN, sweep_s=0.1)
    async with serving(app) as url:
        client = SandboxClient(url, token=TOKEN)
        yield client, app
        await client.close()


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become so within 20 s")


def spec(note: str, **changes: Any) -> SandboxSpec:
    return SandboxSpec(files={"note.txt": note, "/tmp/deep/er": "x"}, **changes)


async def test_a_warm_sandbox_is_used_once_and_is_as_asked_for(tmp_path: Path, store_url: str) -> None:
    async with service(tmp_path, store_url, warm=2) as (client, app):
        controller: Controller = app.state.controller
        async with client.acquire(spec("cold"), owner="o", key="cold") as cold:
            await until(lambda: len(controller.pool.ids) == 2 and not controller.pool.making)
            ahead = controller.pool.ids
            assert cold.id not in ahead
            assert {view.id for view in await client.list()} == {cold.id}, "what nobody has is nobody's"
            async with client.acquire(spec("warm"), owner="o", key="warm") as warm:
                assert warm.id in ahead
                assert await warm.read("note.txt") == b"warm"
                assert (
                    await warm.exec(sh("cat /tmp/deep/er; ls -A; stat -c %a note.txt"))
                ).stdout == b"xnote.txt\n644\n"
            async with client.acquire(spec("other", env={"A": "1"}), owner="o", key="other") as other:
                assert other.id not in ahead
                assert (await other.exec(sh("echo $A"))).stdout == b"1\n"
            await until(lambda: len(controller.pool.ids) == 4 and not controller.pool.making)
            assert warm.id not in controller.pool.ids
            await client.sweep()
            assert len(controller.pool.ids) == 4, "a sweep leaves them alone"
    assert not list((tmp_path / "sandbox").glob("sb-*"))


async def test_a_warm_sandbox_that_died_is_replaced_also_under_a_claim(tmp_path: Path) -> None:
    async with service(tmp_path, warm=1) as (client, app):
        controller: Controller = app.state.controller
        async with client.acquire(spec("first"), owner="o", key="first"):
            await until(lambda: len(controller.pool.ids) == 1 and not controller.pool.making)
            (ahead,) = controller.pool.ids
            await controller.backend.destroy(ahead)
            async with client.acquire(spec("second"), owner="o", key="second") as sandbox:
                assert await sandbox.read("note.txt") == b"second"


async def test_warm_ones_give_way_when_their_places_are_needed(tmp_path: Path) -> None:
    async with service(tmp_path, warm=3, capacity=4) as (client, app):
        controller: Controller = app.state.controller
        members = {str(i): spec(str(i), env={"A": "1"}) for i in range(4)}
        async with client.acquire(spec("first"), owner="o", key="first"):
            await until(lambda: len(controller.pool.ids) == 3)
        async with client.acquire_group(members, owner="o"):
            await until(lambda: not controller.pool.ids)
            assert len(fork_server(tmp_path).children()) == 4


async def test_a_group_is_made_whole_or_not_at_all(tmp_path: Path, store_url: str) -> None:
    async with service(tmp_path, store_url, capacity=4) as (client, _):
        members: Mapping[str, SandboxSpec] = {str(i): spec(str(i)) for i in range(3)}
        async with client.acquire_group(members, owner="o") as group:
            assert [await group[key].read("note.txt") for key in members] == [b"0", b"1", b"2"]
            with pytest.raises(CapacityError, match="no room for 2 more"):
                async with client.acquire_group({"a": spec("a"), "b": spec("b")}, owner="o"):
                    pass
            assert len(await client.list()) == 3
            with pytest.raises(Conflict):
                async with client.acquire_group({"0": spec("changed"), "a": spec("a")}, owner="o"):
                    pass
            assert {view.id for view in await client.list()} == {sandbox.id for sandbox in group.values()}
        assert not await client.list()
        broken = {"c": spec("c"), "d": SandboxSpec(files={"a": "", "a/b": ""})}
        with pytest.raises(SandboxError):
            async with client.acquire_group(broken, owner="o"):
                pass
        assert not await client.list()


async def test_a_tenant_has_its_quota_over_all_its_runs(tmp_path: Path) -> None:
    tenants = {"team": TenantConfig(quota=2)}
    async with service(tmp_path, tenants=tenants) as (client, _):
        async with (
            client.acquire(spec("1"), owner="team/a", key="1"),
            client.acquire(spec("2"), owner="team/b", key="2"),
        ):
            with pytest.raises(CapacityError, match="quota of 2"):
                await client.create(spec("3"), owner="team/c", key="3")
            async with client.acquire(spec("4"), owner="other", key="4"):
                pass
        async with client.acquire(spec("3"), owner="team/c", key="3"):
            pass
