"""What is kept of sockets is bounded, and no caller's chains displace another's."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.api.api_error import ApiError
from gateway.parts.responses.answer_frames import LastResponse, error_message
from gateway.parts.responses.kept_turns import KeptTurn, KeptTurns
from gateway.parts.responses.socket_turn import read_turn


def turn(size: int, name: str = "resp_1") -> KeptTurn:
    return KeptTurn(name, b"x" * size, frozenset())


def test_the_caller_with_the_most_bytes_loses_its_oldest_turn() -> None:
    kept = KeptTurns(max_bytes=100)
    kept.put("small", 1, turn(30))
    for socket in range(2, 50):
        kept.put("large", socket, turn(30))
    assert kept.get("small", 1) is not None
    assert [socket for socket in range(2, 50) if kept.get("large", socket)] == [48, 49]
    assert kept.size == 90


def test_a_socket_has_its_latest_turn_alone() -> None:
    kept = KeptTurns(max_bytes=100)
    kept.put("ann", 1, turn(30, "resp_1"))
    kept.put("ann", 1, turn(40, "resp_2"))
    assert (kept.get("ann", 1), kept.get("bob", 1), kept.size) == (turn(40, "resp_2"), None, 40)
    kept.drop("ann", 1)
    kept.drop("ann", 1)
    assert (kept.get("ann", 1), kept.size) == (None, 0)


def test_a_turn_above_the_bound_is_not_kept() -> None:
    kept = KeptTurns(max_bytes=100)
    kept.put("ann", 1, turn(101))
    assert (kept.get("ann", 1), kept.size) == (None, 0)


CALL = b'{"type":"function_call","call_id":"c1","name":"f","arguments":"{}"}'


def test_an_output_is_taken_if_any_item_of_the_chain_has_made_its_call() -> None:
    message = {"type": "response.create", "previous_response_id": "resp_1", "store": False}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    asked = json.dumps({**message, "input": [output]}).encode()
    with pytest.raises(ApiError, match="call_id c1"):
        read_turn(asked, KeptTurn("resp_1", b"{}", frozenset()))
    body = json.loads(read_turn(asked, KeptTurn("resp_1", CALL, frozenset({"c1"}))).body)
    assert body == {"store": False, "stream": True, "input": [json.loads(CALL), output]}


@pytest.mark.parametrize(
    ("stores", "stored", "keeps"), [(True, True, False), (True, False, True), (False, True, True), (False, None, True)]
)
def test_what_a_backend_stores_is_not_kept(stores: bool, stored: bool | None, keeps: bool) -> None:
    asked = read_turn(json.dumps({"type": "response.create", "input": "hi", "store": stores}).encode(), None)
    unshown = msgspec.Raw(b'{"type":"reasoning","id":"rs_1","summary":[]}')
    found = asked.kept(LastResponse("resp_1", "completed", stored, [unshown, msgspec.Raw(CALL)]))
    assert (found is not None) is keeps
    if found is not None:
        assert found.call_ids == {"c1"}
        assert [each["type"] for each in json.loads(b"[%b]" % found.items)] == ["message", "function_call"]
    assert asked.kept(LastResponse("resp_1", "failed", stored, [])) is None


def test_an_error_has_a_code_and_a_status() -> None:
    event = json.loads(error_message(502, {"message": "no", "type": "server_error", "code": None}))
    assert event == {
        "type": "error",
        "status": 502,
        "error": {"message": "no", "type": "server_error", "code": "server_error"},
        "headers": {},
    }
