"""The controller over a backend that fails: what was half done is done by the next sweep."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from placing import NoddingChannel, PlacingBackend, controller

from agentrl.core.errors import Ran, RequestError, SandboxError, SandboxLost, ServiceUnavailable
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox.channel import Answer
from sandbox.controller import Controller


async def test_a_close_that_failed_is_finished_by_the_next_sweep(tmp_path: Path) -> None:
    backend = PlacingBackend()
    async with controller(backend, tmp_path, capacity=1) as made:
        record = await made.create("o", "k", SandboxSpec())
        backend.failures["destroy"] = SandboxError("the fork server ended")
        with pytest.raises(SandboxError):
            await made.close(record.id, "closed")
        await made.sweep()
        assert (await made.records.get(record.id)).state is SandboxState.CLOSED
        await made.create("o", "again", SandboxSpec())


async def test_sweeps_go_on_whatever_failed(tmp_path: Path) -> None:
    backend = PlacingBackend()
    async with controller(backend, tmp_path, sweep_s=0.01):
        backend.failures["inventory"] = RuntimeError("the disk is full")
        backend.looked.clear()
        async with asyncio.timeout(10):
            await backend.looked.wait()
        assert not backend.failures


async def test_a_sandbox_of_the_pool_that_could_not_be_made_is_left_to_the_sweep(tmp_path: Path) -> None:
    backend = PlacingBackend()
    async with controller(backend, tmp_path, warm=1) as made:
        backend.failures |= {"create": OSError("the disk is full"), "destroy": ServiceUnavailable("nobody answers")}
        made.pool.take(SandboxSpec())
        async with asyncio.timeout(10):
            while backend.failures or made.pool.making or not made.pool.ids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_body_that_is_too_long_is_refused_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.relay.MAX_BODY", 10)
    async with controller(PlacingBackend(), tmp_path) as made:
        box = await made.create("o", "k", SandboxSpec())
        await made.relay.forward(box.id, "PUT", "/files?path=a", bytes(10), "", timeout_s=5)
        with pytest.raises(RequestError, match="PUT /files: 11 bytes are more than 10 at once") as refused:
            await made.relay.forward(box.id, "PUT", "/files?path=a", bytes(11), "", timeout_s=5)
        assert refused.value.ran is Ran.NO


async def test_a_backend_that_cannot_say_why_does_not_say_that_nothing_ran(tmp_path: Path) -> None:
    backend = PlacingBackend()
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SandboxSpec())
        call = asyncio.create_task(made.relay.forward(box.id, "POST", "/processes/slow", b"", "s", timeout_s=5))
        await asyncio.sleep(0.01)
        backend.failures["inventory"] = SandboxError("the fork server did not start", ran=Ran.NO)
        made.relay.interrupt(box.id)
        backend.paused.add(box.id)
        with pytest.raises(ServiceUnavailable, match="no answer") as unknown:
            await call
        assert unknown.value.ran is Ran.MAYBE
        assert not backend.failures


async def test_what_ended_stays_ended_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.records.KEPT_ENDED", 2)
    backend, back = PlacingBackend(), asyncio.Event()
    async with controller(backend, tmp_path) as made:
        boxes = [await made.create("o", str(n), SandboxSpec()) for n in range(5)]
        await made.records.flush()
        write = made._store._write

        async def away(*args: Any) -> None:
            await back.wait()
            await write(*args)

        monkeypatch.setattr(made._store, "_write", away)
        backend.placed.clear()
        for box in boxes:
            backend.ended(box.id, "the fork server ended")
        await asyncio.sleep(0.01)
        flushing = asyncio.create_task(made.records.flush())
        await asyncio.sleep(0.01)
        for box in boxes:
            with pytest.raises(SandboxLost, match="the fork server ended"):
                await made.relay.exec(box.id, ExecRequest(argv=("true",)), b"{}", "k")
        assert not made.records.live
        assert sum(made.records.tenants.values()) == 0
        back.set()
        await flushing
        assert [(await made.records.get(box.id)).state for box in boxes] == [SandboxState.LOST] * 5


async def test_a_key_that_is_closed_twice_at_once_is_closed(tmp_path: Path) -> None:
    async with controller(PlacingBackend(), tmp_path) as made:
        one, two = await asyncio.gather(made.close_key("o", "k"), made.close_key("o", "k"))
        assert one == two


class NotRenewed(NoddingChannel):
    """A renewal waits, and then fails."""

    renewing, failing = asyncio.Event(), asyncio.Event()

    async def request(self, method: str, target: str, **options: Any) -> Answer:
        if target == "/renew":
            self.renewing.set()
            await self.failing.wait()
            raise ServiceUnavailable("no answer")
        return await super().request(method, target, **options)


class NotRenewing(PlacingBackend):
    def channel(self, sandbox_id: str) -> NoddingChannel:
        return self.channels.setdefault(sandbox_id, NotRenewed(self, sandbox_id))


async def test_a_renewal_that_failed_does_not_destroy_what_was_taken_meanwhile(tmp_path: Path) -> None:
    backend, spec = NotRenewing(), SandboxSpec(ttl_s=0.2)
    async with controller(backend, tmp_path, warm=1) as made, asyncio.timeout(20):
        made.pool.take(spec)
        await NotRenewed.renewing.wait()
        (ahead,) = made.pool.ids
        box = await made.create("o", "k", spec)
        assert box.id == ahead
        NotRenewed.failing.set()
        await asyncio.sleep(0.05)
        assert ahead in backend.placed


async def test_who_may_not_lead_any_more_sweeps_nothing(tmp_path: Path) -> None:
    backend, leads = PlacingBackend(), True
    async with controller(backend, tmp_path) as made:
        made.leads = lambda: leads
        await made.sweep()
        leads = False
        backend.placed.add("sb-of-the-next-leader")
        with pytest.raises(ServiceUnavailable, match="another controller may lead"):
            await made.sweep()
        assert backend.placed == {"sb-of-the-next-leader"}
        leads = True
        assert (await made.sweep()).orphans == 1


async def test_who_stops_leading_in_the_middle_of_a_sweep_forgets_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.snapshots.COMPARE_S", 0.0)
    backend, leads = PlacingBackend(), True
    async with controller(backend, tmp_path) as made:
        made.leads = lambda: leads
        backend.kept["snap-of-the-next-leader"] = "sb-of-the-next-leader"
        backend.gates["snapshots"] = asyncio.Event()
        backend.looked.clear()
        sweeping = asyncio.create_task(made.sweep())
        await backend.looked.wait()
        leads = False
        backend.gates["snapshots"].set()
        await sweeping
        assert backend.kept
        leads = True
        await made.sweep()
        assert not backend.kept


async def test_a_snapshot_that_was_finished_after_its_row_was_undone_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.snapshots.COMPARE_S", 0.0)
    backend = PlacingBackend()
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SandboxSpec())
        kept = await made.snapshot(box.id, "s", 60.0)
        backend.kept["snap-of-a-killed-controller"] = box.id
        await made.sweep()
        assert list(backend.kept) == [kept.id]
        backend.failures["snapshots"] = SandboxError("the engine is away")
        await made.sweep()


@pytest.mark.parametrize("step", [7200.0, -7200.0])
async def test_a_clock_that_is_set_moves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    backend, real = PlacingBackend(), time.time
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SandboxSpec(ttl_s=60.0))
        short = await made.create("o", "short", SandboxSpec(ttl_s=0.2))
        kept = await made.snapshot(box.id, "s", 60.0)
        slow = asyncio.create_task(made.relay.forward(box.id, "POST", "/processes/slow", b"", "p", timeout_s=1.0))
        await asyncio.sleep(0)
        monkeypatch.setattr(time, "time", lambda: real() + step)
        await made.sweep()
        backend.channels[box.id].hold.set()
        await slow
        for deadline in (made.records.live[box.id].deadline, made.snapshots.list(None)[0].deadline):
            assert deadline == pytest.approx(real() + step + 60.0, abs=20.0)
        assert (await made._store.snapshots.all())[0].deadline > kept.deadline + step - 1.0
        await asyncio.sleep(0.3)
        await made.sweep()
        assert set(made.records.live) == {box.id}
        assert (await made.records.get(short.id)).cause == "the lease ended"


async def test_a_clock_that_is_set_waits_for_no_snapshot_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, real = PlacingBackend(), time.time
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SandboxSpec())
        backend.gates["snapshot"] = asyncio.Event()
        making = asyncio.create_task(made.snapshot(box.id, "s", 60.0))
        for _ in range(2000):
            if backend.kept:
                break
            await asyncio.sleep(0.005)
        monkeypatch.setattr(time, "time", lambda: real() + 7200.0)
        try:
            await asyncio.wait_for(made.sweep(), 10.0)
        finally:
            backend.gates["snapshot"].set()
        deadline = (await making).deadline
        assert deadline == pytest.approx(real() + 7200.0 + 60.0, abs=20.0)
        assert (await made._store.snapshots.all())[0].deadline == deadline


async def test_a_clock_that_was_set_before_it_began_moves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller(PlacingBackend(), tmp_path, leave=True) as made:
        box = await made.create("o", "k", SandboxSpec(ttl_s=60.0))
        await made.records.flush()
    backend, real = PlacingBackend(), time.time
    backend.placed.add(box.id)
    start = Controller.start

    async def late(standby: Controller) -> None:
        standby.records.clock._offset -= 7200.0
        await start(standby)

    monkeypatch.setattr(Controller, "start", late)
    async with controller(backend, tmp_path) as made:
        assert made.records.live[box.id].deadline == pytest.approx(real() + 60.0, abs=20.0)
