"""sandboxd's processes that are started and followed, its ranges, digests and archives, and other users."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from runtime import TOKEN, call, sandboxd


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with sandboxd(tmp_path) as (found, _):
        yield found


def start(url: str, script: str, key: str = "p", **options: Any) -> tuple[int, dict[str, Any]]:
    status, body = call(
        "POST", f"{url}/processes", json.dumps({"argv": ["sh", "-c", script], **options}).encode(), key=key
    )
    return status, json.loads(body)


def get(url: str) -> dict[str, Any]:
    status, body = call("GET", url)
    answer: dict[str, Any] = json.loads(body)
    assert status == 200, answer
    return answer


def follow(url: str, stream: str = "stdout", offset: int = 0) -> Iterator[tuple[int, bytes]]:
    while True:
        chunk = get(f"{url}/output?stream={stream}&offset={offset}&wait_s=20")
        data = base64.urlsafe_b64decode(chunk["data"])
        yield chunk["offset"], data
        offset = chunk["offset"] + len(data)
        if chunk["ended"]:
            return


def test_a_process_is_followed_by_offset_and_waited_for(url: str) -> None:
    _, view = start(url, "echo one; read line; echo got $line; echo error >&2; exit 5", interactive=True)
    assert (view["id"], view["status"], view["exit_code"]) == ("p", "RUNNING", None)
    seen = get(f"{url}/processes/p/output?wait_s=20")
    assert (base64.urlsafe_b64decode(seen["data"]), seen["ended"]) == (b"one\n", False)
    assert get(f"{url}/processes/p?wait_s=0.1")["status"] == "RUNNING"
    assert call("POST", f"{url}/processes/p/stdin?last=1", b"input\n")[0] == 200
    ended = get(f"{url}/processes/p?wait_s=20")
    assert (ended["status"], ended["exit_code"], ended["stdout_total"]) == ("EXITED", 5, 14)
    assert b"".join(data for _, data in follow(f"{url}/processes/p", offset=4)) == b"got input\n"
    assert b"".join(data for _, data in follow(f"{url}/processes/p", "stderr")) == b"error\n"
    assert call("POST", f"{url}/processes/p/stdin", b"late")[0] == 409
    assert [known["id"] for known in get(f"{url}/processes")["processes"]] == ["p"]


def test_a_process_key_starts_once(url: str) -> None:
    _, first = start(url, "echo $$; sleep 60")
    assert start(url, "echo $$; sleep 60")[1]["pid"] == first["pid"]
    assert start(url, "other")[0] == 409
    assert call("GET", f"{url}/processes/never")[0] == 404


def test_only_the_newest_output_is_kept_and_the_offset_says_so(url: str) -> None:
    start(url, "seq 1 100000", keep_bytes=1000)
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    get(f"{url}/processes/p?wait_s=20")
    ((offset, data),) = follow(f"{url}/processes/p")
    assert (offset, data) == (len(whole) - 1000, whole[-1000:])
    assert list(follow(f"{url}/processes/p", offset=len(whole) + 5)) == [(len(whole), b"")]


def test_signals_reach_the_group_and_kill_reaches_the_tree(url: str) -> None:
    start(url, "trap 'echo caught; exit 4' USR1; echo ready; while :; do sleep 0.01; done")
    get(f"{url}/processes/p/output?wait_s=20")
    assert call("POST", f"{url}/processes/p/signal", b'{"signal": 10}')[0] == 200
    assert get(f"{url}/processes/p?wait_s=20")["exit_code"] == 4
    start(url, "setsid sleep 5501 & sleep 0.2; echo ready; wait", key="q")
    get(f"{url}/processes/q/output?wait_s=20")
    call("POST", f"{url}/processes/q/signal", b'{"signal": 9}')
    ended = get(f"{url}/processes/q?wait_s=20")
    assert (ended["status"], ended["signal"]) == ("SIGNALED", 9)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x005501\x00" not in commands
    assert call("POST", f"{url}/processes/q/signal", b'{"signal": 999}')[0] == 400


def test_a_process_does_not_hold_the_lease(tmp_path: Path) -> None:
    with sandboxd(tmp_path, ttl_s=0.2) as (url, process):
        start(url, "sleep 600")
        assert process.wait(timeout=20) == 3


def test_many_ended_processes_are_forgotten_but_not_their_keys(url: str) -> None:
    for i in range(35):
        start(url, "true", key=f"p{i}")
        get(f"{url}/processes/p{i}?wait_s=20")
    assert len(get(f"{url}/processes")["processes"]) == 32
    assert start(url, "true", key="p0")[0] == 410


def test_another_user(url: str) -> None:
    def whoami(user: str) -> tuple[int, dict[str, Any]]:
        status, body = call(
            "POST", f"{url}/exec", json.dumps({"argv": ["id", "-u"], "user": user, "cwd": "/"}).encode(), key=user
        )
        return status, json.loads(body)

    assert base64.urlsafe_b64decode(whoami("nobody")[1]["stdout"]) == b"65534\n"
    assert base64.urlsafe_b64decode(whoami("12345")[1]["stdout"]) == b"12345\n"
    status, body = whoami("no-such-user")
    assert (status, body["error"]["ran"]) == (400, "no")


def test_ranges_and_digests(url: str) -> None:
    data = bytes(range(256)) * 100
    path = f"{url}/files?path=data.bin"
    assert call("PUT", f"{path}&sha256={hashlib.sha256(data).hexdigest()}", data)[0] == 200
    assert call("PUT", f"{path}&sha256={'0' * 64}", b"torn")[0] == 400
    assert call("GET", f"{path}&offset=1000&length=300") == (200, data[1000:1300])
    assert call("GET", f"{path}&offset=25500") == (200, data[25500:])
    assert call("GET", f"{path}&offset=99999") == (200, b"")
    with urlopen(Request(f"{path}&length=10", headers={"authorization": f"Bearer {TOKEN}"})) as response:
        assert response.headers["x-sha256"] == hashlib.sha256(data[:10]).hexdigest()
        assert response.headers["x-size"] == str(len(data))


def archive(*members: tuple[str, bytes | str]) -> bytes:
    """A tar: bytes are files, a str beginning with `>` a symlink, another a hard link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size, info.mode = len(content), 0o755
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type = tarfile.SYMTYPE if content.startswith(">") else tarfile.LNKTYPE
                info.linkname = content.lstrip(">")
                tar.addfile(info)
    return buffer.getvalue()


