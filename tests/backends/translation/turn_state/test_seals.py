"""Seals of a hostile caller: what is opened is bounded as a body is."""

from __future__ import annotations

import tracemalloc
from base64 import urlsafe_b64encode
from typing import Any

import pytest

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.translation import AnswerContext
from backends.translation.turn_state import seals
from backends.translation.turn_state.call_ids import CallIds
from backends.translation.turn_state.history import TurnHistory
from backends.translation.turn_state.seals import MARK, Opener, id_of_call, sealed

MAKER = "0" * 12
MANY = b'{"id":"c","state":[' + b"[]," * 400_000 + b"1]}"


def forged(written: bytes) -> str:
    return MARK + MAKER + urlsafe_b64encode(written).rstrip(b"=").decode()


def history(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


def test_millions_of_values_in_a_seal_are_not_decoded() -> None:
    """Neither on the way of the request, nor where the answer is translated: 1.6 MB that would be 25 MB."""
    body = history(forged(MANY))
    tracemalloc.start()
    TurnHistory(MAKER, Operation.CHAT, is_native=False).opened(body, Omissions(frozenset()))
    CallIds(body, AnswerContext(MAKER)).given("call_1")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 << 20


def test_many_seals_hold_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "MOST_ELEMENTS", 10)
    state = {"id": "c", "state": {"call": {"x": "y"}}}
    assert Opener().opened(sealed(MAKER, state)) is not None
    written = history(*[sealed(MAKER, state)] * 3)
    found = TurnHistory(MAKER, Operation.CHAT, is_native=False).opened(written, Omissions(frozenset()))
    assert [call["id"].startswith(MARK) for call in found["messages"][0]["tool_calls"]] == [False, False, True]


@pytest.mark.parametrize("state", [{"id": 7}, {"id": None}, {}, [], None, "x", {"id": {"id": "c"}}])
def test_a_seal_without_an_id_has_none(state: Any) -> None:
    assert id_of_call(sealed(MAKER, state)) == ""


def test_the_id_in_a_seal_is_known_without_its_state() -> None:
    assert id_of_call(sealed(MAKER, {"id": "call_1", "state": {"call": {"x": [1]}}})) == "call_1"
    assert CallIds(history(sealed(MAKER, {"id": "call_1"})), AnswerContext(MAKER)).given("call_1") != "call_1"
