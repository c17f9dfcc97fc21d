"""Commands in sandboxes of a docker backend without a controller."""

from __future__ import annotations

from agentrl.core.types import ExecRequest, ExecResult
from sandbox.backends.docker.backend import DockerBackend

STATUS = ("sh", "-c", "id -u; id -G; grep -E '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status")
"""Who a command is: its uid, its groups, and each of its sets of capabilities."""


async def run(backend: DockerBackend, sandbox_id: str, *argv: str) -> ExecResult:
    channel = backend.channel(sandbox_id)
    try:
        request = ExecRequest(argv=argv)
        answer = await channel.request("POST", "/exec", body=request.model_dump_json().encode(), key=" ".join(argv))
        assert answer.status == 200, answer.body
        return ExecResult.model_validate_json(answer.body)
    finally:
        channel.close()
