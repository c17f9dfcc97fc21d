"""Episodes a minute, and where the time goes, with an engine that costs nothing and with the embedded one.

python tests/bench/rollout.py [--engines scripted embedded] [--steps 8] [--policy FOLDER] [section.key=value ...]

Every part but the engine and the trainer is the product's own: vault episodes over the gateway, sandboxes with
processes in them and the reward service, each a process of its own. The trainer is one that takes and commits
at once. Time shares are of episode seconds, 128 episodes side by side; `other` is opening and sealing the session
and closing the sandbox, `idle` a free place. `cpu_ms` is CPU time an episode, by process.
"""

from __future__ import annotations

import sys

# This script's own folder holds files named like packages of ours, which would hide them.
sys.path.pop(0)

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from agentrl.core.config import RunConfig, load_config
from agentrl.core.http import Service
from agentrl.core.rendering import TokenizerAdapter, load_renderer
from agentrl.core.types import GenerateRequest, Message, ToolCall
from agentrl.launch.child import RoleContext, die_with_parent
from agentrl.launch.endpoints import Endpoints, choose_endpoints
from agentrl.launch.layout import RunFolder
from agentrl.launch.local import Supervisor
from agentrl.launch.plan import child, services
from agentrl.launch.process import Role
from agentrl.launch.roles.rollout import connected
from agentrl.rollout.audit import audit
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.service import Listen, run_rollout
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import open_store_database
from agentrl.testing.engine import ScriptedEngine
from envs.vault.environment import Vault
from gateway.app import run_gateway

SETTINGS = (
    "name=bench", "eval.tasks=0", "warm_start.steps=150", "rollout.at_limit=drop", "rollout.resample_flat=false",
    "launch.live=false", "telemetry.tensorboard=false",
)  # fmt: skip
"""Version 0 serves throughout, so pacing by lag is off; every group counts."""


class Quiet:
    """A watcher that tells the progress to stderr."""

    def process(self, role: str, state: str) -> None:
        if state == "restarting":
            print(f"{role} is restarting", file=sys.stderr)


def winning_moves(folder: Path, renderer: str) -> Callable[[GenerateRequest], Sequence[int]]:
    """A policy that solves vault: list, read the target, submit what it held."""
    tokenizer, rendering = TokenizerAdapter(folder), load_renderer(folder, renderer)

    def move(request: GenerateRequest) -> Sequence[int]:
        text = tokenizer.decode(list(request.token_ids))
        turn = text.count("<|im_start|>assistant") - 1
        target = re.findall(r"Find the code in (\w+)", text)[-1]
        answers = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", text, re.DOTALL)
        command = ("ls", f"cat {target}", f"submit {answers[-1] if answers else ''}")[min(turn, 2)]
        arguments = {"command": command}
        call = ToolCall(id="call", name="bash", arguments=arguments, raw=json.dumps(arguments))
        return rendering.sampled(Message(role="assistant", tool_calls=(call,)), Vault.tools)

    return move


async def scripted_gateway(folder: RunFolder) -> None:
    """The product's gateway, with the engine inside it."""
    config, endpoints = folder.config(), Endpoints.read(folder.endpoints)
    engine = ScriptedEngine(winning_moves(folder.warm, config.model.renderer), context=config.model.tiny.context)
    await run_gateway(
        engines=[engine], tokenizer=folder.warm, renderer=config.model.renderer,
        store_url=folder.store(config, "gateway"), config=config.gateway, token=endpoints.token,
        port=endpoints.port("gateway"),
    )  # fmt: skip


def roles(kind: str, folder: RunFolder, config: RunConfig, endpoints: Endpoints) -> list[Role]:
    planned = services(folder, config, endpoints)
    if kind == "embedded":
        return planned
    argv = (sys.executable, __file__, "--gateway", str(folder.path))
    gateway = Role("gateway", argv, endpoints.url("gateway"))
    return [gateway, *(role for role in planned if role.name in ("sandbox", "reward"))]


async def consume(folder: RunFolder, config: RunConfig) -> None:
    """A trainer that costs nothing."""
    database = await open_store_database(folder.store(config, "rollout"))
    buffer = Buffer(database, staleness=Staleness.of(config.rollout), min_scored=config.rollout.min_scored)
    await buffer.publish_version(0, step=0, path="warm")
    for step in range(1, config.train.steps + 1):
        await buffer.take(step, version=0, groups=config.rollout.groups)
        await buffer.commit(step, version=0, checkpoint=f"step-{step}")
    await buffer.publish_version(1, step=config.train.steps, path="never")
    await database.close()


