"""`agentrl sandbox` against a real controller: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from agentrl.cli.main import main
from agentrl.core.errors import SandboxLost
from agentrl.core.http import free_port
from agentrl.core.types import ExecRequest, SandboxSpec
from agentrl.launch.endpoints import Endpoints
from sandbox.client import SandboxClient

T = TypeVar("T")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A controller of its own process."""
    port, folder = free_port(), tmp_path_factory.mktemp("controller")
    command = [sys.executable, "-m", "agentrl.cli.main", "serve", "sandbox", "--port", str(port)]
    run = subprocess.Popen([*command, "--token", "secret", "--dir", str(folder)], cwd=folder)
    found = f"http://127.0.0.1:{port}"
    while not answers(found):
        assert run.poll() is None
        time.sleep(0.05)
    yield found
    run.send_signal(signal.SIGINT)
    run.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.HTTPError:
        return False


def ask(url: str, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
    async def call() -> T:
        client = SandboxClient(url, token="secret")
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(call())


@pytest.fixture
def sandbox(url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a live sandbox of owner `run-7`."""
    monkeypatch.setenv("AGENTRL_SANDBOX_URL", url)
    monkeypatch.setenv("AGENTRL_TOKEN", "secret")
    monkeypatch.setenv("COLUMNS", "200")
    spec = SandboxSpec(files={"note.txt": "hello\n"})
    made = ask(url, lambda client: client.create(spec, owner="run-7", key=request.node.name))
    yield made.id
    ask(url, lambda client: client.handle(made.id).close())


def agentrl(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sandbox", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_ls_and_top_show_what_lives(sandbox: str, capfd: Captured) -> None:
    assert agentrl("ls") == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if sandbox in line)
    assert line.split()[1:4] == ["READY", "run-7", "default"]
    assert agentrl("ls", "--owner", "another") == 0
    assert sandbox not in capfd.readouterr().out
    assert agentrl("top", "--once") == 0
    shown = capfd.readouterr().out
    assert "1 live sandboxes" in shown
    assert "run-7" in shown


def test_exec_gives_output_and_exit_code(sandbox: str, capfd: Captured) -> None:
    assert agentrl("exec", sandbox, "sh", "-c", "cat note.txt; echo no >&2; exit 7") == 7
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("hello\n", "no\n")
    assert agentrl("exec", "--timeout", "0.3", sandbox, "sleep", "30") == 124
    assert "TIMEOUT" in capfd.readouterr().err
    assert agentrl("exec", sandbox, "sh", "-c", "kill -9 $$") == 128 + 9
    assert agentrl("exec", "--env", "A=b c", "--cwd", "/tmp", sandbox, "sh", "-c", 'echo "$A"; pwd') == 0
    assert capfd.readouterr().out.endswith("b c\n/tmp\n")
    assert agentrl("exec", sandbox, "no-such-program") == 1
    assert "cannot execute 'no-such-program'" in capfd.readouterr().err


def test_logs_and_show_tell_what_ran(sandbox: str, url: str, capfd: Captured) -> None:
    agentrl("exec", sandbox, "echo", "first")
    ask(url, lambda client: client.handle(sandbox).exec(ExecRequest(argv=("echo", "second")), key="turn-2"))
    capfd.readouterr()
    assert agentrl("logs", sandbox) == 0
    shown = capfd.readouterr().out
    assert shown.index("$ echo first") < shown.index("\nfirst\n") < shown.index("turn-2") < shown.index("\nsecond\n")
    assert agentrl("logs", sandbox, "--key", "turn-2") == 0
    assert "first" not in capfd.readouterr().out
    assert agentrl("logs", sandbox, "--key", "turn-3") == 1
    assert agentrl("show", sandbox) == 0
    shown = capfd.readouterr().out
    for part in ("READY", "run-7", "512 MB memory", "note.txt", "turn-2  echo second"):
        assert part in shown


def test_cp_both_ways(sandbox: str, tmp_path: Path, capfd: Captured) -> None:
    data = bytes(range(256)) * 400
    script = tmp_path / "run.bin"
    script.write_bytes(data)
    script.chmod(0o750)
    assert agentrl("cp", str(script), f"{sandbox}:in/") == 0
    assert agentrl("cp", f"{sandbox}:in/run.bin", str(tmp_path / "back")) == 0
    assert (tmp_path / "back").read_bytes() == data
    capfd.readouterr()
    agentrl("exec", sandbox, "stat", "-c", "%a", "in/run.bin")
    assert capfd.readouterr().out == "750\n"
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.bin").write_bytes(data)
    assert agentrl("cp", f"{folder}/", f"{sandbox}:there") == 0
    assert agentrl("cp", f"{sandbox}:there/", str(tmp_path / "again")) == 0
    found = list((tmp_path / "again").rglob("a.bin"))
    assert [file.read_bytes() for file in found] == [data]
    assert found == [tmp_path / "again" / "deep" / "a.bin"]
    agentrl("exec", sandbox, "ln", "-s", "/etc", "there/out")
    assert agentrl("cp", f"{sandbox}:there/", str(tmp_path / "third")) == 1
    assert "not all of it was unpacked" in capfd.readouterr().err
    assert agentrl("cp", str(folder), f"{sandbox}:there") == 2
    assert agentrl("cp", "a", "b") == 2
    assert agentrl("cp", f"{sandbox}:none", str(tmp_path)) == 1


def test_rm_closes_and_gc_sweeps(sandbox: str, url: str, capfd: Captured) -> None:
    assert agentrl("rm") == 2
    assert agentrl("rm", sandbox, "--owner", "run-7") == 0
    assert f"{sandbox} CLOSED" in capfd.readouterr().out
    with pytest.raises(SandboxLost):
        ask(url, lambda client: client.get(sandbox))
    assert agentrl("rm", "sb-unknown") == 1
    assert agentrl("gc") == 0
    assert "0 expired, 0 lost, 0 orphans" in capfd.readouterr().out
    assert agentrl("events", "--sandbox", sandbox) == 0
    shown = capfd.readouterr().out
    assert [line.split()[3] for line in shown.splitlines()] == ["CREATING", "READY", "CLOSING", "CLOSED"]
    assert agentrl("ls", "--all") == 0
    assert "CLOSED" in next(line for line in capfd.readouterr().out.splitlines() if sandbox in line)


def test_pause_and_snapshot(sandbox: str, url: str, capfd: Captured) -> None:
    assert agentrl("pause", sandbox, "--ttl", "100") == 0
    assert agentrl("exec", sandbox, "true") == 1
    assert "PAUSED: resume it first" in capfd.readouterr().err
    assert agentrl("ls") == 0
    assert "PAUSED" in next(line for line in capfd.readouterr().out.splitlines() if sandbox in line)
    assert agentrl("snapshot", sandbox) == 0
    kept = capfd.readouterr().out.strip()
    assert agentrl("resume", sandbox) == 0
    assert agentrl("exec", sandbox, "true") == 0
    assert agentrl("snapshots", "--owner", "run-7") == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if kept in line]
    assert line.split()[1:3] == ["run-7", sandbox]
    spec = SandboxSpec(snapshot=kept)
    fork = ask(url, lambda client: client.create(spec, owner="run-7", key="fork"))
    assert agentrl("exec", fork.id, "cat", "note.txt") == 0
    assert capfd.readouterr().out == "hello\n"
    assert agentrl("rm", fork.id) == 0
    assert agentrl("forget", kept) == 0
    assert agentrl("forget", "snap-unknown") == 1
    capfd.readouterr()
    assert agentrl("snapshots") == 0
    assert "no snapshots" in capfd.readouterr().out


def test_the_controller_of_a_run(sandbox: str, url: str, tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "config.toml").write_text("")
    assert agentrl("--run", str(tmp_path), "ls") == 2
    Endpoints(token="secret", urls={"sandbox": url}).write(tmp_path / "endpoints.json")
    assert agentrl("--run", str(tmp_path), "ls") == 0
    assert sandbox in capfd.readouterr().out


def test_without_a_controller_it_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    monkeypatch.delenv("AGENTRL_SANDBOX_URL", raising=False)
    assert agentrl("ls") == 2
    assert "--run NAME" in capfd.readouterr().err
