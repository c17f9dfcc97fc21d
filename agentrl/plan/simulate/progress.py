"""How a long simulation tells how far it is. Implemented by the command line; tests pass `silent`."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps to do."""


def silent(done: int, total: int) -> None:
    """Tells nobody."""
