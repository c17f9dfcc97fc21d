"""Sandboxes that were made ahead of demand, on every backend."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandboxes import SPEC, sandbox_config, service, sh

from sandbox.client import SandboxClient


async def hits(client: SandboxClient) -> str:
    metrics = (await client.fetch("GET", "/metrics")).text
    return next((line for line in metrics.splitlines() if 'warm_total{outcome="hit"}' in line), "")


async def test_a_warm_sandbox_is_what_its_spec_asks_for(backend: str, tmp_path: Path) -> None:
    ids = set()
    async with service(tmp_path, sandbox_config(backend, bare=True, warm=1)) as client, asyncio.timeout(120):
        number = 0
        while not await hits(client):
            number += 1
            files = {"note.txt": f"number {number}\n", "/tmp/deep/er": "x", "sub/made": "y" * 100_000}
            spec = SPEC.model_copy(update={"files": files})
            async with client.acquire(spec, owner="test", key=f"k{number}") as sandbox:
                ids.add(sandbox.id)
                made = await sandbox.exec(sh("cat note.txt /tmp/deep/er; wc -c < sub/made; ls"))
                assert made.stdout.decode().split() == ["number", str(number), "x100000", "note.txt", "sub"]
            await asyncio.sleep(0.2)
    assert len(ids) == number, "each is used once"