def test_a_folder_goes_up_and_comes_down_as_tar(url: str, tmp_path: Path) -> None:
    packed = archive(("a/run.sh", b"echo hi\n"), ("a/link", ">run.sh"), ("top", b"\x00\xff"))
    assert call("PUT", f"{url}/tar?path=in", packed)[0] == 200
    assert (tmp_path / "work/in/a/run.sh").stat().st_mode & 0o777 == 0o755
    status, body = call("GET", f"{url}/tar?path=in")
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        assert sorted(tar.getnames()) == [".", "./a", "./a/link", "./a/run.sh", "./top"]
        top = tar.extractfile("./top")
        assert top is not None
        assert top.read() == b"\x00\xff"
        assert tar.getmember("./a/link").linkname == "run.sh"


@pytest.mark.parametrize(
    "members",
    [
        [("../out", b"x")],
        [("/tmp/agentrl-out", b"x")],
        [("a/../../out", b"x")],
        [("dir", ">/tmp"), ("dir/agentrl-out", b"x")],
        [("dir", ">.."), ("dir/out", b"x")],
        [("hard", "/etc/passwd")],
    ],
)
def test_an_archive_writes_nothing_outside(members: list[tuple[str, bytes | str]], url: str, tmp_path: Path) -> None:
    status, body = call("PUT", f"{url}/tar?path=.", archive(*members))
    assert (status, json.loads(body)["error"]["code"]) == (403, "SANDBOX_FILE")
    assert not (tmp_path / "out").exists()
    assert not Path("/tmp/agentrl-out").exists()


def test_folders_outside_are_refused(url: str) -> None:
    for path in ("..", "../..", "a/../.."):
        assert call("GET", f"{url}/tar?path={quote(path)}")[0] == 403
        assert call("PUT", f"{url}/tar?path={quote(path)}", archive(("x", b"x")))[0] == 403
    assert call("PUT", f"{url}/tar?path=.", b"not a tar")[0] == 400
