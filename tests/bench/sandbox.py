"""What sandboxes cost: create, exec, read and close through the controller, against raw baselines in the same run.

    python tests/bench/sandbox.py [--episodes N] [--concurrency N] [--rate EPISODES_PER_S]

Prints one JSON object: milliseconds (p50, p95), CPU milliseconds an episode by process, ratios to the raw baselines,
and for each target of the project its figure and whether it is met. An episode is: create, 3 commands, 1 file read,
close. SWE-ReX's local runtime, fork+exec and `unshare` are the peers of the local backend; where AGENTRL_TEST_DOCKER
names an image of a running Docker Engine, that engine's own create, start and exec are those of the docker backend.
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
from controller_costs import feed_ms, idle_mib, warm_acquire_ms  # noqa: E402
from docker_costs import docker_costs  # noqa: E402
from sandboxes import DOCKER, TOKEN, ControllerProcess, fork_server, sandbox_config  # noqa: E402
from swerex_costs import swerex_costs  # noqa: E402

from agentrl.core.types import ExecRequest, SandboxSpec  # noqa: E402
from sandbox.client import SandboxClient  # noqa: E402
from sandbox.handle import RemoteShell  # noqa: E402

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


TARGETS = {
    "docker exec p50, of the engine's exec": (("docker", "exec_to_docker_exec"), 1 / 15),
    "docker cold create p50, of the engine's create and start": (("docker", "create_to_raw_create_start"), 1.3),
    "docker warm acquire p50, ms": (("docker", "warm_acquire_ms"), 20.0),
    "local warm acquire p50, ms": (("warm_acquire_ms",), 20.0),
    "local create p50, ms": (("sequential", "create", "p50_ms"), 15.0),
    "memory of each of 200 idle local sandboxes, MiB": (("idle_mib", "taken_from_the_machine"), 12.0),
}
"""By what it is: where its figure is in the result, and what it may be at most."""


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """The targets with their figures; those without were not measured."""
    found = {}
    for name, (path, at_most) in TARGETS.items():
        value: Any = result
        for word in path:
            value = value.get(word) if isinstance(value, dict) else None
        if value is not None:
            found[name] = {"value": value, "at_most": round(at_most, 4), "met": value <= at_most}
    return found


async def sessions(client: SandboxClient, rounds: int = 8, commands: int = 15) -> dict[str, float]:
    """As SWE-ReX is measured: a sandbox with a shell in it, commands in the shell, and commands by themselves."""
    timer = Timer()
    for i in range(rounds):
        scope = client.acquire(SandboxSpec(), owner="bench", key=f"session-{i}")

        async def start() -> RemoteShell:
            return await (await scope.__aenter__()).open_shell()  # noqa: B023

        shell = await timer("session_start", start())
        (view,) = await client.list(owner="bench")
        for _ in range(commands):
            await timer("session_run", shell.run("true"))
            await timer("exec", client.handle(view.id).exec(TRUE))
        await scope.__aexit__(None, None, None)
    return {name: values["p50_ms"] for name, values in timer.summary().items()}


async def local_costs(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="sandbox-bench-"))
    process = ControllerProcess(folder)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    await client.list()
    controller, server = psutil.Process(process.pid), fork_server(folder)
    await sequential(client, 20, "warm-up")
    alone = (await sequential(client, 100, "sequential")).summary()
    ours = await sessions(client)
    before = cpu_ms(controller, server)
    timer, seconds = await sustained(client, options.episodes, options.concurrency, options.rate)
    after = cpu_ms(controller, server)
    idle = await idle_mib(client, server, SPEC)
    baseline = {"fork_exec": raw(["true"]), "unshare": raw(UNSHARE)}
    await client.close()
    await process.signal(signal.SIGTERM)
    cpu = {name: round((after[name] - before[name]) / options.episodes, 3) for name in after}
    return {
        "sequential": alone,
        "sustained": {
            "concurrency": options.concurrency,
            "episodes_per_s": round(options.episodes / seconds, 2),
            **timer.summary(),
        },
        "cpu_ms_per_episode": {**cpu, "total_without_client": round(sum(cpu.values()) - cpu["client"], 3)},
        "idle_mib": idle,
        "raw": baseline,
        "ratios": {
            "exec_to_fork_exec": round(alone["exec"]["p50_ms"] / baseline["fork_exec"]["p50_ms"], 3),
            "create_to_unshare": round(alone["create"]["p50_ms"] / baseline["unshare"]["p50_ms"], 3),
        },
        "sessions_p50_ms": {"agentrl": ours, "swe_rex": swerex_costs()},
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--rate", type=float, default=25.0)
    options = parser.parse_args()
    result = await local_costs(options)
    result["warm_acquire_ms"] = await warm_acquire_ms({}, SPEC)
    result["event_feed"] = await feed_ms()
    if DOCKER in os.environ:
        settings = sandbox_config("docker").model_dump(mode="json")
        result["docker"] = await docker_costs() | {"warm_acquire_ms": await warm_acquire_ms(settings, SPEC)}
    result["load_average"] = os.getloadavg()[0]
    print(json.dumps({"targets": judged(result), **result}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