async def measure(kind: str, folder: RunFolder, config: RunConfig) -> dict[str, object]:
    endpoints = choose_endpoints(config)
    endpoints.write(folder.endpoints)
    context = RoleContext("rollout", folder, config, endpoints)
    async with AsyncExitStack() as held:
        supervisor = await held.enter_async_context(Supervisor(folder.logs, restarts=0, watcher=Quiet()))
        started = roles(kind, folder, config, endpoints)
        await supervisor.start(started)
        database = await open_store_database(folder.store(config, "rollout"))
        held.push_async_callback(database.close)
        rooms = await held.enter_async_context(connected(context))
        processes = {role.name: psutil.Process(supervisor.pid(role.name)) for role in started}
        processes["rollout"] = psutil.Process()
        before, began = {name: cpu_s(process) for name, process in processes.items()}, time.monotonic()
        serving = asyncio.create_task(
            run_rollout(config, rooms, database, Listen(context.port, endpoints.token)), name="rollout"
        )
        numbers = asyncio.create_task(last_numbers(endpoints, serving))
        await asyncio.gather(serving, consume(folder, config))
        wall_s = time.monotonic() - began
        used = {name: cpu_s(process) - before[name] for name, process in processes.items()}
        report = await audit(database)
        return summary(kind, wall_s, used, report.episodes, report.findings == (), await numbers)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children, those that ended included."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


async def last_numbers(endpoints: Endpoints, serving: asyncio.Task[None]) -> dict[str, float]:
    """The metrics of rollout and gateway as they were just before the rollout ended."""
    found: dict[str, float] = {}
    services = [Service(endpoints.url(role), token=endpoints.token) for role in ("rollout", "gateway")]
    while not serving.done():
        await asyncio.sleep(0.2)
        for service in services:
            if await service.healthy():
                text = (await service.request("GET", "/metrics")).text
                for family in text_string_to_metric_families(text):
                    found |= {f"{s.name} {s.labels.get('phase', '')}".strip(): s.value for s in family.samples}
    for service in services:
        await service.close()
    return found


def summary(
    kind: str, wall_s: float, used: dict[str, float], episodes: object, sound: bool, numbers: dict[str, float]
) -> dict[str, object]:
    accepted = dict(episodes)["accepted"]  # type: ignore[call-overload]
    phase = {
        name: numbers.get(f"agentrl_rollout_phase_seconds_total {name}", 0.0)
        for name in ("queue", "sandbox", "model", "reward", "other", "idle")
    }
    engine = numbers.get("agentrl_gateway_engine_seconds_sum", 0.0)
    calls = numbers.get("agentrl_gateway_call_seconds_sum", 0.0)
    where = {
        "engine": engine, "gateway": calls - engine, "agent": max(0.0, phase["model"] - calls),
        "sandbox": phase["sandbox"], "reward": phase["reward"], "other": phase["other"], "idle": phase["idle"],
    }  # fmt: skip
    total = sum(where.values())
    return {
        "engine": kind,
        "episodes": episodes,
        "episodes_per_minute": round(60 * accepted / wall_s),
        "calls_per_second": round(numbers.get("agentrl_gateway_call_seconds_count", 0.0) / wall_s, 1),
        "wall_s": round(wall_s, 1),
        "time_share": {name: round(seconds / total, 3) for name, seconds in where.items()},
        "cpu_ms": {name: round(1000 * seconds / accepted, 2) for name, seconds in used.items()},
        "store_sound": sound,
    }


async def warm_policy(config: RunConfig) -> Path:
    """A policy that plays whole episodes, made by the product's own warm start."""
    start = RunFolder(config.folder)
    start.create(config)
    choose_endpoints(config).write(start.endpoints)
    print("warm start ...", file=sys.stderr)
    async with Supervisor(start.logs, restarts=0, watcher=Quiet()) as supervisor:
        await supervisor.finish([child("warm_start", start)])
    return start.warm


async def bench(kinds: Sequence[str], overrides: Sequence[str], policy: Path | None) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as base:
        warm = load_config(None, [*SETTINGS, *overrides, f"dir={base}", "name=warm"])
        policy = policy or await warm_policy(warm)
        rows = []
        for kind in kinds:
            print(f"{kind} engine ...", file=sys.stderr)
            config = warm.model_copy(update={"name": kind})
            folder = RunFolder(config.folder)
            folder.create(config)
            folder.warm.symlink_to(policy.absolute(), target_is_directory=True)
            rows.append(await measure(kind, folder, config))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=("scripted", "embedded"), default=["scripted", "embedded"])
    parser.add_argument("--steps", type=int, default=8, help="of 16 groups of 8")
    parser.add_argument("--policy", type=Path, help="a run's `warm` folder, instead of a warm start")
    parser.add_argument(
        "--gateway", type=Path, help="serve the scripted gateway of this run's folder, and nothing else"
    )
    options, overrides = parser.parse_known_args()
    if options.gateway:
        die_with_parent()
        asyncio.run(scripted_gateway(RunFolder(options.gateway)))
        return
    rows = asyncio.run(bench(options.engines, [f"train.steps={options.steps}", *overrides], options.policy))
    print(json.dumps({"bench": "rollout", "cores": psutil.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
