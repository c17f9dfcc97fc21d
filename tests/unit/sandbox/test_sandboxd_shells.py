"""sandboxd's shells: state from command to command, a status of their own, and what a dead one says."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime import call, sandboxd

SHELLS = [name for name in ("sh", "bash") if shutil.which(name)]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with sandboxd(tmp_path) as (found, _):
        yield found


def opened(url: str, program: str = "sh") -> str:
    assert call("POST", f"{url}/shells", json.dumps({"argv": [program]}).encode(), key="s")[0] == 200
    return f"{url}/shells/s"


def run(shell: str, command: str, key: str, **options: Any) -> dict[str, Any]:
    status, body = call("POST", f"{shell}/exec", json.dumps({"command": command, **options}).encode(), key=key)
    answer: dict[str, Any] = json.loads(body)
    if status == 200:
        answer["stdout"] = base64.urlsafe_b64decode(answer["stdout"])
    return answer


@pytest.mark.parametrize("program", SHELLS)
def test_state_passes_and_status_is_not_output(url: str, program: str, tmp_path: Path) -> None:
    shell = opened(url, program)
    assert run(shell, "cd /tmp; X='it''s $1'; export Y=2; f() { echo \"$X $Y\"; return 3; }", "1")["exit_code"] == 0
    result = run(shell, "pwd; f", "2")
    assert (result["status"], result["exit_code"], result["stdout"]) == ("EXITED", 3, b"/tmp\nits $1 2\n")
    assert run(shell, "if then", "3")["exit_code"] != 0
    assert run(shell, "cat; printf 'no newline'; echo 0 >&3", "4")["stdout"] == b"no newline"
    noise = run(shell, f"printf '5 0\\n'; head -c 300000 /dev/urandom | tee {tmp_path}/copy; (exit 9)", "5")
    assert (noise["exit_code"], noise["stdout_total"]) == (9, 300004)
    assert noise["stdout"][4:] == (tmp_path / "copy").read_bytes()
    assert run(shell, "for i in 1 2; do\n  echo $i\ndone # end", "6")["stdout"] == b"1\n2\n"
    assert run(shell, "nonesuch", "7")["exit_code"] == 127


def test_a_key_runs_once_in_a_shell(url: str) -> None:
    shell = opened(url)
    assert run(shell, "n=$((n + 1)); echo $n", "k") == run(shell, "n=$((n + 1)); echo $n", "k")
    assert run(shell, "echo $n", "other")["stdout"] == b"1\n"
    assert run(shell, "different", "k")["error"]["code"] == "CONFLICT"


def test_a_background_child_delays_nothing_and_the_next_command_has_its_own_output(url: str) -> None:
    shell = opened(url)
    started = time.monotonic()
    assert run(shell, "(sleep 0.2; echo late; sleep 30) & echo early", "1")["stdout"] == b"early\n"
    assert time.monotonic() - started < 5
    time.sleep(0.4)
    assert run(shell, "echo next", "2")["stdout"] == b"next\n"


@pytest.mark.parametrize(
    ("command", "status", "code", "number"),
    [
        ("echo last; exit 4", "EXITED", 4, None),
        ("echo last; kill -9 $$", "SIGNALED", None, 9),
        ("echo last; setsid sleep 88{pid} & while :; do :; done", "TIMEOUT", None, 15),
    ],
)
def test_a_dead_shell_says_how_it_died_and_runs_nothing_more(
    url: str, command: str, status: str, code: int | None, number: int | None
) -> None:
    shell = opened(url)
    command = command.format(pid=os.getpid())
    result = run(shell, command, "1", timeout_s=0.5)
    assert (result["status"], result["exit_code"], result["signal"]) == (status, code, number)
    assert result["stdout"].startswith(b"last\n") or status == "TIMEOUT"
    dead = run(shell, "echo more", "2")["error"]
    assert (dead["code"], dead["blame"], dead["ran"]) == ("SANDBOX", "agent", "no")
    assert run(shell, command, "1", timeout_s=0.5)["status"] == status
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0088%d\x00" % os.getpid() not in commands


def test_closed_and_unknown_shells(url: str) -> None:
    shell = opened(url)
    assert call("POST", f"{shell}/close", key="c")[0] == 200
    for _ in range(100):
        if json.loads(call("GET", shell)[1])["status"] != "RUNNING":
            break
        time.sleep(0.02)
    assert run(shell, "true", "1")["error"]["code"] == "SANDBOX"
    assert call("GET", f"{url}/shells/unknown")[0] == 404


def test_two_commands_at_once_are_refused(url: str, tmp_path: Path) -> None:
    shell = opened(url)
    body = json.dumps({"command": "echo started >> log; sleep 3"}).encode()
    first = threading.Thread(target=call, args=("POST", f"{shell}/exec", body), kwargs={"key": "1"})
    first.start()
    while not (tmp_path / "work/log").exists():
        time.sleep(0.01)
    assert run(shell, "echo now", "2")["error"]["code"] == "CONFLICT"
    first.join()
    assert run(shell, "echo now", "3")["stdout"] == b"now\n"


def test_a_command_that_a_shell_would_read_otherwise_is_refused(url: str) -> None:
    shell = opened(url, "sh")
    assert run(shell, "echo a\0b", "1")["error"]["code"] == "BAD_REQUEST"
    assert run(shell, "echo a", "1")["stdout"] == b"a\n"
