"""sandboxd as a process of its own, over TCP with a token, for tests of the runtime alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sandbox
from agentrl.core.http import free_port

RUNTIME = Path(sandbox.__file__).parent / "runtime"
ROOT = RUNTIME.parents[1]
TOKEN = "of-one-sandbox"
MODULE = ("-m", "sandbox.runtime.sandboxd")


def interpreters() -> list[str]:
    """Every Python from 3.7 up that lies beside ours."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    return [sys.executable, *(str(path) for path in beside if int(path.parts[-3].split(".")[1]) >= 7)]


@contextmanager
def sandboxd(
    folder: Path, *, ttl_s: float = 60.0, python: str = sys.executable, words: Sequence[str] = MODULE
) -> Iterator[tuple[str, Any]]:
    """`words` start it."""
    port = free_port()
    config = {"port": port, "host": "127.0.0.1", "workdir": str(folder / "work"), "ttl_s": ttl_s}
    process = subprocess.Popen(
        [python, *words, json.dumps(config)],
        env={"PYTHONPATH": str(ROOT), "SANDBOXD_TOKEN": TOKEN, "PATH": os.environ["PATH"]},
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def call(method: str, url: str, body: bytes = b"", *, token: str = TOKEN, key: str = "k") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {token}", "idempotency-key": key}
    request = urllib.request.Request(url, data=body or None, method=method, headers=headers)
    for _ in range(200):
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except urllib.error.URLError:
            time.sleep(0.02)
    raise TimeoutError(url)
