"""A real Chromium, steered over its DevTools protocol: what a page shows, and what it complains of."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
COMPLAINTS = ("error", "warning")


class Page:
    """One tab. `complaints`: errors and warnings of its console, exceptions, and what its policy forbade."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket, self.session, self.complaints = socket, "", list[str]()
        self.requests: list[str] = []
        self._numbers, self._answers = count(1), dict[int, asyncio.Future[Any]]()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._heard(said["method"], said["params"])

    def _heard(self, method: str, said: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in COMPLAINTS:
            self.complaints.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in COMPLAINTS:
            self.complaints.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    async def tell(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json(
            {"id": number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        )
        async with asyncio.timeout(20):
            said = await answer
        assert "error" not in said, said["error"]
        return said["result"]

    async def open(self, url: str) -> None:
        await self.tell("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        said = await self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, script: str, within: float = 20.0) -> Any:
        """What it is once it is true."""
        async with asyncio.timeout(within):
            while not (found := await self.run(script)):  # noqa: ASYNC110 - a page tells nobody
                await asyncio.sleep(0.05)
        return found

    async def screenshot(self, path: Path, scheme: str = "light", width: int = 1360, height: int = 1000) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.tell("Emulation.setEmulatedMedia", features=features)
        await self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        taken = await self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(taken["data"]))  # noqa: ASYNC240

    def close(self) -> None:
        self._reading.cancel()


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A browser of its own, with an empty profile, and one tab."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=DEVNULL, stderr=PIPE
        )
        try:
            async with ClientSession() as client, client.ws_connect(await _address(process), max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    target = await page.tell("Target.createTarget", url="about:blank")
                    attached = await page.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                    page.session = attached["sessionId"]
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.tell(f"{domain}.enable")
                    yield page
                finally:
                    page.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where it says that it listens."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                drained = asyncio.create_task(_drained(process.stderr))
                process._drained = drained  # type: ignore[attr-defined]
                return found[1]
    raise AssertionError("the browser did not start")


async def _drained(stderr: asyncio.StreamReader) -> None:
    """What it says besides fills no pipe."""
    while await stderr.read(65536):
        pass
