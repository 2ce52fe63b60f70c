"""The first token of an answer that a data plane shows: sent on first, learned from in any case."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode, MessageKind, answer
from gateway.observe.record import RequestOutcome
from gateway.parts.picker.grpc_server import Call, GrpcConnection
from gateway.parts.picker.served_answer import ServedAnswer
from tests.gateway.picker.test_picker import CHAT, SECOND, WHOLE, Envoy, headers, picking
from tests.support.ext_proc import HttpBody
from tests.support.simulated import eventually

pytestmark = pytest.mark.virtual_time


async def test_a_first_token_goes_on_before_it_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller waits. Written, not only handed to the connection."""
    order = list[str]()

    def noted(of: type, name: str, word: str) -> None:
        real = getattr(of, name)

        def wrapper(*given: Any) -> Any:
            order.append(word)
            return real(*given)

        monkeypatch.setattr(of, name, wrapper)

    async with picking() as (_, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        await envoy.pick()
        await envoy.ask(response_headers=headers({":status": "200"}))
        noted(GrpcConnection, "write", "sent")
        noted(GrpcConnection, "_flush", "written")
        noted(ServedAnswer, "on_body", "learned")
        await envoy.ask(response_body=HttpBody(body=SECOND))
    assert order[order.index("sent") :][:3] == ["sent", "written", "learned"]


async def test_an_answer_whose_call_ends_behind_it_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data plane that has the last reply may reset the call before it is served again."""
    real, last = Call.send, answer(MessageKind.RESPONSE_BODY)

    def send(call: Call, message: bytes) -> None:
        real(call, message)
        task = asyncio.current_task()
        if message == last and task is not None:
            task.cancel()

    monkeypatch.setattr(Call, "send", send)
    async with picking() as (gateway, client, _):
        envoy = Envoy(client, BodyMode.BUFFERED)
        await envoy.pick({**CHAT, "stream": False})
        await envoy.ask(response_headers=headers({":status": "200"}))
        await envoy.ask(response_body=HttpBody(body=json.dumps(WHOLE).encode(), end_of_stream=True))
        await eventually(lambda: gateway.recorder.live == 0)
        (record,) = gateway.recorder.recent
        assert (record.end, record.answer.output_tokens) == (RequestOutcome.COMPLETED, 3)
