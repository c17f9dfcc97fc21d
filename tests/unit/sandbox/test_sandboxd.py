"""sandboxd by itself: on an old interpreter, over TCP with a token, and its lease without a controller."""

from __future__ import annotations

import ast
import base64
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from runtime import RUNTIME, TOKEN, call, interpreters, sandboxd

from sandbox.runtime.commands import Capture
from sandbox.runtime.sandboxd import FROZEN_S, GRACE_S


@pytest.mark.parametrize("path", sorted(RUNTIME.glob("*.py")), ids=lambda path: path.name)
def test_it_is_python_3_7_and_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 7))
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert module.split(".")[0] in sys.stdlib_module_names or module.startswith("sandbox.runtime"), module


@pytest.mark.parametrize("python", interpreters())
def test_it_runs_on_other_interpreters(python: str, tmp_path: Path) -> None:
    with sandboxd(tmp_path, python=python) as (url, _):
        status, body = call("POST", f"{url}/exec", json.dumps({"argv": ["echo", "hi"]}).encode())
        assert status == 200
        assert base64.urlsafe_b64decode(json.loads(body)["stdout"]) == b"hi\n"


def test_a_wrong_token_is_401_and_the_token_is_not_in_the_environment(tmp_path: Path) -> None:
    with sandboxd(tmp_path) as (url, _):
        assert call("GET", f"{url}/health", token="wrong")[0] == 401
        assert call("POST", f"{url}/exec", b'{"argv":["true"]}', token="wrong")[0] == 401
        _, body = call("POST", f"{url}/exec", b'{"argv":["env"]}')
        assert TOKEN.encode() not in base64.urlsafe_b64decode(json.loads(body)["stdout"])


def test_a_key_runs_once_and_is_asked_for(tmp_path: Path) -> None:
    with sandboxd(tmp_path) as (url, _):
        body = json.dumps({"argv": ["sh", "-c", "echo run >> runs; wc -l < runs"]}).encode()
        first = call("POST", f"{url}/exec", body)
        assert call("POST", f"{url}/exec", body) == first
        assert call("GET", f"{url}/exec?key=k") == first
        status, refused = call("POST", f"{url}/exec", b'{"argv":["true"]}')
        assert (status, json.loads(refused)["error"]["code"]) == (409, "CONFLICT")
        status, unknown = call("GET", f"{url}/exec?key=other")
        assert (status, json.loads(unknown)["error"]["ran"]) == (404, "no")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"argv":[]}', b'{"argv":[1]}', b'{"argv":["true"],"stdin":"*"}'])
def test_what_is_malformed_is_refused(body: bytes, tmp_path: Path) -> None:
    with sandboxd(tmp_path) as (url, _):
        status, answer = call("POST", f"{url}/exec", body)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "BAD_REQUEST")
        assert call("GET", f"{url}/nowhere")[0] == 404


def test_a_long_command_does_not_keep_the_answers_behind_it(tmp_path: Path) -> None:
    with sandboxd(tmp_path) as (url, _):
        script = b'{"argv":["sh","-c","while [ ! -e done ]; do sleep 0.02; done"]}'
        long = threading.Thread(target=call, args=("POST", f"{url}/exec", script))
        long.start()
        while json.loads(call("GET", f"{url}/health")[1])["running"] == 0:
            time.sleep(0.01)
        body = json.dumps({"argv": ["head", "-c", "1000000", "/dev/zero"]}).encode()
        for i in range(8):
            assert call("POST", f"{url}/exec", body, key=f"k{i}")[0] == 200
        kept = [call("GET", f"{url}/exec?key=k{i}")[0] for i in range(8)]
        (tmp_path / "work" / "done").touch()
        long.join()
    assert kept == [410] * 2 + [200] * 6


def test_without_renewal_it_ends_and_takes_its_processes_along(tmp_path: Path) -> None:
    with sandboxd(tmp_path, ttl_s=0.2) as (url, process):
        script = b'{"argv":["sh","-c","setsid sleep 777 & echo $!"]}'
        _, body = call("POST", f"{url}/exec", script)
        orphan = int(base64.urlsafe_b64decode(json.loads(body)["stdout"]))
        assert process.wait(timeout=20) == 3
        left = Path(f"/proc/{orphan}/stat")
        assert not left.exists() or ") Z " in left.read_text()


def test_time_in_which_it_was_frozen_ends_no_lease(tmp_path: Path) -> None:
    with sandboxd(tmp_path, ttl_s=0.2) as (url, process):
        assert call("GET", f"{url}/health")[0] == 200
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2 + GRACE_S + FROZEN_S + 0.5)
        process.send_signal(signal.SIGCONT)
        assert call("GET", f"{url}/health")[0] == 200


@pytest.mark.parametrize("cap", [1, 2, 7, 1000])
@pytest.mark.parametrize("chunks", [1, 3, 400])
def test_capture_keeps_both_ends_and_counts_all(cap: int, chunks: int) -> None:
    capture = Capture(-1, cap)
    whole = b""
    for i in range(chunks):
        capture.feed(b"%d," % i * 200)
        whole += b"%d," % i * 200
    head = (cap + 1) // 2
    expected = whole if len(whole) <= cap else whole[:head] + whole[len(whole) - (cap - head) :]
    assert capture.bytes() == expected
    assert capture.total == len(whole)
