"""The ways to a pod's sandboxd: its IP, or else an exec through the API server. Used by `backend`.

By IP a request costs what HTTP costs; by exec it passes the API server and the kubelet, through a process beside
sandboxd (`sandbox.runtime.carry`). Invariant: what keeps a connection from being made is an OSError, before any byte
of a request was sent.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import aiohttp
import orjson

from agentrl.core.config import KubernetesConfig
from agentrl.core.errors import AgentRLError
from sandbox.backends.kubernetes.cluster import Cluster
from sandbox.backends.kubernetes.manifests import CONTAINER, PORT, program
from sandbox.channel import Stream, until_either
from sandbox.runtime.carry import READY

log = logging.getLogger(__name__)

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Newest first; both put the number of a channel before each message, and 1.20 has only the older."""
STDIN, STDOUT, STDERR, STATUS = range(4)
CARRY = f"from sandbox.runtime.carry import main; main({PORT})"
CONNECT_S = 5.0
EXEC_S = 15.0
"""Seconds until a process that was started through the API server has connected to sandboxd."""
NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})
"""The network's own errors; a refused connection came from the pod, whose sandboxd is not there yet or no more."""


class Reach:
    """Connections to the sandboxes of one backend; `close` ends those that go through the API server."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._way, self._words = config.way_in, program(config, CARRY, sealed=True)
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, cluster: Cluster, pod: str, host: str) -> Stream:
        if self._way != "exec":
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(host, PORT)
            except OSError as error:
                no_way = isinstance(error, TimeoutError) or error.errno in NO_WAY
                if self._way == "ip" or not no_way:
                    raise
                log.warning("pod %s at %s: %s; trying an exec through the API server", pod, host, error or "timeout")
                stream = await self._exec(cluster, pod)
                # Where this pod cannot be reached, no other can: none of them is to wait for a timeout first.
                log.warning("POD IPS CANNOT BE REACHED FROM HERE: every command goes through the API server")
                self._way = "exec"
                return stream
        return await self._exec(cluster, pod)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _exec(self, cluster: Cluster, pod: str) -> Stream:
        query = [("container", CONTAINER), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in self._words]
        try:
            async with asyncio.timeout(EXEC_S):
                messages = await cluster.websocket(f"pods/{pod}/exec", query, PROTOCOLS)
                try:
                    if messages.protocol is None:
                        raise ConnectionError(f"exec: the API server speaks neither of {', '.join(PROTOCOLS)}")
                    first = await _carried(messages)
                except BaseException:
                    await messages.close()
                    raise
        except AgentRLError as error:
            raise ConnectionError(str(error)) from error
        near, far = socket.socketpair()
        task = asyncio.create_task(_carry(messages, far, first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.open_connection(sock=near)


async def _carried(messages: aiohttp.ClientWebSocketResponse) -> bytes:
    """Wait until the other end is connected; what it sent beyond that. ConnectionError when it never will be."""
    said = b""
    async for message in messages:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDOUT and data:
            return bytes(data[len(READY) :])
        said += _reason(data) if channel == STATUS else data
    raise ConnectionError(f"exec: {said.decode(errors='replace')[-500:] or 'ended without a word'}")


def _reason(status: bytes) -> bytes:
    """The message of a Status, which ends an exec."""
    try:
        return str(orjson.loads(status).get("message", "")).encode()
    except orjson.JSONDecodeError:
        return status


async def _carry(messages: aiohttp.ClientWebSocketResponse, far: socket.socket, first: bytes) -> None:
    """Until either end closes: what the API server sends to the socket, and what the socket sends to it."""
    reader, writer = await asyncio.open_connection(sock=far)

    async def inward() -> None:
        while data := await reader.read(1 << 16):
            await messages.send_bytes(bytes([STDIN]) + data)

    async def outward() -> None:
        writer.write(first)
        async for message in messages:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data or message.data[0] == STATUS:
                return
            if message.data[0] == STDOUT:
                writer.write(message.data[1:])
                await writer.drain()

    try:
        await until_either(inward(), outward(), through="the API server")
    finally:
        writer.transport.abort()
        await messages.close()
