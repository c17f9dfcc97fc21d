"""The pure parts of the controller: the state machine, leases, and the two-way sweep."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import Conflict
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox import leases
from sandbox.states import NEXT, TERMINAL, Record, advance

STATES = st.sampled_from(SandboxState)


def record(sandbox_id: str = "sb", state: SandboxState = SandboxState.READY, deadline: float = 100.0) -> Record:
    return Record(
        id=sandbox_id, owner="o", key=sandbox_id, digest="d", spec=SandboxSpec(ttl_s=10.0), state=state,
        created_at=0.0, deadline=deadline,
    )  # fmt: skip


@given(st.lists(STATES, max_size=12))
def test_terminal_states_never_change_and_keep_their_evidence(wanted: list[SandboxState]) -> None:
    current = record(state=SandboxState.QUEUED)
    for i, state in enumerate(wanted):
        before = current
        try:
            current = advance(current, state, now=float(i + 1), cause=f"cause {i}")
        except Conflict:
            assert state not in NEXT[before.state]
        assert not (before.state in TERMINAL and current != before)
        assert current.live == (current.ended_at == 0.0)


def test_every_live_state_can_fail_be_lost_and_be_closed() -> None:
    for state in set(SandboxState) - TERMINAL:
        assert {SandboxState.FAILED, SandboxState.LOST} <= NEXT[state]
        assert state is SandboxState.CLOSING or SandboxState.CLOSING in NEXT[state]


def test_the_next_cause_replaces_none_but_not_an_earlier_one() -> None:
    closing = advance(record(), SandboxState.CLOSING, now=1.0, cause="the lease ended")
    assert advance(closing, SandboxState.CLOSED, now=2.0).cause == "the lease ended"


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e4))
def test_commands_never_shorten_a_lease(deadline: float, now: float, running_s: float) -> None:
    before = record(deadline=deadline)
    after = leases.extended(before, now=now)
    assert after.deadline == max(deadline, now + 10.0)
    assert leases.held(after, now=now, running_s=running_s).deadline >= after.deadline
    assert leases.renewed(before, now=now, ttl_s=3.0).deadline == now + 3.0


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(STATES, st.floats(0, 10))),
    st.sets(st.sampled_from("abcdefghij")),
)
def test_sweep_is_complete_both_ways(stored: dict[str, tuple[SandboxState, float]], placed: set[str]) -> None:
    records = {name: record(name, state, deadline) for name, (state, deadline) in stored.items()}
    live = {name: r for name, r in records.items() if r.live}
    found = leases.sweep(live.values(), placed, {"a": "it was killed"}, now=5.0)
    assert set(found.orphans) == placed - live.keys()
    for name, r in live.items():
        settled = r.state in (SandboxState.READY, SandboxState.PAUSED)
        assert (name in found.lost) == (settled and name not in placed)
        assert (name in found.expired) == (settled and r.deadline <= 5.0)
    assert found.lost.get("a", "it was killed") == "it was killed"


def test_a_view_shows_the_record() -> None:
    ended = advance(replace(record(), owner="me"), SandboxState.LOST, now=7.0, cause="node gone")
    view = ended.view()
    assert (view.id, view.owner, view.state, view.cause) == ("sb", "me", SandboxState.LOST, "node gone")
    assert view.model_validate_json(view.model_dump_json()) == view
