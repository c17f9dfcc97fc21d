"""How fast is the embedded engine against real vLLM (CPU build) on the same tiny model, over HTTP, in the same run?

python tests/bench/engine.py [--concurrency 1 8 32] [--rounds 3] [--without-vllm]

Prints JSON. Both servers are up; they take turns, level by level, and each figure is the median of its rounds.
`*_per_cpu_s` counts output tokens by the CPU seconds of the server's processes, which other load hardly changes.
Installs vLLM into an environment of its own the first time (.ci/vllm_venv).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from agentrl.core.errors import ServiceUnavailable
from agentrl.core.http import free_port
from agentrl.core.types import GenerateRequest, Sampling
from agentrl.engine.client import EngineClient

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

VOCAB = 600
PROMPT, NEW = 200, 64
CALLS = {1: 6, 8: 4, 32: 4, 128: 3}
"""Calls in a row of each of N callers, so that a round takes a few seconds."""
SERVE = """
import asyncio, sys
from pathlib import Path
from agentrl.core.config import EngineConfig
from agentrl.engine.server import run_engine
asyncio.run(run_engine(Path(sys.argv[1]), port=int(sys.argv[2]), token="", version=1, config=EngineConfig()))
"""


class Server(NamedTuple):
    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far."""
        root = psutil.Process(self.pid)
        return sum(sum(process.cpu_times()[:2]) for process in [root, *root.children(recursive=True)])


class Figure(NamedTuple):
    """Output tokens by wall second and by CPU second of the server."""

    wall: float
    cpu: float


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def save_model(folder: Path) -> Path:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=768, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def embedded(model: Path) -> Iterator[Server]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(model), str(port)])
    try:
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait()


async def until_up(client: EngineClient) -> None:
    while True:
        try:
            await client.status()
            return
        except ServiceUnavailable:
            await asyncio.sleep(0.2)


async def throughput(server: Server, client: EngineClient, concurrency: int, calls: int) -> Figure:
    """`concurrency` callers, each with fresh prompts."""
    rng = random.Random(time.time_ns())
    sampling = Sampling(max_tokens=NEW)

    async def caller() -> None:
        for _ in range(calls):
            prompt = tuple(rng.randrange(VOCAB) for _ in range(PROMPT))
            name = f"{rng.getrandbits(64):x}"
            completion = await client.generate(GenerateRequest(request_id=name, token_ids=prompt, sampling=sampling))
            if len(completion.token_ids) != NEW:
                raise SystemExit(f"asked for {NEW} tokens, got {len(completion.token_ids)}")

    started, cpu_started = time.perf_counter(), server.cpu_s()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    tokens = concurrency * calls * NEW
    return Figure(tokens / (time.perf_counter() - started), tokens / (server.cpu_s() - cpu_started))


async def measure(servers: dict[str, Server], levels: list[int], rounds: int) -> list[dict[str, float]]:
    clients = {name: EngineClient(server.url) for name, server in servers.items()}
    rows = []
    for name, client in clients.items():
        await until_up(client)
        await throughput(servers[name], client, 4, 1)
    for level in levels:
        found: dict[str, list[Figure]] = {name: [] for name in clients}
        for _ in range(rounds):
            for name, client in clients.items():
                found[name].append(await throughput(servers[name], client, level, CALLS.get(level, 4)))
        row = {"concurrency": float(level), **summary(found)}
        tell(str(row))
        rows.append(row)
    for client in clients.values():
        await client.close()
    return rows


def summary(found: dict[str, list[Figure]]) -> dict[str, float]:
    """Medians, and the ratios to vLLM where it ran."""
    row = {name: round(statistics.median(f.wall for f in figures), 1) for name, figures in found.items()}
    cpu = {name: round(statistics.median(f.cpu for f in figures), 1) for name, figures in found.items()}
    if "vllm" in row:
        row["ratio"] = round(row["embedded"] / row["vllm"], 2)
        row["cpu_ratio"] = round(cpu["embedded"] / cpu["vllm"], 2)
    return row | {f"{name}_per_cpu_s": value for name, value in cpu.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-vllm", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_model(scratch / "model")
        servers = {"embedded": stack.enter_context(embedded(model))}
        if not options.without_vllm:
            from vllm_server import vllm_server

            tell("vLLM's environment ...")
            python = subprocess.run([ROOT / ".ci" / "vllm_venv"], stdout=subprocess.PIPE, text=True, check=True)
            servers["vllm"] = Server(*stack.enter_context(vllm_server(python.stdout.strip(), model, scratch / "vllm")))
        rows = asyncio.run(measure(servers, options.concurrency, options.rounds))
    workload = {"prompt_tokens": PROMPT, "new_tokens": NEW, "unit": "output tokens/s", "rounds": options.rounds}
    print(json.dumps({"bench": "engine", **workload, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
