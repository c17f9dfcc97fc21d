"""What the client sends again when a connection is cut: before the request was delivered, and after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from cutting_proxy import CuttingProxy, cutting
from sandboxes import SPEC, TOKEN, sandbox_config, sh

from agentrl.core.errors import Conflict, Ran, ServiceUnavailable
from agentrl.core.http import free_port, serving
from agentrl.core.types import ProcessRequest, SandboxState
from sandbox.api import create_sandbox_app
from sandbox.client import RemoteSandbox, SandboxClient

Cut = Literal["before", "after"]
cut_both = pytest.mark.parametrize("cut", ["before", "after"])


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[CuttingProxy]:
    app = create_sandbox_app(sandbox_config("local"), folder=tmp_path, token=TOKEN)
    async with serving(app) as url, cutting(url) as made:
        yield made


@pytest.fixture
async def client(proxy: CuttingProxy) -> AsyncIterator[SandboxClient]:
    made = SandboxClient(proxy.url, token=TOKEN)
    yield made
    await made.close()


@pytest.fixture
async def sandbox(client: SandboxClient, proxy: CuttingProxy) -> AsyncIterator[RemoteSandbox]:
    async with client.acquire(SPEC, owner="test", key="one") as made:
        proxy.seen.clear()
        yield made
        proxy.cuts.clear()


@cut_both
async def test_a_command_runs_once_and_is_asked_for(cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox) -> None:
    proxy.cuts["POST exec"] = cut
    result = await sandbox.exec(sh("echo ran >>ran; wc -l <ran"))
    assert result.stdout.strip() == b"1"
    again = ["POST exec"] if cut == "before" else []
    assert proxy.seen == ["POST exec cut", "GET exec", *again]


@cut_both
async def test_an_answer_that_is_lost_twice_is_asked_for_twice(
    cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox
) -> None:
    proxy.cuts |= {"POST exec": "after", "GET exec": cut}
    assert (await sandbox.exec(sh("echo ran >>ran; wc -l <ran"))).stdout.strip() == b"1"
    assert proxy.seen == ["POST exec cut", "GET exec cut", "GET exec"]


async def test_what_certainly_did_not_run_is_sent_again(tmp_path: Path) -> None:
    port = free_port()
    app = create_sandbox_app(sandbox_config("local"), folder=tmp_path, token=TOKEN)
    async with serving(app) as url:
        client = SandboxClient(f"http://127.0.0.1:{port}", token=TOKEN)
        creating = asyncio.create_task(client.create(SPEC, owner="test", key="k"))
        await asyncio.sleep(0.3)
        assert not creating.done()
        async with cutting(url, port=port) as proxy:
            assert (await creating).state is SandboxState.READY
            assert proxy.seen == ["POST sandboxes"]
            await client.close()


async def test_after_one_that_may_have_run_no_refusal_says_that_it_did_not(
    proxy: CuttingProxy, sandbox: RemoteSandbox
) -> None:
    hasty = SandboxClient(proxy.url, token=TOKEN, patience_s=1.0)
    proxy.goes_away = True

    proxy.cuts["POST exec"] = "after"
    with pytest.raises(ServiceUnavailable, match="cannot connect") as unknown:
        await hasty.handle(sandbox.id).exec(sh("true"))
    assert unknown.value.ran is Ran.MAYBE
    await hasty.close()


@cut_both
async def test_a_process_starts_once(cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox) -> None:
    proxy.cuts["POST processes"] = cut
    view = await sandbox.start(ProcessRequest(argv=("sleep", "60")))
    assert [known.id for known in await sandbox.processes()] == [view.id]


@cut_both
async def test_input_and_signals_are_never_sent_again(cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox) -> None:
    script = "trap 'echo signal' USR1; echo ready; while :; do read -r line && echo got $line; done"
    process = await sandbox.start(ProcessRequest(argv=("sh", "-c", script), interactive=True))
    assert (await sandbox.output(process.id, wait_s=10.0)).data == b"ready\n"
    proxy.seen.clear()
    proxy.cuts |= {"POST stdin": cut, "POST signal": cut}
    with pytest.raises(ServiceUnavailable) as unknown:
        await sandbox.send_input(process.id, b"input\n")
    assert unknown.value.ran is Ran.MAYBE
    with pytest.raises(ServiceUnavailable):
        await sandbox.signal(process.id, 10)
    assert proxy.seen == ["POST stdin cut", "POST signal cut"]
    await sandbox.send_input(process.id, b"end\n")
    seen = b""
    async for chunk in sandbox.follow(process.id):
        seen += chunk.data
        if b"got end" in seen:
            break
    assert seen.count(b"got input") == seen.count(b"signal") == (1 if cut == "after" else 0)


@cut_both
async def test_a_shell_runs_each_command_once(cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox) -> None:
    proxy.cuts |= {"POST shells": cut, "POST exec": cut}
    async with sandbox.shell() as shell:
        assert (await shell.run("n=$((n + 1)); echo $n")).stdout == b"1\n"
        assert (await shell.run("n=$((n + 1)); echo $n")).stdout == b"2\n"
    assert proxy.seen.count("POST exec") == 2, "the one that was cut came again, with its key"


@cut_both
async def test_verbs_act_once(cut: Cut, proxy: CuttingProxy, client: SandboxClient, sandbox: RemoteSandbox) -> None:
    proxy.cuts |= {"POST snapshots": cut, "POST pause": cut, "POST resume": cut, "POST renew": cut}
    kept = await sandbox.snapshot(ttl_s=60.0)
    assert list(await client.snapshots()) == [kept]
    await sandbox.pause()
    await sandbox.renew(60.0)
    await sandbox.resume()
    page = await client.events()
    assert [event.state.value for event in page.events] == ["CREATING", "READY", "PAUSED", "READY"]


@cut_both
async def test_a_sandbox_is_made_once_and_closed(cut: Cut, proxy: CuttingProxy, client: SandboxClient) -> None:
    proxy.cuts["POST sandboxes"] = cut
    async with client.acquire(SPEC, owner="test", key="k") as sandbox:
        proxy.cuts[f"DELETE {sandbox.id}"] = cut
        assert len(await client.list()) == 1
    assert not await client.list()
    async with client.acquire_group({"a": SPEC, "b": SPEC}, owner="test") as made:
        assert len(await client.list()) == len(made) == 2


@cut_both
async def test_output_comes_whole_and_once(cut: Cut, proxy: CuttingProxy, sandbox: RemoteSandbox) -> None:
    lines = "seq 1 3000; sleep 0.3; seq 3001 6000; echo wrong >&2; exit 4"
    async with sandbox.running(ProcessRequest(argv=("sh", "-c", lines))) as process:
        proxy.cuts["GET output"] = cut
        streams = {"stdout": b"", "stderr": b""}
        async for piece in process.output():
            assert piece.missed == 0
            streams[piece.stream] += piece.data
        assert (await process.wait()).exit_code == 4
    assert streams == {"stdout": b"".join(b"%d\n" % i for i in range(1, 6001)), "stderr": b"wrong\n"}
    assert "GET output cut" in proxy.seen


async def test_what_runs_in_a_block_ends_with_it(sandbox: RemoteSandbox) -> None:
    with pytest.raises(ZeroDivisionError):
        async with sandbox.running(ProcessRequest(argv=("sleep", "1000")), key="p"), sandbox.shell(key="s"):
            raise ZeroDivisionError
    assert (await sandbox.process("p", wait_s=10.0)).status == "SIGNALED"
    assert (await sandbox.exec(sh("ps -e | grep -c -e sleep -e 'sh$' || true"))).stdout.strip() in (b"0", b"1")


async def test_a_used_key_with_another_request_is_refused_and_does_nothing(
    client: SandboxClient, sandbox: RemoteSandbox
) -> None:
    await sandbox.exec(sh("echo once >exec"), key="key")
    await sandbox.start(ProcessRequest(argv=("sleep", "60")), key="key")
    shell = await sandbox.open_shell(key="key")
    await shell.run("echo once >shell", key="key")
    kept = await sandbox.snapshot(ttl_s=60.0, key="key")
    other = SPEC.model_copy(update={"workdir": "/other"})
    for call in (
        sandbox.exec(sh("echo twice >exec"), key="key"),
        sandbox.start(ProcessRequest(argv=("sleep", "61")), key="key"),
        sandbox.open_shell(("sh", "-u"), key="key"),
        shell.run("echo twice >shell", key="key"),
        sandbox.snapshot(ttl_s=61.0, key="key"),
        client.create(other, owner="test", key="one"),
        client.acquire_group({"one": other}, owner="test").__aenter__(),
    ):
        with pytest.raises(Conflict) as refused:
            await call
        assert refused.value.ran is Ran.NO
    await sandbox.pause(key="key")
    for call in (sandbox.pause(ttl_s=9.0, key="key"), sandbox.resume(key="key")):
        with pytest.raises(Conflict):
            await call
    await sandbox.resume()
    assert (await sandbox.read("exec"), await sandbox.read("shell")) == (b"once\n", b"once\n")
    assert len(await sandbox.processes()) == 1
    assert list(await client.snapshots()) == [kept]
    assert len(await client.list()) == 1
