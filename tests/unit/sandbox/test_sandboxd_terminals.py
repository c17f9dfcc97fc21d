"""sandboxd's terminals: control characters, sizes, job control, and how they end."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime import call, sandboxd

START: dict[str, Any] = {"argv": ["sh"], "env": {"PS1": "$ ", "TERM": "dumb"}, "tty": {"rows": 30, "columns": 100}}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with sandboxd(tmp_path) as (found, _):
        yield f"{found}/processes"


def post(url: str, body: bytes) -> dict[str, Any]:
    status, answer = call("POST", url, body, key="t")
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


def output(url: str, true: Callable[[str], bool]) -> str:
    """The output as soon as it is as wanted, or at its end."""
    text, offset = "", 0
    while not true(text):
        chunk = json.loads(call("GET", f"{url}/t/output?offset={offset}&wait_s=9")[1])
        data = base64.urlsafe_b64decode(chunk["data"])
        text, offset = text + data.decode(), chunk["offset"] + len(data)
        if chunk["ended"]:
            break
    return text


def test_a_shell_on_a_terminal_has_a_prompt_a_size_and_an_exit_code(url: str) -> None:
    view = post(url, json.dumps(START).encode())
    assert output(url, lambda text: "$ " in text) == "$ "
    post(f"{url}/t/stdin", b"stty size; test -t 2 && echo all; ps -o tty= -p $$\n")
    assert "30 100\r\nall\r\n" in output(url, lambda text: "all\r\n" in text)
    post(f"{url}/t/resize", b'{"rows": 11, "columns": 22}')
    post(f"{url}/t/stdin", b"stty size\n")
    assert output(url, lambda text: "11 22\r\n" in text)
    post(f"{url}/t/stdin", b"exit 7\n")
    ended = json.loads(call("GET", f"{url}/t?wait_s=9")[1])
    assert (ended["status"], ended["exit_code"], ended["pid"]) == ("EXITED", 7, view["pid"])
    post(f"{url}/t/resize", b'{"rows": 1, "columns": 2}')


def test_control_characters_do_what_they_do(url: str) -> None:
    script = "trap 'echo caught' INT; sh -c 'echo ready; exec sleep 30'; echo code $?; cat; echo end"
    post(url, json.dumps({**START, "argv": ["sh", "-c", script]}).encode())
    output(url, lambda text: "ready" in text)
    post(f"{url}/t/stdin", b"\x03")
    assert "code 130" in output(url, lambda text: "code" in text and "\n" in text.partition("code")[2])
    assert call("POST", f"{url}/t/stdin?last=1", b"line\n", key="t")[0] == 200
    assert output(url, lambda text: False).endswith("line\r\nline\r\nend\r\n"), "the end of input ends `cat`"
    assert call("POST", f"{url}/t/stdin", b"x", key="t")[0] == 409


def test_a_window_change_is_signalled(url: str) -> None:
    script = "trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done"
    post(url, json.dumps({**START, "argv": ["sh", "-c", script]}).encode())
    output(url, lambda text: "ready" in text)
    post(f"{url}/t/resize", b'{"rows": 5, "columns": 6}')
    assert output(url, lambda text: False) == "ready\r\n5 6\r\n"


def test_background_jobs_do_not_hold_its_end(url: str) -> None:
    post(url, json.dumps({**START, "argv": ["sh", "-c", "trap '' HUP; sleep 60 & echo done"]}).encode())
    assert output(url, lambda text: False) == "done\r\n"
    assert json.loads(call("GET", f"{url}/t?wait_s=9")[1])["status"] == "EXITED"


@pytest.mark.parametrize("size", [{"rows": 0, "columns": 80}, {"rows": "x"}, {"rows": 1 << 16, "columns": 1}])
def test_a_size_that_cannot_be_is_refused_and_nothing_starts(size: dict[str, Any], url: str) -> None:
    assert call("POST", url, json.dumps({**START, "tty": size}).encode(), key="t")[0] == 400
    assert json.loads(call("GET", url)[1]) == {"processes": []}


def test_pipes_have_no_size(url: str) -> None:
    post(url, json.dumps({"argv": ["sleep", "9"]}).encode())
    assert call("POST", f"{url}/t/resize", b'{"rows": 1, "columns": 2}', key="t")[0] == 409
