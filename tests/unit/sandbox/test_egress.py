"""The egress proxy by itself: what its list allows, what it refuses, and that bytes pass unchanged both ways."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.telemetry import Metrics
from sandbox.egress import EgressProxy, parse_rule
from sandbox.metrics import SPECS

OTHER_USER = r"""
import os, socket, sys
os.seteuid(54321)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.send(b"x\r\n\r\n")
print(sock.recv(100))
"""


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets, once that has ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def asked(proxy: EgressProxy, path: Path, request: bytes, *, rest: bytes = b"") -> bytes:
    await proxy.start(path)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    answer = b""
    if rest:
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.write(rest)
        await writer.drain()
    writer.write_eof()
    answer += await reader.read()
    writer.close()
    await proxy.close()
    return answer


def counted(metrics: Metrics) -> tuple[float, float]:
    return metrics.value("sandbox/egress_total"), metrics.value("sandbox/egress_refused_total")


async def test_a_tunnel_passes_bytes_both_ways(echo: int, tmp_path: Path) -> None:
    metrics, data = Metrics(SPECS), os.urandom(1 << 20)
    proxy = EgressProxy((f"127.0.0.1:{echo}",), metrics)
    head = f"CONNECT 127.0.0.1:{echo} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    answer = await asked(proxy, tmp_path / "p", head, rest=data)
    assert answer == b"HTTP/1.1 200 connected\r\n\r\n" + data
    assert counted(metrics) == (1, 0)


async def test_a_request_with_an_absolute_url_is_passed_on(echo: int, tmp_path: Path) -> None:
    proxy = EgressProxy((f"127.0.0.1:{echo}",), Metrics(SPECS))
    head = (
        f"POST http://127.0.0.1:{echo}/a?b=c HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\n\r\nbody".encode()
    )
    answer = await asked(proxy, tmp_path / "p", head)
    assert answer == f"POST /a?b=c HTTP/1.1\r\nhost: 127.0.0.1:{echo}\r\nconnection: close\r\n\r\nbody".encode()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("127.0.0.1:{other}", "is not in sandbox.egress"),
        ("example.org:443", "is not in sandbox.egress"),
        ("localhost:{port}", "which is no public address: to let sandboxes reach it, add"),
        ("a.test:{port}", "cannot be reached"),
    ],
)
async def test_what_is_not_listed_is_refused(echo: int, tmp_path: Path, target: str, why: str) -> None:
    metrics = Metrics(SPECS)
    proxy = EgressProxy((f"127.0.0.2:{echo}", f"localhost:{echo}", f"*.test:{echo}"), metrics)
    name = target.format(port=echo, other=echo + 1)
    answer = await asked(proxy, tmp_path / "p", f"CONNECT {name} HTTP/1.1\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] == (b"502" if "reached" in why else b"403")
    assert why in answer.decode()
    assert counted(metrics) == (0, 0 if "reached" in why else 1)


@pytest.mark.parametrize(
    "request_line", ["GET / HTTP/1.1", "nonsense", "GET ftp://127.0.0.1/ HTTP/1.1", "CONNECT :1 HTTP/1"]
)
async def test_what_is_no_request_for_a_proxy_is_400(request_line: str, tmp_path: Path) -> None:
    proxy = EgressProxy(("*.org:80",), Metrics(SPECS))
    answer = await asked(proxy, tmp_path / "p", f"{request_line}\r\nhost: a.org\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_name_that_cannot_be_one_is_502(tmp_path: Path) -> None:
    proxy = EgressProxy(("*.test:80",), Metrics(SPECS))
    answer = await asked(proxy, tmp_path / "p", f"CONNECT {'a' * 64}.test:80 HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 502 ")


async def test_a_line_that_an_upstream_could_read_as_two_is_400(echo: int, tmp_path: Path) -> None:
    proxy = EgressProxy((f"127.0.0.1:{echo}",), Metrics(SPECS))
    head = f"GET http://127.0.0.1:{echo}/ HTTP/1.1\r\na: b\nhost: other\r\n\r\n".encode()
    assert (await asked(proxy, tmp_path / "p", head)).startswith(b"HTTP/1.1 400 ")


async def test_one_connection_too_many_is_closed(echo: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.egress.MOST", 1)
    proxy = EgressProxy((f"127.0.0.1:{echo}",), Metrics(SPECS))
    await proxy.start(tmp_path / "p")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "p")
    writer.write(f"CONNECT 127.0.0.1:{echo} HTTP/1.1\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    more, other = await asyncio.open_unix_connection(tmp_path / "p")
    assert await more.read() == b""
    for each in (writer, other):
        each.close()
    await proxy.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may connect as other users")
async def test_one_user_cannot_take_all_connections(echo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.egress.MOST", 8)
    proxy = EgressProxy((f"127.0.0.1:{echo}",), Metrics(SPECS))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        await proxy.start(f"{folder}/p")
        held = [await asyncio.open_unix_connection(f"{folder}/p") for _ in range(4)]
        more, _ = fifth = await asyncio.open_unix_connection(f"{folder}/p")
        assert await more.read() == b"", "half of all are one user's"
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER_USER, f"{folder}/p", stdout=asyncio.subprocess.PIPE
        )
        assert b"400 Bad Request" in (await other.communicate())[0]
        for _, writer in (*held, fifth):
            writer.close()
        await proxy.close()


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::1",
        "224.0.0.1",
    ],
)
def test_no_form_of_an_address_that_is_not_public_is_permitted_by_itself(address: str) -> None:
    assert not EgressProxy(("*.org:80",), Metrics(SPECS))._permitted(address, 80)
    assert EgressProxy((f"[{address}]:80",), Metrics(SPECS))._permitted(address, 80)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_addresses_are_permitted(address: str) -> None:
    assert EgressProxy(("*.org:80",), Metrics(SPECS))._permitted(address, 80)


def test_rules() -> None:
    below = parse_rule("*.Example.org:443")
    assert below.allows("a.b.example.org", 443)
    for host, port in (("example.org", 443), ("a.example.org", 80), ("badexample.org", 443)):
        assert not below.allows(host, port)
    assert parse_rule("[::1]:80").allows("::1", 80)
    for text in ("example.org", "*:443", "a.*.org:1", ":80", "a:99999", "http://a.org:80"):
        with pytest.raises(ConfigError, match=r"sandbox\.egress has"):
            parse_rule(text)
