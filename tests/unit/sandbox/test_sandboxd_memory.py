"""What sandboxd keeps counts as its sandbox's memory: little of what went through it."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runtime import call, sandboxd

from sandbox.runtime.shells import KEPT_ENDED


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with sandboxd(tmp_path) as (url, process):
        assert call("GET", f"{url}/health")[0] == 200
        yield url, process


def rss_mb(process: subprocess.Popen[bytes]) -> int:
    return int(psutil.Process(process.pid).memory_info().rss) >> 20


def test_input_is_not_kept(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = served
    data = base64.urlsafe_b64encode(bytes(8 << 20)).decode()
    for n in range(20):
        argv = ["sh", "-c", "cat >/dev/null" if n % 2 else "true"]
        assert call("POST", f"{url}/exec", json.dumps({"argv": argv, "stdin": data}).encode(), key=f"k{n}")[0] == 200
    assert rss_mb(process) < 100


def test_what_ran_in_closed_shells_is_not_kept(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = served
    run = json.dumps({"command": "head -c 3000000 /dev/zero", "cap_bytes": 3_000_000}).encode()
    for n in range(KEPT_ENDED + 30):
        assert call("POST", f"{url}/shells", b"{}", key=f"s{n}")[0] == 200
        status, body = call("POST", f"{url}/shells/s{n}/exec", run, key="k")
        assert (status, json.loads(body)["stdout_total"]) == (200, 3_000_000)
        assert call("POST", f"{url}/shells/s{n}/close", key="c")[0] == 200
    assert rss_mb(process) < 120
    assert call("POST", f"{url}/shells/s{n}/exec", run, key="k")[0] == 200, "the newest results are still there"
    status, body = call("POST", f"{url}/shells/s0/exec", run, key="k")
    assert (status, json.loads(body)["error"]["ran"]) == (410, "maybe")
    assert call("POST", f"{url}/shells", b"{}", key="s0")[0] == 410
