"""The controller under everything at once, cut off at every await, with a backend that fails now and then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from placing import PlacingBackend, controller
from stepping import cancelled_at

from agentrl.core.errors import AgentRLError, CapacityError, Conflict, SandboxError, SandboxLost
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox.controller import Controller
from sandbox.states import NEXT

SPEC = SandboxSpec(ttl_s=60.0)
TRUE = ExecRequest(argv=("true",))
LIVE = (SandboxState.QUEUED, SandboxState.CREATING, SandboxState.READY, SandboxState.PAUSED, SandboxState.CLOSING)


class WaveringBackend(PlacingBackend):
    """Takes its time, and fails now and then."""

    def __init__(self, chance: random.Random, failing: float) -> None:
        super().__init__()
        self.failing, self._chance = failing, chance

    async def _does(self, operation: str, what: str) -> None:
        for _ in range(self._chance.randrange(8)):
            await asyncio.sleep(0)
        if operation != "inventory" and self._chance.random() < self.failing:
            self.failures[operation] = SandboxError(f"{operation} failed")
        await super()._does(operation, what)
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)


async def consistent(made: Controller, backend: PlacingBackend) -> None:
    """What must hold when nothing is under way and the sweep has run."""
    live = made.records.live
    placed = {i for i, record in live.items() if record.state in (SandboxState.READY, SandboxState.PAUSED)}
    assert backend.placed - made.pool.ids == placed | {i for i in live if live[i].state is SandboxState.CLOSING}
    assert backend.paused == {i for i, record in live.items() if record.state is SandboxState.PAUSED}
    assert set(backend.kept) == {kept.id for kept in made.snapshots.list(None)}
    assert sum(made.records.tenants.values()) == len(live)
    await made.records.flush()
    stored = {record.id: (record.state, record.calls) for record in await made._store.live()}
    assert stored == {i: (record.state, record.calls) for i, record in live.items()}
    states: dict[str, SandboxState] = {}
    for event in (await made.events(0)).events:
        before = states.get(event.sandbox)
        assert before is None or event.state in NEXT[before], (event.sandbox, before, event.state)
        states[event.sandbox] = event.state
    assert {i for i, state in states.items() if state in LIVE} == live.keys()


async def calm(made: Controller, backend: WaveringBackend) -> None:
    """Let everything end that is under way, then sweep with a backend that works."""
    backend.failing = 0.0
    while made._tasks or made._creating or made._closing:
        under_way = [*made._tasks, *made._creating.values(), *made._closing.values()]
        await asyncio.wait(under_way)
        await asyncio.sleep(0)
    backend.failures.clear()
    await made.sweep()


async def do_anything(made: Controller, chance: random.Random, number: int) -> None:
    ids = list(made.records.live)
    which = chance.choice(ids) if ids else "sb-none"
    key = f"v{chance.randrange(12)}"
    kept = made.snapshots.list(None)
    spec = SandboxSpec(
        ttl_s=chance.choice([0.05, 60.0]), snapshot=chance.choice([*kept]).id if kept and number % 3 else ""
    )
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: made.create("o", f"k{chance.randrange(20)}", spec),
        lambda: made.create("o", f"n{number}", spec),
        lambda: made.create_group("p", {f"g{number}": SPEC, f"h{chance.randrange(9)}": SPEC}),
        lambda: made.close(which, "closed"),
        lambda: made.close_key("o", f"k{chance.randrange(20)}"),
        lambda: made.relay.renew(which, chance.choice([0.02, 60.0])),
        lambda: made.relay.exec(which, TRUE, b"{}", key),
        lambda: made.pause(which, key),
        lambda: made.pause(which, f"p{number}"),
        lambda: made.resume(which, f"r{number}"),
        lambda: made.snapshot(which, key, chance.choice([0.05, 60.0])),
        lambda: made.forget_snapshot(kept[0].id if kept else "snap-none"),
        made.sweep,
    ]
    try:
        await chance.choice(calls)()
    except AgentRLError:
        # Refusals and failures are as good an outcome as any: what counts is what is left.
        return


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_at_once_leaves_a_consistent_controller(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    backend = WaveringBackend(chance, failing=0.15 if seed % 2 else 0.0)
    async with controller(backend, tmp_path, capacity=12, warm=1 if seed % 3 == 0 else 0) as made:
        for round_ in range(3):
            backend.failing = 0.15 if seed % 2 else 0.0
            running = [asyncio.create_task(do_anything(made, chance, 100 * round_ + n)) for n in range(60)]
            for task in running:
                if chance.random() < 0.15:
                    task.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(*running, return_exceptions=True)
            await calm(made, backend)
            await consistent(made, backend)
        for sandbox_id in list(made.records.live):
            await made.close(sandbox_id, "closed")
        await consistent(made, backend)
        assert not backend.placed - made.pool.ids


# --- cut off at every await --------------------------------------------------------------------


@pytest.mark.parametrize("work", ["create", "group", "pause", "resume", "snapshot", "forget", "close", "sweep"])
async def test_cancelled_at_any_await_it_leaks_nothing_and_can_be_asked_again(work: str, tmp_path: Path) -> None:
    backend = WaveringBackend(random.Random(0), failing=0.0)
    async with controller(backend, tmp_path) as made:
        number, cut = 0, True
        while cut:
            number += 1
            box = await made.create("o", f"box{number}", SPEC)
            kept = await made.snapshot(box.id, "kept", 60.0)
            if work == "resume":
                await made.pause(box.id, "p")

            def ask(box_id: str = box.id, kept_id: str = kept.id, n: int = number) -> Coroutine[Any, Any, Any]:
                return {
                    "create": lambda: made.create("o", f"k{n}", SPEC),
                    "group": lambda: made.create_group("o", {f"a{n}": SPEC, f"b{n}": SPEC}),
                    "pause": lambda: made.pause(box_id, "again"),
                    "resume": lambda: made.resume(box_id, "again"),
                    "snapshot": lambda: made.snapshot(box_id, "again", 60.0),
                    "forget": lambda: made.forget_snapshot(kept_id),
                    "close": lambda: made.close(box_id, "closed"),
                    "sweep": made.sweep,
                }[work]()

            cut = await asyncio.create_task(cancelled_at(number, ask()))
            first = len(backend.placed)
            await ask()
            assert len(backend.placed) <= max(first, 3), "asked again, it must not act again"
            await calm(made, backend)
            await consistent(made, backend)
            for key in (f"k{number}", f"a{number}", f"b{number}"):
                await made.close_key("o", key)
            await made.close(box.id, "closed")
            for snapshot in made.snapshots.list(None):
                await made.forget_snapshot(snapshot.id)
            assert not backend.placed
            assert not backend.kept
        assert number > 1


async def test_a_controller_that_stops_while_it_creates_leaves_nothing(backend: PlacingBackend, tmp_path: Path) -> None:
    backend.gates["create"] = asyncio.Event()
    async with controller(backend, tmp_path) as made:
        creating = asyncio.create_task(made.create("o", "k", SPEC))
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, backend.gates["create"].set)
    assert (await creating).state in (SandboxState.CLOSING, SandboxState.CLOSED)
    assert not backend.placed


# --- leases ------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> PlacingBackend:
    return PlacingBackend()


async def test_a_renewal_while_others_are_swept_counts(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        await made.relay.renew(box.id, 0.01)
        await asyncio.sleep(0.02)
        backend.placed.add("sb-orphan")
        backend.gates["destroy"] = asyncio.Event()
        sweep = asyncio.create_task(made.sweep())
        await asyncio.sleep(0.02)
        await made.relay.renew(box.id, 60.0)
        backend.gates["destroy"].set()
        await sweep
        assert (await made.records.get(box.id)).state is SandboxState.READY


async def test_no_renewal_succeeds_once_the_lease_is_being_ended(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        await made.relay.renew(box.id, 0.01)
        await asyncio.sleep(0.02)
        backend.gates["destroy"] = asyncio.Event()
        sweep = asyncio.create_task(made.sweep())
        while (await made.records.get(box.id)).state is not SandboxState.CLOSING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for call in (made.relay.renew(box.id, 60.0), made.pause(box.id, "p"), made.relay.exec(box.id, TRUE, b"", "e")):
            with pytest.raises(SandboxLost):
                await call
        backend.gates["destroy"].set()
        await sweep
        assert (await made.records.get(box.id)).state is SandboxState.CLOSED


@pytest.mark.parametrize("seed", range(4))
async def test_renewals_that_race_sweeps_neither_kill_nor_immortalize(
    seed: int, backend: PlacingBackend, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    async with controller(backend, tmp_path, sweep_s=0.005) as made:
        promised: dict[str, float] = {}

        async def renews(number: int) -> str:
            box = await made.create("o", f"k{number}", SPEC)
            try:
                for _ in range(30):
                    record = await made.relay.renew(box.id, 0.03)
                    promised[box.id] = record.deadline
                    await asyncio.sleep(chance.uniform(0.0, 0.045))
            except SandboxLost:
                pass
            return box.id

        ids = await asyncio.gather(*(renews(number) for number in range(8)))
        async with asyncio.timeout(10):
            while made.records.live:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await calm_plain(made)
        ended = {event.sandbox: event.at for event in (await made.events(0)).events if event.state == "CLOSING"}
        for sandbox_id in ids:
            assert ended[sandbox_id] >= promised[sandbox_id]


async def test_one_that_became_ready_during_a_slow_look_is_not_lost(backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        backend.gates["inventory"] = asyncio.Event()
        sweep = asyncio.create_task(made.sweep())
        await asyncio.sleep(0.01)
        box = await made.create("o", "k", SPEC)
        backend.gates.pop("inventory").set()
        assert (await sweep).lost == 0
        assert (await made.records.get(box.id)).state is SandboxState.READY


# --- DELETE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", LIVE)
async def test_delete_works_in_every_live_state(state: SandboxState, backend: PlacingBackend, tmp_path: Path) -> None:
    async with controller(backend, tmp_path) as made:
        await reach(state, made, backend)
        (sandbox_id,) = made.records.live
        assert made.records.live[sandbox_id].state is state
        closes = [asyncio.create_task(made.close(sandbox_id, "closed")) for _ in range(3)]
        await asyncio.sleep(0.01)
        for gate in backend.gates.values():
            gate.set()
        for closed in await asyncio.gather(*closes):
            assert closed.state is SandboxState.CLOSED
        await calm_plain(made)
        await consistent(made, backend)
        assert not backend.placed


async def reach(state: SandboxState, made: Controller, backend: PlacingBackend) -> None:
    """One sandbox in that state."""
    if state is SandboxState.QUEUED:
        made.records.new("o", "k", SPEC, digest="d", state=state)
        return
    if state is SandboxState.CREATING:
        backend.gates["create"] = asyncio.Event()
    creating = asyncio.create_task(made.create("o", "k", SPEC))
    await asyncio.sleep(0.02)
    if state is SandboxState.CREATING:
        creating.add_done_callback(lambda task: task.exception())
        return
    box = await creating
    if state is SandboxState.PAUSED:
        await made.pause(box.id, "p")
    if state is SandboxState.CLOSING:
        backend.gates["destroy"] = asyncio.Event()
        closing = asyncio.create_task(made.close(box.id, "closed"))
        await asyncio.sleep(0.02)
        closing.add_done_callback(lambda task: task.exception())


async def calm_plain(made: Controller) -> None:
    while made._tasks or made._creating or made._closing:
        await asyncio.wait([*made._tasks, *made._creating.values(), *made._closing.values()])
        await asyncio.sleep(0)


async def test_a_close_while_the_backend_was_away_is_ended_by_a_sweep_or_a_restart(
    backend: PlacingBackend, tmp_path: Path
) -> None:
    async with controller(backend, tmp_path, leave=True) as made:
        one, two = await made.create("o", "1", SPEC), await made.create("o", "2", SPEC)
        for box in (one, two):
            backend.failures["destroy"] = SandboxError("the engine is away")
            with pytest.raises(SandboxError):
                await made.close(box.id, "closed by a test")
            assert (await made.records.get(box.id)).state is SandboxState.CLOSING
        backend.failures["destroy"] = SandboxError("the engine is away still")
        await made.sweep()
        assert {record.state for record in made.records.live.values()} == {SandboxState.CLOSING}
        await made.records.flush()
    backend.failures["destroy"] = SandboxError("and for one of them at the restart, too")
    async with controller(backend, tmp_path) as made:
        assert len(made.records.live) == 1
        await made.sweep()
        for box in (one, two):
            ended = await made.records.get(box.id)
            assert (ended.state, ended.cause) == (SandboxState.CLOSED, "closed by a test")
        assert not backend.placed


async def test_another_body_with_a_used_key_is_a_conflict_and_changes_nothing(
    backend: PlacingBackend, tmp_path: Path
) -> None:
    other = SandboxSpec(workdir="/other")
    async with controller(backend, tmp_path) as made:
        box = await made.create("o", "k", SPEC)
        await made.snapshot(box.id, "s", 60.0)
        await made.pause(box.id, "p", 30.0)
        before = len(backend.calls)
        for call in (
            made.create("o", "k", other),
            made.create_group("o", {"k": other}),
            made.pause(box.id, "p", 31.0),
            made.resume(box.id, "p"),
            made.snapshot(box.id, "s", 61.0),
        ):
            with pytest.raises(Conflict):
                await call
        assert len(backend.calls) == before
        with pytest.raises((Conflict, CapacityError)):
            await made.create_group("o", {"fresh": SPEC, "k": other})
        assert list(made.records.live) == [box.id], "a group with a used key makes nothing"
