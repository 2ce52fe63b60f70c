"""A caller of Responses over WebSocket."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.support.dialogues import Json

LAST = ("response.completed", "response.incomplete", "response.failed", "error")


class SocketCaller:
    """Sends turns and reads their events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, **members: Any) -> None:
        await self.socket.send_json({"type": "response.create", **members})

    async def events(self) -> list[Json]:
        """All events of a turn."""
        found: list[Json] = []
        while not found or found[-1]["type"] not in LAST:
            found.append(json.loads(await self.socket.receive_str()))
        return found

    async def ask_raw(self, message: str) -> Json:
        """The last event of a turn, whatever is sent as one."""
        await self.socket.send_str(message)
        return (await self.events())[-1]

    async def ask(self, **members: Any) -> Json:
        """The last event of a turn."""
        await self.send(**members)
        return (await self.events())[-1]
