"""Tokens of one answer, written to a caller who may be gone."""

from __future__ import annotations

import asyncio

from lab.servers.drivers import AnswerWriter
from lab.servers.reply import OutputSpec, ReplyWriter, write_text


class Closed(asyncio.Transport):
    """As uvloop's, which raises where asyncio's own only warns."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: object) -> None:
        raise RuntimeError("the handler is closed")


async def test_a_token_for_a_caller_who_has_left_is_dropped():
    """The engine's only task delivers to all callers, and must survive."""
    answer = AnswerWriter(8, 0.0)
    reply = write_text(0, OutputSpec(3, 0, False), "")
    answer.stream_to(Closed(), ReplyWriter(reply=reply, id="x", model="m", created=0, chat=True, vllm=True))
    answer.begin(0.1, 0.0, 0)
    answer.token(0.1)
    answer.finish()
    assert answer.done.is_set()
