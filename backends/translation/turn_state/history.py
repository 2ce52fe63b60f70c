"""Provider state of turns in a request's history, opened for the pool that gets the request.

Rules:
- State of the pool's own maker returns bit for bit: in the maker's dialect, or for a later translation as the member
  STATE of the block or item that held the seal.
- State of another maker is left out and noted: other accounts and models do not accept such state. Reasoning text stays
  if the pool's servers accept reasoning as text.
- The gateway seals nothing in answers relayed unchanged. `Recall` remembers the maker of their signatures; signatures
  of an unknown maker are kept.
- Ids of calls become the original server's ids, in characters that every server accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.translation import Json
from backends.translation.turn_state.call_ids import plain_id
from backends.translation.turn_state.seals import Opened, Opener, is_seal

STATE = "firsttoken_state"  # member of a block or item on its way to a translation
Recall = Callable[[str], str]  # the maker of a signature or cipher that no seal names; empty: not known
Block = Mapping[str, Any]


def unknown(_: str) -> str:
    return ""


class TurnHistory:
    """Opens histories of requests for one pool. `maker`: of the pool's turns. `is_native`: the servers speak the
    caller's dialect. `recall`: finds makers of unsealed signatures."""

    def __init__(self, maker: str, operation: Operation, is_native: bool, recall: Recall = unknown) -> None:
        self._maker, self._recall = maker, recall
        self._read = _READERS.get(operation)
        self._is_native = is_native
        self._seals = Opener()

    def opened(self, body: Json, dropped: Omissions) -> Json:
        """A copy of the body with the pool's own state, and without state of other makers."""
        self._seals = Opener()
        return body if self._read is None else self._read(self, body, dropped)

    # -- Messages ------------------------------------------------------------------------

    def messages(self, body: Json, dropped: Omissions) -> Json:
        turns = [self._message(turn, dropped) for turn in body["messages"]]
        return {**body, "messages": [turn for turn in turns if turn is not None]}

    def _message(self, turn: Any, dropped: Omissions) -> Any:
        """A turn; None: nothing is left of it."""
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(content, list):
            return turn
        blocks = [found for block in content if (found := self._block(block, dropped)) is not None]
        return None if content and not blocks else {**turn, "content": blocks}

    def _block(self, block: Any, dropped: Omissions) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            return self._thinking(block, "signature", dropped)
        if kind == "redacted_thinking":
            return self._thinking(block, "data", dropped)
        if kind in ("tool_use", "tool_result"):
            member, is_result = ("tool_use_id", True) if kind == "tool_result" else ("id", False)
            return self._call(block, member, f"messages.content.{kind}", dropped, is_result=is_result)
        return block

    def _thinking(self, block: Json, member: str, dropped: Omissions) -> Any:
        found = self._found(block.get(member))
        if found is None:
            return block
        if found.maker == self._maker and isinstance(found.state, dict) and not self._is_native:
            return {**block, member: "", STATE: found.state}
        if found.maker == self._maker and isinstance(found.state, str):
            return {**block, member: found.state}
        has_text = member == "signature" and bool(block.get("thinking")) and not self._is_native
        dropped.leave_out(f"messages.content.{block['type']}{'.signature' * has_text}")
        return {**block, member: ""} if has_text else None

    # -- chat ----------------------------------------------------------------------------

    def chat(self, body: Json, dropped: Omissions) -> Json:
        return {**body, "messages": [self._chat_turn(turn, dropped) for turn in body["messages"]]}

    def _chat_turn(self, turn: Any, dropped: Omissions) -> Any:
        if not isinstance(turn, dict):
            return turn
        found = self._call(turn, "tool_call_id", "messages", dropped, is_result=True)
        if isinstance(calls := turn.get("tool_calls"), list):
            found["tool_calls"] = [
                without_state(self._call(each, "id", "messages.tool_calls", dropped)) for each in calls
            ]
        if isinstance(details := turn.get("reasoning_details"), list):
            kept = [each for detail in details if (each := self._detail(detail, dropped)) is not None]
            found["reasoning_details"] = kept
            if not kept:
                del found["reasoning_details"]
        return found

    def _detail(self, detail: Any, dropped: Omissions) -> Any:
        if not isinstance(detail, dict):
            return detail
        for member in ("signature", "data"):
            if (found := self._found(detail.get(member))) is None:
                continue
            is_form = not self._is_native or isinstance(found.state, str)
            if found.maker != self._maker or not is_form:
                dropped.leave_out("messages.reasoning_details")
                return None
            return {**detail, member: found.state}
        if not self._is_native and (detail.get("signature") or detail.get("data")):
            dropped.leave_out("messages.reasoning_details")  # a chat server's own: a translated answer has sealed ones
            return None
        return detail

    # -- Responses -----------------------------------------------------------------------

    def responses(self, body: Json, dropped: Omissions) -> Json:
        items = body.get("input")
        if not isinstance(items, list):
            return body
        found = [each for item in items if (each := self._item(item, dropped)) is not None]
        return {**body, "input": found}

    def _item(self, item: Any, dropped: Omissions) -> Any:
        if not isinstance(item, dict):
            return item
        if "encrypted_content" in item:
            return self._encrypted(item, dropped)
        if "call_id" not in item:
            return item
        return self._call(item, "call_id", "input", dropped, is_result=str(item.get("type")).endswith("_output"))

    def _encrypted(self, item: Json, dropped: Omissions) -> Json | None:
        found, kind = self._seals.opened(item["encrypted_content"]), str(item.get("type"))
        rest = {name: value for name, value in item.items() if name != "encrypted_content"}
        if found is not None and found.maker == self._maker:
            if isinstance(found.state, str):
                return {**rest, "encrypted_content": found.state}
            if not self._is_native:
                return {**rest, STATE: found.state}
        elif found is None and self._is_native and not is_seal(item["encrypted_content"]):
            return item
        dropped.leave_out(f"input.{kind if kind == 'compaction' else 'reasoning'}.encrypted_content")
        has_text = bool(item.get("content") or item.get("summary"))
        return rest if has_text and not self._is_native else None

    # -- all -----------------------------------------------------------------------------

    def _found(self, value: Any) -> Opened | None:
        """Maker and state of a value, by seal or by `recall`; None: the pool's own value, or unknown."""
        if (found := self._seals.opened(value)) is not None:
            return found
        if not isinstance(value, str) or not value:
            return None
        if is_seal(value):  # damaged
            return Opened("", None)
        maker = self._recall(value)
        return Opened(maker, value) if maker and maker != self._maker else None

    def _call(self, call: Any, member: str, place: str, dropped: Omissions, *, is_result: bool = False) -> Any:
        """Restore the server's id in a call or result, and the state in a call."""
        if not isinstance(call, dict):
            return call
        found = self._seals.opened(call.get(member))
        if found is None or not isinstance(found.state, dict):
            return dict(call)
        own, state = found.state.get("id"), None if is_result else found.state.get("state")
        if found.maker == self._maker and not self._is_native:
            return {**call, member: own, **({STATE: state} if state else {})}
        if state:
            dropped.leave_out(f"{place}.state")
        return {**call, member: plain_id(own)}


def without_state(call: Any) -> Any:
    """Restore provider state in a chat's tool call from STATE to its original members."""
    if not isinstance(call, dict) or (state := call.pop(STATE, None)) is None:
        return call
    function = call.get("function")
    named = {"function": {**function, **state.get("function", {})}} if isinstance(function, dict) else {}
    return {**call, **named, **state.get("call", {})}


_READERS: Mapping[Operation, Callable[[TurnHistory, Json, Omissions], Json]] = {
    Operation.MESSAGES: TurnHistory.messages,
    Operation.COUNT_TOKENS: TurnHistory.messages,
    Operation.CHAT: TurnHistory.chat,
    Operation.RESPONSES: TurnHistory.responses,
    Operation.INPUT_TOKENS: TurnHistory.responses,
    Operation.COMPACT: TurnHistory.responses,
}
