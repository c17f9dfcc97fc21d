"""The time that leases go by. Used by `records`, for all of the controller.

Invariant: Unix seconds, as the store and people want them, that no setting of the machine's clock moves: a lease is as
long as it was asked for, and never ends because the clock was put forward, or a machine was asleep.
"""

from __future__ import annotations

import time

STEP_S = 1.0
"""A smaller difference is left, and counts with the next."""


class Clock:
    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset

    def stepped(self) -> float:
        """Seconds by which the machine's clock was set since we looked last; from here on `now` goes with it.

        Whoever asks moves by as much what was measured before.
        """
        step = time.time() - self.now()
        if abs(step) < STEP_S:
            return 0.0
        self._offset += step
        return step
