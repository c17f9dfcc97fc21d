"""The Python that is carried into images: it works where nothing else is, and takes nothing from where it runs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from runtime import ROOT, TOKEN, call, interpreters, sandboxd

from agentrl.core.errors import ConfigError
from agentrl.core.http import free_port
from sandbox.backends.docker import carried
from sandbox.runtime.interpreter import LOADER, SEALED, command

LOOK = """
import sys
from sandbox.runtime import handoff, pod, carry
import bz2, encodings.ascii, fcntl, gzip, lzma, struct, subprocess, tarfile, termios, unicodedata, zlib
with open("/proc/self/maps") as maps:
    print(sorted({line.split()[-1] for line in maps if "/" in line and not line.split()[-1].startswith(sys.prefix)}))
print([path for path in sys.path if not path.startswith(sys.prefix)])
print([module.__file__ for module in sys.modules.values() if not getattr(module, "__file__", sys.prefix).startswith(
    (sys.prefix, "<"))])
"""
SERVE = "from sandbox.runtime.sandboxd import main; main()"


@pytest.fixture(scope="module", params=interpreters())
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    words = [request.param, "-I", "-S", "-B", "-c", f"{carried.PACK}pack({str(folder / 'runtime')!r})"]
    subprocess.run(words, check=True, env={})
    return folder


def test_nothing_comes_from_beside_it(packed: Path) -> None:
    env = {"LANG": "de_DE.ISO-8859-1", "LD_LIBRARY_PATH": "/usr/lib", "PYTHONPATH": "/usr/lib", "PYTHONHOME": "/usr"}
    words = command(str(packed / "runtime"), LOOK)
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=True, cwd="/usr/lib")
    assert said.stdout.split("\n") == ["[]", "[]", "[]", ""]


def test_it_takes_no_library_that_the_place_prefers(packed: Path) -> None:
    loader = (packed / "runtime" / LOADER).read_bytes()
    assert b"/etc/ld.so.preload" not in loader
    assert b"/etc/ld.so.cache" not in loader


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not read everything")
def test_what_is_sealed_cannot_be_traced_from_its_beginning() -> None:
    def looked_at(runtime: Path, *, sealed: bool) -> int:
        words = command(str(runtime), "import time; print(flush=True); time.sleep(60)", sealed=sealed)
        with subprocess.Popen(words, user=1234, group=1234, extra_groups=[], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.read(1) == b"\n"
                look = ["head", "-c", "1", f"/proc/{process.pid}/environ", f"/proc/{process.pid}/maps"]
                return subprocess.run(
                    look, user=1234, group=1234, extra_groups=[], stdout=subprocess.DEVNULL
                ).returncode
            finally:
                process.kill()

    # Not below pytest's folder, which is closed to others.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        runtime = carried.prepared(Path(folder))
        assert (looked_at(runtime, sealed=False), looked_at(runtime, sealed=True)) == (0, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a root of its own")
def test_sandboxd_serves_and_executes_in_an_empty_root(packed: Path) -> None:
    for name in ("dev", "proc"):
        (packed / name).mkdir(exist_ok=True)
    port = free_port()
    config = {"port": port, "host": "127.0.0.1", "workdir": "/work", "ttl_s": 60.0, "files": {"a": "of the spec"}}
    inside = [*command("/runtime", SERVE), json.dumps(config)]
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
    mount = f'mount --bind /dev {packed}/dev && mount -t proc proc {packed}/proc && exec "$0" "$@"'
    process = subprocess.Popen(
        [*words, mount, "chroot", str(packed), *inside], env={"SANDBOXD_TOKEN": TOKEN, "PATH": os.environ["PATH"]}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        # The loader is a program that needs nothing else.
        request = json.dumps({"argv": [f"/runtime/{LOADER}", "--version"]}).encode()
        status, answer = call("POST", f"{url}/exec", request)
        assert status == 200, answer
        said = json.loads(answer)
        assert (said["status"], said["exit_code"]) == ("EXITED", 0), said
        assert said["stdout_total"] > 0
        assert call("GET", f"{url}/files?path=a") == (200, b"of the spec")
        assert call("GET", f"{url}/tar?path=.")[0] == 200
    finally:
        process.kill()
        process.wait()


def test_a_folder_is_packed_once_and_everybody_may_read_it(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        first = carried.prepared(tmp_path)
    finally:
        os.umask(umask)
    closed = [path for path in (first, *first.rglob("*")) if path.stat().st_mode & 0o044 != 0o044]
    assert closed == [first / SEALED]
    before = first.stat().st_ctime_ns
    assert carried.prepared(tmp_path) == first
    assert first.stat().st_ctime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert sum(path.stat().st_size for path in first.rglob("*")) < 64 << 20


def test_a_python_that_cannot_be_carried_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="/bin/false, cannot be carried"):
        carried.prepared(tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_serves_as_any_other_python(packed: Path, tmp_path: Path) -> None:
    loader, *words = command(str(packed / "runtime"), SERVE)
    with sandboxd(tmp_path, python=loader, words=words) as (url, _):
        status, answer = call("POST", f"{url}/exec", json.dumps({"argv": ["env"], "user": ""}).encode())
        assert status == 200, answer
        shown = base64.urlsafe_b64decode(json.loads(answer)["stdout"]).decode()
        assert "LD_" not in shown
        assert "PYTHONHOME" not in shown
        assert str(ROOT) not in shown
