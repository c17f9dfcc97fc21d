"""What the controller adds: sandboxes of the pool, the event feed, and the memory of many idle ones.

Used by `tests/bench/sandbox.py`.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
from sandboxes import running_controller

from agentrl.core.db import open_database, sqlite_url
from agentrl.core.http import Service
from agentrl.core.telemetry import Metrics
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox.api import MIGRATIONS
from sandbox.client import SandboxClient
from sandbox.metrics import SPECS
from sandbox.records import Records
from sandbox.store import SandboxStore


async def warm_acquire_ms(settings: dict[str, Any], spec: SandboxSpec, count: int = 12) -> float:
    """Median of an acquire that the pool answers, its files included."""
    values: list[float] = []
    async with running_controller({**settings, "warm": 2}) as (client, url), asyncio.timeout(120):
        attempt = 0
        while len(values) < count:
            hits, scope = await _hits(url), client.acquire(spec, owner="bench", key=f"k{attempt}")
            started = time.perf_counter()
            await scope.__aenter__()
            took_ms = (time.perf_counter() - started) * 1e3
            # Those that found the pool empty are no warm ones.
            if await _hits(url) > hits:
                values.append(took_ms)
            await scope.__aexit__(None, None, None)
            attempt += 1
            await asyncio.sleep(0.2)
    return round(statistics.median(values), 3)


async def _hits(url: str) -> float:
    service = Service(url)
    try:
        metrics = (await service.request("GET", "/metrics")).text
    finally:
        await service.close()
    found = re.search(r'agentrl_sandbox_warm_total\{outcome="hit"\} (\S+)', metrics)
    return float(found[1]) if found else 0.0


async def feed_ms(rounds: int = 200) -> dict[str, float]:
    """What the store takes for the records of a creation and of a close, and how much of it is the event feed."""
    found: dict[str, list[float]] = {"create": [], "create_bare": [], "close": [], "close_bare": []}
    for suffix in ("", "_bare"):
        folder = Path(tempfile.mkdtemp(prefix="feed-bench-"))
        database = await open_database(sqlite_url(folder / "sandbox.db"), room="sandbox", migrations=MIGRATIONS)
        store = SandboxStore(database)
        if suffix:
            store.feed.note = lambda record: None  # type: ignore[method-assign]
        records = Records(store, metrics=Metrics(SPECS), retention_s=3600.0, ended=lambda sandbox_id: None)
        for i in range(rounds):
            started = time.perf_counter()
            record = records.new("bench", str(i), SandboxSpec(), digest="d", state=SandboxState.CREATING)
            await records.save(record)
            created = time.perf_counter()
            closing = records.step(records.step(record, SandboxState.READY), SandboxState.CLOSING)
            await records.end(closing, SandboxState.CLOSED, "closed")
            found[f"create{suffix}"].append((created - started) * 1e3)
            found[f"close{suffix}"].append((time.perf_counter() - created) * 1e3)
        await store.close()
    p50 = {name: statistics.median(values) for name, values in found.items()}
    return {
        "create_ms": round(p50["create"], 3),
        "of_it_feed_ms": round(p50["create"] - p50["create_bare"], 3),
        "close_ms": round(p50["close"], 3),
        "of_that_feed_ms": round(p50["close"] - p50["close_bare"], 3),
    }


async def idle_mib(
    client: SandboxClient, server: psutil.Process, spec: SandboxSpec, count: int = 200
) -> dict[str, Any]:
    """Memory of each of many idle sandboxes: private (USS), with its share of what is common (PSS), of the machine."""
    before = psutil.virtual_memory().available
    async with AsyncExitStack() as stack:
        for i in range(count):
            await stack.enter_async_context(client.acquire(spec, owner="bench", key=f"idle-{i}"))
        infos = [child.memory_full_info() for child in server.children()]
        taken = (before - psutil.virtual_memory().available) / count
    return {
        "sandboxes": len(infos),
        "uss": round(statistics.median(info.uss for info in infos) / 2**20, 2),
        "pss": round(statistics.fmean(info.pss for info in infos) / 2**20, 2),
        "taken_from_the_machine": round(taken / 2**20, 2),
        "fork_server_rss": round(server.memory_info().rss / 2**20, 2),
    }
