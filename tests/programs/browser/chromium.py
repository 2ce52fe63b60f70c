"""A real Chromium, driven over its DevTools protocol: contents and errors of a page."""

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
    """A browser tab. `complaints`: errors and warnings of the console, exceptions, and CSP violations."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket, self.session, self.complaints = socket, "", list[str]()
        self.requests: list[str] = []
        self._numbers, self._answers = count(1), dict[int, asyncio.Future[Any]]()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            message_ = message.json()
            if "id" in message_:
                self._answers.pop(message_["id"]).set_result(message_)
            else:
                self._on_event(message_["method"], message_["params"])

    def _on_event(self, method: str, message_: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(message_["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and message_["type"] in COMPLAINTS:
            self.complaints.append(str(message_["args"]))
        elif method == "Log.entryAdded" and message_["entry"]["level"] in COMPLAINTS:
            self.complaints.append(message_["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(message_["request"]["url"])

    async def command(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json(
            {"id": number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        )
        async with asyncio.timeout(20):
            message_ = await answer
        assert "error" not in message_, message_["error"]
        return message_["result"]

    async def open(self, url: str) -> None:
        await self.command("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        message_ = await self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in message_, message_["exceptionDetails"]
        return message_["result"].get("value")

    async def until(self, script: str, within: float = 20.0) -> Any:
        """The value of the expression as soon as it is true."""
        async with asyncio.timeout(within):
            while not (found := await self.run(script)):  # noqa: ASYNC110 - a page sends no event
                await asyncio.sleep(0.05)
        return found

    async def resize(self, width: int, height: int = 1000) -> None:
        size = {"width": width, "height": height}
        await self.command("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """A key of the keyboard, where the focus is. `code`: Windows key code."""
        for kind in ("keyDown", "keyUp"):
            pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            await self.command("Input.dispatchKeyEvent", type=kind, **pressed, **({"text": text} if text else {}))

    async def screenshot(self, path: Path, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """Of the window alone."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=features)
        await self.resize(width, height)
        taken = await self.command("Page.captureScreenshot")
        path.write_bytes(b64decode(taken["data"]))  # noqa: ASYNC240

    def close(self) -> None:
        self._reading.cancel()


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A new browser with an empty profile and a single tab."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=DEVNULL, stderr=PIPE
        )
        try:
            async with ClientSession() as client, client.ws_connect(await _address(process), max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    target = await page.command("Target.createTarget", url="about:blank")
                    attached = await page.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                    page.session = attached["sessionId"]
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.command(f"{domain}.enable")
                    yield page
                finally:
                    page.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """The WebSocket URL in the browser's output."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                drained = asyncio.create_task(_drained(process.stderr))
                process._drained = drained  # type: ignore[attr-defined]
                return found[1]
    raise AssertionError("the browser did not start")


async def _drained(stderr: asyncio.StreamReader) -> None:
    """Reads further output, so that no pipe fills up."""
    while await stderr.read(65536):
        pass
