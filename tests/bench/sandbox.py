"""What sandboxes cost: create, exec, read and close through the controller, against raw fork+exec and `unshare`.

    python tests/bench/sandbox.py [--episodes N] [--concurrency N] [--rate EPISODES_PER_S]

Prints one JSON object: milliseconds (p50, p95), CPU milliseconds an episode by process, and ratios to the raw
baselines measured in the same run. An episode is: create, 3 commands, 1 file read, close. Where AGENTRL_TEST_DOCKER
names an image of a running Docker Engine, also the docker backend against that engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# In place of this script's folder, in which its own name would hide the `sandbox` package.
sys.path[0] = str(Path(__file__).parents[1] / "support")
from docker_costs import docker_costs  # noqa: E402
from sandboxes import DOCKER, TOKEN, ControllerProcess, fork_server  # noqa: E402

from agentrl.core.types import ExecRequest, SandboxSpec  # noqa: E402
from sandbox.client import SandboxClient  # noqa: E402

SPEC = SandboxSpec(files={f"vault/file{i}.txt": f"line {i}\n" * 20 for i in range(5)})
TRUE = ExecRequest(argv=("true",))
UNSHARE = ["unshare", "--fork", "--pid", "--mount", "--net", "--ipc", "--uts", "--mount-proc", "true"]


class Timer:
    """Durations by name, in milliseconds."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)

    async def __call__(self, name: str, work: Any) -> Any:
        started = time.perf_counter()
        result = await work
        self.seen[name].append((time.perf_counter() - started) * 1e3)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: quantiles(values) for name, values in self.seen.items()}


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"p50_ms": round(cuts[9], 3), "p95_ms": round(cuts[18], 3)}


def raw(argv: list[str], repeats: int = 60) -> dict[str, float]:
    """Starting and awaiting a program, without any of ours."""
    values = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(argv, check=True)
        values.append((time.perf_counter() - started) * 1e3)
    return quantiles(values)


async def episode(client: SandboxClient, key: str, timer: Timer, pause: Callable[[], float]) -> None:
    scope = client.acquire(SPEC, owner="bench", key=key)
    sandbox = await timer("create", scope.__aenter__())
    for _ in range(3):
        await asyncio.sleep(pause())
        await timer("exec", sandbox.exec(TRUE))
    await timer("read", sandbox.read("vault/file1.txt"))
    await timer("close", scope.__aexit__(None, None, None))


async def sequential(client: SandboxClient, count: int, name: str) -> Timer:
    """One episode at a time: latencies without queueing."""
    timer = Timer()
    for i in range(count):
        await episode(client, f"{name}-{i}", timer, lambda: 0.0)
    return timer


async def sustained(client: SandboxClient, count: int, concurrency: int, rate: float) -> tuple[Timer, float]:
    """Episodes arrive `rate` a second and live as long as keeps `concurrency` of them open."""
    timer, chance = Timer(), random.Random(0)

    def pause() -> float:
        return chance.uniform(0.5, 1.5) * concurrency / rate / 3

    tasks = []
    started = time.perf_counter()
    for i in range(count):
        await asyncio.sleep(max(0.0, started + i / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(episode(client, f"sustained-{i}", timer, pause)))
    await asyncio.gather(*tasks)
    return timer, time.perf_counter() - started


def cpu_ms(controller: psutil.Process, server: psutil.Process) -> dict[str, float]:
    """CPU used so far: sandboxes count for the fork server once it has reaped them."""
    own, forks, us = controller.cpu_times(), server.cpu_times(), os.times()
    return {
        "controller": (own.user + own.system) * 1e3,
        "fork_server": (forks.user + forks.system) * 1e3,
        "sandboxes": (forks.children_user + forks.children_system) * 1e3,
        "client": (us.user + us.system) * 1e3,
    }


def rss_mib(server: psutil.Process) -> dict[str, float]:
    """Private memory (USS) of an idle sandbox and of the fork server."""
    idle = [child.memory_full_info().uss / 2**20 for child in server.children()]
    return {"sandbox_uss": round(statistics.median(idle), 2), "fork_server": server.memory_info().rss / 2**20}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--rate", type=float, default=25.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sandbox-bench-"))
    process = ControllerProcess(folder)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    await client.list()
    controller, server = psutil.Process(process.pid), fork_server(folder)
    await sequential(client, 20, "warm-up")
    alone = (await sequential(client, 100, "sequential")).summary()
    before = cpu_ms(controller, server)
    timer, seconds = await sustained(client, options.episodes, options.concurrency, options.rate)
    after = cpu_ms(controller, server)
    async with client.acquire(SPEC, owner="bench", key="idle"):
        memory = rss_mib(server)
    baseline = {"fork_exec": raw(["true"]), "unshare": raw(UNSHARE)}
    cpu = {name: round((after[name] - before[name]) / options.episodes, 3) for name in after}
    result: dict[str, Any] = {
        "sequential": alone,
        "sustained": {
            "concurrency": options.concurrency,
            "episodes_per_s": round(options.episodes / seconds, 2),
            **timer.summary(),
        },
        "cpu_ms_per_episode": {**cpu, "total_without_client": round(sum(cpu.values()) - cpu["client"], 3)},
        "memory_mib": memory,
        "raw": baseline,
        "ratios": {
            "exec_to_fork_exec": round(alone["exec"]["p50_ms"] / baseline["fork_exec"]["p50_ms"], 3),
            "create_to_unshare": round(alone["create"]["p50_ms"] / baseline["unshare"]["p50_ms"], 3),
        },
        "load_average": os.getloadavg()[0],
    }
    await client.close()
    await process.signal(signal.SIGTERM)
    if DOCKER in os.environ:
        result["docker"] = await docker_costs()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
