"""What sandboxes cost on a Docker Engine, against the engine's own create, start and exec in the same run.

Used by `tests/bench/sandbox.py` where AGENTRL_TEST_DOCKER names an image.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandboxes import DOCKER, TOKEN, ControllerProcess, sandbox_config

from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.client import SandboxClient

TRUE = ExecRequest(argv=("true",))


async def docker_costs(rounds: int = 12, commands: int = 10) -> dict[str, Any]:
    """Medians in ms and their ratios. Rounds alternate between ours and the engine's, so that both meet one load."""
    import docker

    engine = docker.APIClient()
    process = ControllerProcess(
        Path(tempfile.mkdtemp(prefix="docker-bench-")), settings=sandbox_config("docker").model_dump(mode="json")
    )
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    await client.list()
    seen: dict[str, list[float]] = {name: [] for name in ("create", "exec", "close", "raw_create_start", "raw_exec")}
    for i in range(rounds):
        await _ours(client, f"k{i}", commands, seen)
        await asyncio.to_thread(_raw, engine, commands, seen)
    await client.close()
    engine.close()
    await process.signal(signal.SIGTERM)
    # The first round meets cold caches of the engine.
    p50 = {name: round(statistics.median(values[1:]), 3) for name, values in seen.items()}
    return {
        "p50_ms": p50,
        "exec_to_docker_exec": round(p50["exec"] / p50["raw_exec"], 4),
        "create_to_raw_create_start": round(p50["create"] / p50["raw_create_start"], 3),
    }


async def _ours(client: SandboxClient, key: str, commands: int, seen: dict[str, list[float]]) -> None:
    scope = client.acquire(SandboxSpec(), owner="bench", key=key)
    sandbox = await _timed(seen["create"], scope.__aenter__)
    for _ in range(commands):
        await _timed(seen["exec"], lambda: sandbox.exec(TRUE))
    await _timed(seen["close"], lambda: scope.__aexit__(None, None, None))


async def _timed(values: list[float], work: Callable[[], Awaitable[Any]]) -> Any:
    started = time.perf_counter()
    result = await work()
    values.append((time.perf_counter() - started) * 1e3)
    return result


def _raw(engine: Any, commands: int, seen: dict[str, list[float]]) -> None:
    started = time.perf_counter()
    options = engine.create_host_config(network_mode="none")
    container = engine.create_container(os.environ[DOCKER], ["sleep", "600"], host_config=options)["Id"]
    engine.start(container)
    seen["raw_create_start"].append((time.perf_counter() - started) * 1e3)
    for _ in range(max(1, commands // 5)):
        started = time.perf_counter()
        subprocess.run(["docker", "exec", container, "true"], check=True)
        seen["raw_exec"].append((time.perf_counter() - started) * 1e3)
    engine.remove_container(container, force=True)
