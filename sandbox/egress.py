"""The egress proxy: what sandboxes without a network may still reach. Started by backends; counts in `metrics`.

It runs in the controller, where names are resolved and the list is checked, and takes HTTP CONNECT and absolute `http:`
requests from a unix socket. Invariants: an address that is not public is reached only when the list has it literally,
so no name leads into the operator's network; a refusal says what is missing; no sandbox takes all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import resource
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.core.errors import ConfigError
from agentrl.core.telemetry import Metrics
from sandbox.channel import Stream
from sandbox.runtime.egress import PORT

log = logging.getLogger(__name__)

HEAD_S, CONNECT_S = 30.0, 20.0
LINGER_S = 60.0
"""How long one side may go on after the other has said all."""
CHUNK = 1 << 16
HOST = re.compile(r"(\*\.)?[a-z0-9_.:-]+")
HOP_HEADERS = ("proxy-", "connection:", "keep-alive:")
NAT64 = ipaddress.ip_network("64:ff9b::/96")
MOST = 4096
"""Connections at once, and a quarter of the files that we may open: tasks must not use up what the controller needs.
Each sandbox may have as many as are free for all: half of them when it is alone, a third each when there are two."""
CREDENTIALS = struct.Struct("3i")
"""Pid, uid and gid of who connected."""


def environment() -> Mapping[str, str]:
    """What makes programs inside use the proxy."""
    proxy, local = f"http://127.0.0.1:{PORT}", "localhost,127.0.0.1,::1"
    names = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": local}
    return names | {name.lower(): value for name, value in names.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    host: str
    """Lower case; one that begins with `*.` means every name below it."""
    port: int

    def allows(self, host: str, port: int) -> bool:
        named = host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host
        return named and port == self.port


def parse_rule(text: str) -> Rule:
    host, colon, port = text.rpartition(":")
    host = host.strip("[]").lower()
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not HOST.fullmatch(host):
        raise ConfigError(f"sandbox.egress has {text!r}: each must be host:port, *.domain:port or address:port")
    return Rule(host, int(port))


class Refused(Exception):
    """Status and sentence of an answer to the sandbox."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class EgressProxy:
    """Serves one unix socket at a time."""

    def __init__(self, allowed: tuple[str, ...], metrics: Metrics) -> None:
        self._rules = tuple(map(parse_rule, allowed))
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], str] = {}
        """Connections, and whose they are."""
        self._own_cgroups = _cgroups("self")
        self._most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    async def start(self, path: Path | str) -> None:
        """Listen at `path`, whose folder only sandboxes are shown; what an earlier controller left there goes."""
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, path, limit=CHUNK)
        # Root inside may be another user outside, under user namespaces.
        Path(path).chmod(0o666)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        caller = self._caller(writer.get_extra_info("socket"))
        theirs = Counter(self._open.values())[caller]
        if theirs >= self._most - len(self._open):
            log.warning(
                "egress: of %d open connections one sandbox has %d, its next was closed", len(self._open), theirs
            )
            writer.transport.abort()
            return
        self._open[task] = caller
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError) as error:
            log.debug("egress: %s", error)
        finally:
            del self._open[task]
            writer.transport.abort()

    def _caller(self, sock: socket.socket) -> str:
        """Which sandbox connected, as the kernel says: by its cgroups, and where it has none of its own by its uid."""
        pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        cgroups = _cgroups(str(pid))
        return cgroups if cgroups not in ("", self._own_cgroups) else f"uid {uid}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            upstream, first = await self._reach(head)
        except Refused as refusal:
            body = f"agentrl: {refusal}\n".encode()
            kind = f"content-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close"
            writer.write(f"HTTP/1.1 {refusal.status}\r\n{kind}\r\n\r\n".encode() + body)
            await writer.drain()
            writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await reader.read()
            return
        try:
            if first:
                upstream[1].write(first)
            else:
                writer.write(b"HTTP/1.1 200 connected\r\n\r\n")
            ways = [asyncio.create_task(_pump(*way)) for way in ((reader, upstream[1]), (upstream[0], writer))]
            try:
                await asyncio.wait(ways, return_when="FIRST_COMPLETED")
                await asyncio.wait(ways, timeout=LINGER_S)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            upstream[1].transport.abort()

    async def _reach(self, head: bytes) -> tuple[Stream, bytes]:
        """The connection that a request asks for, and what to send there first."""
        try:
            line, *headers = lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
            if any("\n" in each or "\r" in each for each in lines):
                raise ValueError("an upstream could read it as other lines than we do")
            method, target, version = line.split(" ")
            if method == "CONNECT":
                url = urlsplit(f"//{target}")
                first = b""
                host, port = url.hostname or "", url.port or 0
            else:
                url = urlsplit(target)
                host, port = url.hostname or "", url.port or 80
                # Whoever serves several names at one address must not be asked for one that is not listed.
                kept = [f"host: {url.netloc.rpartition('@')[2]}"]
                kept += [h for h in headers if not h.lower().startswith((*HOP_HEADERS, "host:"))]
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                first = "\r\n".join([f"{method} {path} {version}", *kept, "connection: close", "", ""]).encode(
                    "latin-1"
                )
        except ValueError:
            raise Refused("400 Bad Request", "this is no HTTP request") from None
        if not host or (method != "CONNECT" and url.scheme != "http"):
            raise Refused("400 Bad Request", "send CONNECT host:port, or a request for an absolute http: URL")
        return await self._connect(host.rstrip(".").lower(), port), first

    async def _connect(self, host: str, port: int) -> Stream:
        if not any(rule.allows(host, port) for rule in self._rules):
            self._refuse(host, port, f"{host}:{port} is not in sandbox.egress, so this sandbox may not reach it")
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(address[0]) for _, _, _, _, address in found]
                permitted = [address for address in addresses if self._permitted(address, port)]
                if not permitted:
                    why = f"{host} is {addresses[0]}, which is no public address"
                    self._refuse(
                        host, port, f"{why}: to let sandboxes reach it, add {addresses[0]}:{port} to sandbox.egress"
                    )
                stream = await asyncio.open_connection(permitted[0], port, limit=CHUNK)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Refused("502 Bad Gateway", f"{host}:{port} cannot be reached: {error or 'no answer'}") from None
        self._metrics.inc("sandbox/egress_total")
        return stream

    def _permitted(self, address: str, port: int) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        meant = _embedded(parsed) if isinstance(parsed, ipaddress.IPv6Address) else parsed
        return (meant.is_global and not meant.is_multicast) or Rule(address.lower(), port) in self._rules

    def _refuse(self, host: str, port: int, message: str) -> None:
        self._metrics.inc("sandbox/egress_refused_total")
        log.info("egress to %s:%d refused", host, port)
        raise Refused("403 Forbidden", message)


def _cgroups(pid: str) -> str:
    """Empty for a process that ended, or that we do not see."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Where packets to an address end, if that is an IPv4 address inside it."""
    nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else None
    return address.ipv4_mapped or address.sixtofour or nat64 or address


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
