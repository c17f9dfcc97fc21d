"""Pause, resume and snapshots in the controller: keys, states, what a restart finds, and what fails in the middle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from placing import PlacingBackend, controller
from stepping import cancelled_at

from agentrl.core.errors import Conflict, NotFound, Ran, SandboxError, SandboxLost, Unsupported
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox.controller import Controller
from sandbox.snapshot_store import SnapshotRow, SnapshotState

SPEC = SandboxSpec(ttl_s=60.0)
TRUE = ExecRequest(argv=("true",))


@pytest.fixture
def backend() -> PlacingBackend:
    return PlacingBackend()


async def states(made: Controller, sandbox_id: str) -> list[str]:
    """Every state it was in."""
    await made.records.flush()
    return [event.state.value for event in (await made.events(0)).events if event.sandbox == sandbox_id]


async def test_a_paused_sandbox_takes_no_commands_and_goes_on_after_its_resume(
    backend: PlacingBackend, tmp_path: Path
) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        paused = await made.pause(box.id, "p")
        assert paused.state is SandboxState.PAUSED
        for call in (
            made.relay.exec(box.id, TRUE, b"{}", "e"),
            made.relay.exec_result(box.id, "e"),
            made.relay.forward(box.id, "GET", "/files?path=a", b"", "", timeout_s=5),
        ):
            with pytest.raises(Conflict, match="PAUSED: resume it") as refused:
                await call
            assert refused.value.ran is Ran.NO
        assert (await made.resume(box.id, "r")).state is SandboxState.READY
        assert backend.channels[box.id].asked == ["POST /renew"]
        await made.relay.exec(box.id, TRUE, b"{}", "e")
        assert await states(made, box.id) == ["CREATING", "READY", "PAUSED", "READY"]


async def test_a_verbs_key_acts_once(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        await asyncio.gather(*(made.pause(box.id, "p") for _ in range(3)))
        await made.resume(box.id, "r")
        assert (await made.pause(box.id, "p")).state is SandboxState.READY, "a late retry must not pause again"
        for call in (made.resume(box.id, "p"), made.pause(box.id, "r"), made.pause(box.id, "p", 5.0)):
            with pytest.raises(Conflict, match="fresh key"):
                await call
        assert [name for name, _ in backend.calls if name in ("pause", "resume")] == ["pause", "resume"]


async def test_a_key_is_known_after_a_restart(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        box = await made.create("o", "k", SPEC)
        await made.pause(box.id, "p")
    async with controller(backend, tmp_path) as made:
        assert (await made.records.get(box.id)).state is SandboxState.PAUSED
        await made.resume(box.id, "r")
        assert (await made.pause(box.id, "p")).state is SandboxState.READY
        with pytest.raises(Conflict):
            await made.pause(box.id, "r")


async def test_a_busy_sandbox_is_not_paused(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        run = asyncio.create_task(made.relay.forward(box.id, "POST", "/processes/slow", b"", "s", timeout_s=5))
        await asyncio.sleep(0.01)
        with pytest.raises(Conflict, match="1 commands or writes are under way"):
            await made.pause(box.id, "p")
        backend.channels[box.id].hold.set()
        await run
        assert (await made.pause(box.id, "p")).state is SandboxState.PAUSED, "a refusal must not use up the key"


async def test_a_look_that_waits_ends_with_the_pause(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        look = asyncio.create_task(made.relay.forward(box.id, "GET", "/processes/slow", b"", "", timeout_s=60))
        await asyncio.sleep(0.01)
        await made.pause(box.id, "p")
        with pytest.raises(Conflict, match="was paused") as ended:
            await asyncio.wait_for(look, 5)
        assert ended.value.ran is Ran.NO


async def test_a_paused_sandbox_is_closed_and_renewed_and_expires(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        one, two = await made.create("o", "1", SPEC), await made.create("o", "2", SPEC)
        for box in (one, two):
            await made.pause(box.id, "p", 0.2)
        renewed = await made.relay.renew(two.id, 60.0)
        assert (renewed.state, renewed.deadline > time.time() + 50) == (SandboxState.PAUSED, True)
        await asyncio.sleep(0.25)
        await made.sweep()
        assert (await made.records.get(one.id)).cause == "the lease ended"
        assert (await made.records.get(two.id)).state is SandboxState.PAUSED
        assert (await made.close(two.id, "closed")).state is SandboxState.CLOSED
        assert not backend.placed


async def test_a_pause_that_fails_leaves_it_ready(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        for error in (Unsupported("cannot"), SandboxError("the engine is away")):
            backend.failures["pause"] = error
            with pytest.raises(type(error)):
                await made.pause(box.id, "p")
            await made.relay.exec(box.id, TRUE, b"{}", "e")
        assert ("resume", box.id) in backend.calls
        assert await states(made, box.id) == ["CREATING", "READY"]


async def test_a_close_waits_for_the_verb_and_the_verb_says_so(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        backend.gates["pause"] = asyncio.Event()
        pausing = asyncio.create_task(made.pause(box.id, "p"))
        await asyncio.sleep(0.01)
        with pytest.raises(Conflict, match="being paused"):
            await made.relay.exec(box.id, TRUE, b"{}", "e")
        closing = asyncio.create_task(made.close(box.id, "closed"))
        await asyncio.sleep(0.01)
        backend.gates["pause"].set()
        with pytest.raises(SandboxLost):
            await pausing
        assert (await closing).state is SandboxState.CLOSED


async def test_a_restart_believes_the_backend_about_who_is_paused(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        frozen, thawed = await made.create("o", "1", SPEC), await made.create("o", "2", SPEC)
        await made.pause(thawed.id, "p")
        await made.records.flush()
    backend.paused = {frozen.id}
    async with controller(backend, tmp_path) as made:
        assert (await made.records.get(frozen.id)).state is SandboxState.PAUSED
        assert (await made.records.get(thawed.id)).state is SandboxState.READY


@pytest.mark.parametrize("slow", ["resume", "renew"])
async def test_sandboxd_is_told_of_a_lease_that_was_renewed_during_the_resume(
    slow: str, backend: PlacingBackend, tmp_path: Path
) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        await made.pause(box.id, "p")
        backend.gates[slow] = asyncio.Event()
        resuming = asyncio.create_task(made.resume(box.id, "r"))
        await asyncio.sleep(0.01)
        renewed = await made.relay.renew(box.id, 3600.0)
        backend.gates[slow].set()
        assert (await resuming).deadline == renewed.deadline
        assert backend.channels[box.id].leases[-1] > 3590.0


async def test_an_old_inventory_does_not_undo_a_pause(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        backend.gates["inventory"] = asyncio.Event()
        sweep = asyncio.create_task(made.sweep())
        await asyncio.sleep(0.01)
        await made.pause(box.id, "p")
        backend.gates.pop("inventory").set()
        await sweep
        assert (await made.records.get(box.id)).state is SandboxState.PAUSED
        await made.sweep()
        assert (await made.records.get(box.id)).state is SandboxState.PAUSED


# --- snapshots ---------------------------------------------------------------------------------


async def test_a_snapshot_is_made_once_listed_used_and_forgotten(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o/run", "k", SPEC)
        one, same = await asyncio.gather(made.snapshot(box.id, "s", 60.0), made.snapshot(box.id, "s", 60.0))
        assert one == same
        assert (one.owner, one.sandbox) == ("o/run", box.id)
        with pytest.raises(Conflict, match="another request"):
            await made.snapshot(box.id, "s", 61.0)
        assert made.snapshots.list(None) == made.snapshots.list("o/run") == [one]
        assert made.snapshots.list("other") == []
        fork = await made.create("o/another", "f", SandboxSpec(snapshot=one.id))
        assert fork.spec.snapshot == one.id
        with pytest.raises(NotFound, match="of stranger"):
            await made.create("stranger", "f", SandboxSpec(snapshot=one.id))
        for _ in range(2):
            assert await made.forget_snapshot(one.id) == one
        assert not backend.kept
        with pytest.raises(NotFound, match="nothing was made") as unknown:
            await made.create("o", "g", SandboxSpec(snapshot=one.id))
        assert unknown.value.ran is Ran.NO
        with pytest.raises(NotFound):
            await made.create_group("o", {"g": SandboxSpec(), "h": SandboxSpec(snapshot=one.id)})
        assert len(backend.placed) == 2
        with pytest.raises(NotFound, match="fresh key"):
            await made.snapshot(box.id, "s", 60.0)
        assert (await made.create("o/another", "f", SandboxSpec(snapshot=one.id))).id == fork.id


async def test_a_snapshot_outlives_its_sandbox_and_a_restart_and_ends_with_its_time(
    backend: PlacingBackend, tmp_path: Path
) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        box = await made.create("o", "k", SPEC)
        await made.pause(box.id, "p")
        long, short = await made.snapshot(box.id, "1", 60.0), await made.snapshot(box.id, "2", 0.1)
        await made.close(box.id, "closed")
    await asyncio.sleep(0.1)
    backend.failures["forget_snapshot"] = SandboxError("the engine is away")
    async with controller(backend, tmp_path) as made:
        assert made.snapshots.list(None) == [long, short]
        await made.sweep()
        assert made.snapshots.list(None) == [long]
        assert list(backend.kept) == [long.id]


async def test_a_snapshot_that_failed_leaves_nothing_and_its_key_free(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        backend.failures["snapshot"] = Unsupported("cannot")
        with pytest.raises(Unsupported):
            await made.snapshot(box.id, "s", 60.0)
        assert not backend.kept
        backend.failures = {"snapshot": SandboxError("no space"), "forget_snapshot": SandboxError("away")}
        with pytest.raises(SandboxError, match="no space"):
            await made.snapshot(box.id, "s", 60.0)
        assert backend.kept
        assert not made.snapshots.list(None)
        made_now = await made.snapshot(box.id, "s", 60.0)
        assert made.snapshots.list(None) == [made_now]


async def test_a_sweep_that_is_cut_off_anywhere_can_be_repeated(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        number, cut = 0, True
        while cut:
            number += 1
            box = await made.create("o", f"k{number}", SPEC)
            await made.snapshot(box.id, "s", 0.001)
            await asyncio.sleep(0.002)
            cut = await asyncio.create_task(cancelled_at(number, made.snapshots.sweep()))
            # What was being written when it was cut off may still come.
            await asyncio.sleep(0.01)
            await made.snapshots.sweep()
            assert not made.snapshots.list(None)
            assert not backend.kept
        assert number > 2


async def test_a_sweep_lets_a_snapshot_be_that_is_being_made(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        backend.gates["snapshot"] = asyncio.Event()
        making = asyncio.create_task(made.snapshot(box.id, "s", 60.0))
        await asyncio.sleep(0.01)
        sweep = asyncio.create_task(made.sweep())
        await asyncio.sleep(0.05)
        backend.gates["snapshot"].set()
        kept = await making
        await sweep
        assert made.snapshots.list(None) == [kept]
        assert list(backend.kept) == [kept.id]


async def test_a_snapshot_cut_off_by_a_kill_is_undone(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        box = await made.create("o", "k", SPEC)
        backend.failures = {"snapshot": SandboxError("the controller was killed"), "forget_snapshot": SandboxError("")}
        with pytest.raises(SandboxError):
            await made.snapshot(box.id, "s", 60.0)
        assert backend.kept
    async with controller(backend, tmp_path) as made:
        assert not backend.kept
        assert not made.snapshots.list(None)


async def test_the_pool_makes_nothing_from_snapshots(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path, warm=2) as made:
        box = await made.create("o", "k", SPEC)
        kept = await made.snapshot(box.id, "s", 60.0)
        await asyncio.sleep(0.05)
        before = len(made.pool.ids)
        await made.create("o", "f", SandboxSpec(snapshot=kept.id))
        await asyncio.sleep(0.05)
        assert before == len(made.pool.ids) == 2


async def test_a_sandbox_left_frozen_amid_a_snapshot_goes_on_after_a_restart(
    backend: PlacingBackend, tmp_path: Path
) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        box = await made.create("o", "k", SPEC)
        row = SnapshotRow("snap-1", "o", box.id, "", SnapshotState.MAKING, 1.0, 2.0)
        await made._store.snapshots.add(row)
        backend.paused.add(box.id)
        await made.records.flush()
    async with controller(backend, tmp_path) as made:
        assert (await made.records.get(box.id)).state is SandboxState.READY
        assert not backend.paused
        assert not made.snapshots._rows
