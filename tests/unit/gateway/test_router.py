"""Sessions stay where their prefix is cached, and no replica is home to many more than its share."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.router import SLACK, Router

URLS = ["http://a", "http://b", "http://c"]


@given(sessions=st.integers(1, 200), replicas=st.integers(1, 3))
def test_load_is_bounded_and_homes_are_kept(sessions: int, replicas: int) -> None:
    router, urls = Router(), URLS[:replicas]
    homes = {f"s{n}": router.choose(f"s{n}", urls, urls) for n in range(sessions)}
    assert max(router.sessions(url) for url in urls) <= math.ceil(SLACK * sessions / replicas)
    assert {session: router.choose(session, urls, urls) for session in homes} == homes


def test_a_dead_replica_loses_its_sessions_and_no_other_moves() -> None:
    router = Router()
    before = {f"s{n}": router.choose(f"s{n}", URLS, URLS) for n in range(60)}
    left = URLS[1:]
    after = {session: router.choose(session, left, left) for session in before}
    assert all(after[session] == home for session, home in before.items() if home in left)
    assert set(after.values()) == set(left)
    assert router.sessions(URLS[0]) == 0


def test_a_replica_that_updates_keeps_its_sessions() -> None:
    router = Router()
    home = router.choose("s", URLS, URLS)
    others = [url for url in URLS if url != home]
    assert router.choose("s", others, URLS) in others
    assert router.choose("s", URLS, URLS) == home


def test_release_frees_the_place() -> None:
    router = Router()
    home = router.choose("s", URLS, URLS)
    assert home is not None
    router.release("s")
    router.release("s")
    assert router.sessions(home) == 0
    assert router.choose("s", [], []) is None
