"""Starts a real vLLM (CPU build) for contract tests and benches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from agentrl.core.http import free_port
from agentrl.weights.vllm_plugin import ENVIRONMENT, SERVE, lay_out

START_S = 400.0
"""A busy machine of 2 cores has needed 150 s."""
FLAGS = (
    *SERVE, "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", "134217728",
    "--skip-tokenizer-init",
)  # fmt: skip


class Server(NamedTuple):
    url: str
    pid: int


@contextmanager
def vllm_server(python: str, model: Path, scratch: Path, *, version: int = 1) -> Iterator[Server]:
    """Serve `model`; yields when it answers, with its weights labelled `version`."""
    port = free_port()
    scratch.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"} | {
        **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(lay_out(scratch / "plugin")),
    }  # fmt: skip
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    log = scratch / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *FLAGS], env=environment, stdout=output, stderr=output, cwd=scratch,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        httpx.post(f"{url}/update_weight_version", json={"new_version": str(version)}).raise_for_status()
        yield Server(url, process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    print("starting vLLM; half a minute or more", file=sys.stderr)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode} while starting:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not answer within {START_S:.0f} s:\n{log.read_text()[-3000:]}")
