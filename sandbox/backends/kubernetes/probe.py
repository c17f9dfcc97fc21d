"""Whether the cluster's network keeps a pod from connecting, tried out. Used by `backend` when isolation is required.

A NetworkPolicy that the API server took says nothing of a network that enforces none. Invariant: only a connection
that arrived here counts as one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket

from agentrl.core.config import KubernetesConfig
from sandbox.backends.kubernetes.manifests import program
from sandbox.channel import Channel

CONNECT_S = 2.0
"""Seconds that the pod's try takes where its packets are dropped."""
TRIES, PAUSE_S = 4, 1.0
"""A network may take a moment to know of a new pod: so all of the tries must arrive."""


async def reaches_us(channel: Channel, pod_ip: str, config: KubernetesConfig) -> bool:
    """Have the pod connect to a port of this machine, at the address from which we reach the pod."""
    family = socket.AF_INET6 if ":" in pod_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        # No packet is sent: the kernel says which address it would send from.
        route.connect((pod_ip, 9))
        here = route.getsockname()[0]
    arrivals = 0

    async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrivals
        arrivals += 1
        writer.close()

    server = await asyncio.start_server(arrived, here, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        script = (
            f"import socket; s = socket.socket({int(family)}); s.settimeout({CONNECT_S}); s.connect({(here, port)})"
        )
        asked = {"argv": program(config, script), "timeout_s": 2 * CONNECT_S}
        for tried in range(TRIES):
            await channel.request("POST", "/exec", body=json.dumps(asked).encode(), key=secrets.token_hex(8))
            if arrivals <= tried:
                return False
            await asyncio.sleep(PAUSE_S)
    return True
