"""The dispatcher under random completions, versions, failures and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.core.config import RolloutConfig
from agentrl.rollout.dispatcher import Dispatcher, Ended, GroupEnd, Result, Slot
from agentrl.rollout.staleness import Ledger
from agentrl.rollout.tables import DropReason

B, G = 2, 3
SCORED, UNSCORED, LOST = Result.SCORED, Result.UNSCORED, Result.LOST


@dataclass
class StoredGroup:
    """What the store would know of a group."""

    issued_at: int
    slots: list[Ended | None] = field(default_factory=lambda: [None] * G)
    tries: list[int] = field(default_factory=lambda: [0] * G)
    state: str = "running"
    version: int = -1
    """At which it was consumed or dropped."""


class Trial(RuleBasedStateMachine):
    """A dispatcher, with a store and a trainer played around it."""

    @initialize(
        form=st.sampled_from(["sync", "one_step", "async"]),
        concurrency=st.integers(1, 12),
        reissues=st.integers(0, 2),
        max_lag=st.integers(0, 2),
        flat_limit=st.integers(0, 2),
    )
    def begin(self, form: str, concurrency: int, reissues: int, max_lag: int, flat_limit: int) -> None:
        self.config = RolloutConfig.model_validate(
            {
                "form": form, "groups": B, "group_size": G, "concurrency": concurrency, "reissues": reissues,
                "max_lag": max_lag, "flat_limit": flat_limit,
            }
        )  # fmt: skip
        self.dispatcher = Dispatcher(self.config, steps=10**6)
        self.groups: dict[str, StoredGroup] = {}
        self.running: list[Slot] = []
        self.version, self.steps = -1, 0

    def ledger(self) -> Ledger:
        def count(*, state: str) -> int:
            return sum(group.state == state for group in self.groups.values())

        consumed = sum(g.state == "consumed" and g.version >= self.version for g in self.groups.values())
        flat = sum(g.state == "flat" and g.version >= self.version for g in self.groups.values())
        return Ledger(
            self.version, ready=count(state="ready"), consumed=consumed, flat=flat, steps=self.steps, taken=self.steps,
            served=self.version,
        )  # fmt: skip

    def complete(self, group_id: str) -> None:
        end = self.dispatcher.complete(group_id)
        if end is None:
            return
        group = self.groups[group_id]
        assert group.state == "running", "a group ended twice"
        assert all(slot is not None for slot in group.slots), "a slot was lost"
        group.state = end.reason.value if end.reason else "ready"
        group.version = self.version

    @rule()
    def observe(self) -> None:
        self.dispatcher.observe(self.ledger())

    @rule()
    def issue(self) -> None:
        while self.dispatcher.wants_group():
            group_id = f"g{len(self.groups)}"
            self.groups[group_id] = StoredGroup(self.version)
            self.dispatcher.admit(group_id)
            self.start()

    @rule()
    def start(self) -> None:
        while (slot := self.dispatcher.next()) is not None:
            assert slot not in self.running, "a slot runs twice"
            assert self.groups[slot.group_id].slots[slot.index] is None, "an ended slot runs again"
            self.running.append(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), result=st.sampled_from(Result), reward=st.sampled_from([0.0, 1.0]))
    def end(self, data: st.DataObject, result: Result, reward: float) -> None:
        slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.finish(slot, Ended(result, reward if result is SCORED else None))

    def finish(self, slot: Slot, end: Ended) -> None:
        group = self.groups[slot.group_id]
        again = self.dispatcher.ended(slot, end)
        group.tries[slot.index] += end.result is LOST
        assert again == (end.result is LOST and group.tries[slot.index] <= self.config.reissues)
        if not again:
            group.slots[slot.index] = end
            self.complete(slot.group_id)

    @rule()
    def take(self) -> None:
        ready = [group for group in self.groups.values() if group.state == "ready"]
        taken = any(g.state == "consumed" and g.version == self.version for g in self.groups.values())
        if len(ready) >= B and not taken:
            for group in ready[:B]:
                group.state, group.version = "consumed", self.version
            self.steps += 1

    @rule()
    def publish(self) -> None:
        if self.version < 0 or any(g.state == "consumed" and g.version == self.version for g in self.groups.values()):
            self.version += 1

    @rule()
    def trainer_dies(self) -> None:
        """Its open claims are given back, and the restored weights get a version of their own."""
        for group in self.groups.values():
            if group.state == "consumed" and group.version == self.version:
                group.state = "ready"
        self.version += self.version >= 0

    @rule()
    def rollout_dies(self) -> None:
        self.dispatcher = Dispatcher(self.config, steps=10**6)
        self.running = []
        for id_, group in self.groups.items():
            if group.state == "running":
                self.dispatcher.restore(id_, group.slots, group.tries)
                self.complete(id_)

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        assert self.dispatcher.running == len(self.running) <= self.config.concurrency
        assert self.dispatcher.open_groups == sum(group.state == "running" for group in self.groups.values())
        ledger = self.ledger()
        assert self.dispatcher.open_groups + ledger.ready + ledger.consumed <= (self.config.lag_limit + 1) * B

    def teardown(self) -> None:
        """Whatever happened, a healthy world goes on: five more steps within a bounded number of rounds."""
        if not hasattr(self, "dispatcher"):
            return
        goal = self.steps + 5
        for turn in range(200):
            self.observe()
            self.issue()
            self.start()
            for slot in list(self.running):
                self.running.remove(slot)
                self.finish(slot, Ended(SCORED, float(slot.index + turn)))
            self.bounded()
            self.take()
            self.publish()
            if self.steps == goal:
                return
        raise AssertionError(f"deadlock: {self.dispatcher.waiting_for()}")


TestDispatcherUnderRandomEvents = Trial.TestCase
TestDispatcherUnderRandomEvents.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def _config(**changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"groups": B, "group_size": G, "form": "sync", **changes})


def _at_version(dispatcher: Dispatcher, version: int = 0, *, flat: int = 0) -> None:
    dispatcher.observe(Ledger(version=version, ready=0, consumed=0, flat=flat, steps=0, taken=0, served=0))


def _play_group(dispatcher: Dispatcher, ends: list[Ended]) -> GroupEnd | None:
    dispatcher.admit("g")
    slots = [dispatcher.next() for _ in ends]
    for slot, end in zip(slots, ends, strict=True):
        assert slot is not None
        assert not dispatcher.ended(slot, end)
    return dispatcher.complete("g")


def _scored(*rewards: float) -> list[Ended]:
    return [Ended(SCORED, reward) for reward in rewards]


def test_nothing_is_issued_before_the_first_version() -> None:
    dispatcher = Dispatcher(_config(), steps=100)
    assert not dispatcher.wants_group()
    assert dispatcher.waiting_for() == "the trainer's first policy version"


@pytest.mark.parametrize(("form", "outstanding"), [("sync", B), ("one_step", 2 * B), ("async", 3 * B)])
def test_each_form_keeps_so_many_groups_outstanding(form: str, outstanding: int) -> None:
    dispatcher = Dispatcher(_config(form=form, max_lag=2, concurrency=1000), steps=100)
    _at_version(dispatcher)
    issued = 0
    while dispatcher.wants_group():
        dispatcher.admit(f"g{issued}")
        issued += 1
    assert issued == outstanding


def test_no_group_is_issued_that_no_step_is_left_for() -> None:
    dispatcher = Dispatcher(_config(form="async", max_lag=2, concurrency=1000), steps=10)
    dispatcher.observe(Ledger(version=8, ready=1, consumed=B, flat=0, steps=8, taken=9, served=8))
    assert dispatcher.room == B - 1


def test_at_limit_drop_issues_whatever_the_concurrency_takes() -> None:
    dispatcher = Dispatcher(_config(form="async", at_limit="drop", concurrency=100 * G), steps=100)
    dispatcher.observe(Ledger(version=0, ready=50, consumed=0, flat=0, steps=0, taken=0, served=0))
    issued = 0
    while dispatcher.wants_group():
        dispatcher.admit(f"g{issued}")
        issued += 1
    assert issued == 100


def test_a_group_with_enough_scored_attempts_is_ready_without_the_lost_ones() -> None:
    dispatcher = Dispatcher(_config(reissues=0), steps=100)
    _at_version(dispatcher)
    assert _play_group(dispatcher, [*_scored(0.0, 1.0), Ended(LOST)]) == GroupEnd("g", None)


def test_a_group_with_too_few_scored_attempts_is_dropped() -> None:
    dispatcher = Dispatcher(_config(reissues=0), steps=100)
    _at_version(dispatcher)
    end = _play_group(dispatcher, [*_scored(1.0), Ended(LOST), Ended(UNSCORED)])
    assert end == GroupEnd("g", DropReason.TOO_FEW_SCORED)
    assert dispatcher.wants_group()


@pytest.mark.parametrize(("flat", "reason"), [(0, DropReason.FLAT), (B - 1, DropReason.FLAT), (B, None)])
def test_flat_groups_are_replaced_within_the_budget_of_the_version(flat: int, reason: DropReason | None) -> None:
    dispatcher = Dispatcher(_config(flat_limit=1), steps=100)
    _at_version(dispatcher, flat=flat)
    assert _play_group(dispatcher, _scored(1.0, 1.0, 1.0)) == GroupEnd("g", reason)


def test_flat_groups_are_kept_when_resampling_is_off() -> None:
    dispatcher = Dispatcher(_config(resample_flat=False), steps=100)
    _at_version(dispatcher)
    assert _play_group(dispatcher, _scored(1.0, 1.0, 1.0)) == GroupEnd("g", None)


def test_a_lost_attempt_comes_before_newer_groups() -> None:
    dispatcher = Dispatcher(_config(form="async", concurrency=1, reissues=1), steps=100)
    _at_version(dispatcher)
    dispatcher.admit("old")
    first = dispatcher.next()
    dispatcher.admit("new")
    assert first is not None
    assert dispatcher.ended(first, Ended(LOST))
    assert dispatcher.next() == first


def test_in_order_consumption_never_exceeds_the_limit() -> None:
    """The theorem that pacing rests on, with every group issued as early as it may be."""
    config = _config(form="async", max_lag=2, concurrency=1000)
    dispatcher = Dispatcher(config, steps=1000)
    issued: list[int] = []
    taken = 0
    for version in range(30):
        ready = len(issued) - taken
        dispatcher.observe(
            Ledger(version=version, ready=ready, consumed=0, flat=0, steps=version, taken=version, served=version)
        )
        room = dispatcher.room
        issued += [version] * room
        assert len(issued) - taken >= B
        assert all(version - at <= config.lag_limit for at in issued[taken : taken + B])
        taken += B
    assert max(at for at in issued) == 29
