"""Which replica serves a session. A pure state machine: owns no task and no client; called by `pool`.

Invariant: a session stays with its replica while that lives, so that its turns find their prefix cached;
no replica is home to many more sessions than its share.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence

SLACK = 1.25
"""Largest number of sessions on one replica, as a multiple of the mean."""


class Router:
    """Rendezvous hashing with bounded load."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}
        self._load: Counter[str] = Counter()

    def choose(self, session_id: str, usable: Sequence[str], live: Collection[str]) -> str | None:
        """The replica of `usable` for the next call. None when there is none.

        `live` includes those that take no calls just now: a session makes a detour around its home while it
        updates its weights, and loses the home only when it is gone.
        """
        home = self._home.get(session_id)
        if home in usable:
            return home
        if not usable:
            return None
        ranked = sorted(usable, key=lambda url: _weight(session_id, url), reverse=True)
        if home in live:
            return ranked[0]
        self.release(session_id)
        limit = math.ceil(SLACK * (len(self._home) + 1) / len(usable))
        chosen = next((url for url in ranked if self._load[url] < limit), ranked[0])
        self._home[session_id] = chosen
        self._load[chosen] += 1
        return chosen

    def release(self, session_id: str) -> None:
        """Forget a session. Idempotent."""
        home = self._home.pop(session_id, None)
        if home is not None:
            self._load[home] -= 1

    def sessions(self, url: str) -> int:
        """Sessions that have their home at `url`."""
        return self._load[url]


def _weight(session_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session_id}\n{url}".encode(), digest_size=8).digest()
