"""What a task or a request may not do: end sandboxd, and with it the sandbox."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runtime import call, sandboxd

DEEP = "/".join(["d"] * 1900)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with sandboxd(tmp_path) as (url, process):
        assert call("GET", f"{url}/health")[0] == 200
        yield url, process


def run(url: str, script: str, timeout_s: float = 20.0, key: str = "k") -> str:
    body = json.dumps({"argv": ["sh", "-c", script], "timeout_s": timeout_s}).encode()
    status, answer = call("POST", f"{url}/exec", body, key=key)
    assert status == 200
    return str(json.loads(answer)["status"])


def test_a_marker_that_is_no_text(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = served
    assert run(url, "export AGENTRL_COMMAND=$(printf '\\377'); (setsid sleep 5 &)", key="a") == "EXITED"
    assert run(url, "sleep 30", timeout_s=0.2, key="b") == "TIMEOUT"
    assert run(url, "true", key="c") == "EXITED"


def test_a_lease_longer_than_the_kernel_can_wait(tmp_path: Path) -> None:
    with sandboxd(tmp_path, ttl_s=3e7) as (url, process):
        assert call("GET", f"{url}/health")[0] == 200
        assert call("POST", f"{url}/renew", b'{"ttl_s": 1e300}')[0] == 200
        assert call("GET", f"{url}/health")[0] == 200
        assert process.poll() is None


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "exec", b"[" * 100_000),
        ("PUT", f"files?path={DEEP}", b"x"),
    ],
    ids=["nested json", "deep path"],
)
def test_a_request_that_cannot_be_answered(
    served: tuple[str, subprocess.Popen[bytes]], method: str, target: str, body: bytes
) -> None:
    url, _ = served
    status, answer = call(method, f"{url}/{target}", body)
    assert status >= 400
    assert json.loads(answer)["error"]["message"]
    assert run(url, "true") == "EXITED"


def test_no_descriptors_are_left(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = served
    limits = psutil.Process(process.pid)
    before = limits.rlimit(resource.RLIMIT_NOFILE)
    limits.rlimit(resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{process.pid}/fd")) - 1, before[1]))
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(call("GET", f"{url}/health")[0]))
    asking.start()
    time.sleep(0.3)
    assert process.poll() is None
    limits.rlimit(resource.RLIMIT_NOFILE, before)
    asking.join()
    assert answers == [200]
