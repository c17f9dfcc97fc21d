"""A page in headless Chromium, over its DevTools protocol: what it logged, asked for, and drew.

Used by tests of the HTML that agentrl writes. Needs the `chromium` command (Debian package chromium).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0


def chromium() -> str:
    """The browser's command; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("install Chromium (apt-get install chromium) to run this test")
    return found


class Page:
    """One tab. Everything that it logs or asks for is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.logged: list[str] = []
        """Console messages, uncaught exceptions and the browser's own complaints."""
        self.requests: list[str] = []
        """Addresses."""

    async def open(self, path: Path) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=path.as_uri(), until="Page.loadEventFired")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = await self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    async def _call(self, method: str, until: str = "", **parameters: object) -> dict[str, Any]:
        """The answer to a command; with `until`, only when that event came too."""
        number, answer, pending = next(self._numbers), None, until
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        while answer is None or pending:
            message = json.loads((await self._socket.receive(timeout=START_S)).data)
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                answer = message["result"]
            if message.get("method") == pending:
                pending = ""
        return answer

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.logged.append(json.dumps(parameters))


@asynccontextmanager
async def open_page(path: Path) -> AsyncIterator[Page]:
    """A page of a file, loaded; its browser ends with the block."""
    # A folder with a short name: the browser puts sockets into it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars",
            "--window-size=1100,900", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.open(path)
                    yield page
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _port(profile: Path, process: asyncio.subprocess.Process) -> int:
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while not (file.exists() and file.read_text().count("\n")):
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
