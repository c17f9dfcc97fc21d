"""Says in our errors what a database's driver says in its own. Used by `store`, `snapshot_store` and `feed`.

Invariant: a store that is away is ServiceUnavailable, and one that somebody else wrote to is Conflict.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa

from agentrl.core.errors import Conflict, ServiceUnavailable


@asynccontextmanager
async def reachable() -> AsyncIterator[None]:
    """Say in our errors what the database's driver says in its own."""
    try:
        yield
    except sa.exc.IntegrityError as error:
        raise Conflict(f"another controller took an idempotency key or an event's number: {error.orig}") from error
    except (sa.exc.DBAPIError, sa.exc.TimeoutError, OSError) as error:
        raise ServiceUnavailable(f"the store does not answer: {error}") from error
