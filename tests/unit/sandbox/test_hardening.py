"""sandboxd where tasks may write the image: all of its calls work, and nothing of them is imported any more."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pwd
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from runtime import ROOT, call, interpreters, sandboxd

HARDENED = (
    "-I", "-S", "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from sandbox.runtime.hardening import import_no_more\n"
    "from sandbox.runtime.sandboxd import main\n"
    "import_no_more()\n"
    "main()",
)  # fmt: skip
"""As a container starts it."""


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        made.addfile(tarfile.TarInfo("a\xe4/b"))
    return gzip.compress(buffer.getvalue())


@pytest.mark.parametrize("python", interpreters())
def test_every_call_works_without_another_import(python: str, tmp_path: Path) -> None:
    with sandboxd(tmp_path, python=python, words=HARDENED) as (url, process):

        def exchange(method: str, path: str, body: Any = b"", key: str = "k") -> bytes:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            status, answer = call(method, url + path, raw, key=key)
            assert status == 200, (path, answer)
            return answer

        exchange("GET", "/health")
        exchange("PUT", "/tar?path=x", archive())
        with tarfile.open(fileobj=io.BytesIO(exchange("GET", "/tar?path=x"))) as packed:
            assert "./a\xe4/b" in packed.getnames()
        exchange("PUT", "/files?path=%C3%A4", b"text")
        assert exchange("GET", "/files?path=%C3%A4") == b"text"
        shown = json.loads(exchange("POST", "/exec", {"argv": ["sh", "-c", "id -un"], "env": {"LANG": "C"}}))
        assert base64.urlsafe_b64decode(shown["stdout"]).decode().strip() == pwd.getpwuid(os.geteuid()).pw_name
        exchange("POST", "/processes", {"argv": ["cat"], "tty": {"rows": 5, "columns": 50}}, key="p")
        exchange("POST", "/processes/p/resize", {"rows": 6, "columns": 60})
        exchange("POST", "/shells", {}, key="s")
        exchange("POST", "/shells/s/exec", {"command": "true"}, key="t")
        assert process.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("python", interpreters())
def test_users_are_those_of_the_account_files(python: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with sandboxd(tmp_path, python=python, words=HARDENED) as (url, _):
        for user, said in (("nobody", "nobody"), (str(pwd.getpwnam("nobody").pw_uid), "nobody"), ("12345", "12345")):
            request = {"argv": ["sh", "-c", "id -un 2>/dev/null || id -u"], "user": user, "cwd": "/tmp"}
            status, answer = call("POST", f"{url}/exec", json.dumps(request).encode(), key=user)
            assert status == 200, answer
            assert base64.urlsafe_b64decode(json.loads(answer)["stdout"]).decode().split()[-1] == said
        refused = call("POST", f"{url}/exec", b'{"argv": ["true"], "user": "no-such-user"}', key="none")
        assert refused[0] == 400
        assert b"no user 'no-such-user' in /etc/passwd" in refused[1]


def test_what_a_task_puts_where_modules_come_from_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("print('planted')")
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from sandbox.runtime.hardening import import_no_more\n"
        "import_no_more()\n"
        "try:\n import planted\nexcept ImportError: print('refused')"
    )
    said = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "refused\n"
