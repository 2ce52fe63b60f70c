"""A server that speaks OpenAI's Responses natively and keeps the responses that it gave, as vLLM's and OpenAI's do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

Json = dict[str, Any]
JSON = "content-type: application/json"
ENCRYPTED = "gAAAAAB-sealed-by-"  # its encrypted reasoning
USAGE: Json = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 13,
}
MEMBERS: Json = {  # of every response
    "object": "response",
    "created_at": 1,
    "completed_at": 2,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "reasoning": {"effort": None, "summary": None},
    "max_output_tokens": None,
    "max_tool_calls": None,
    "background": False,
    "service_tier": "default",
    "safety_identifier": None,
    "prompt_cache_key": None,
    "usage": USAGE,
}


class ResponsesServer(Upstream):
    """`stored`: the whole input that led to each response, by the server's own id. Knows no state of other servers.

    `text`: of all answers; empty: the number of the turn. `gated`: streams wait for `proceed()` before their first
    token. `failing`: streams fail after it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.stored: dict[str, list[Any]] = {}
        self.cancelled: list[str] = []
        self.text = ""
        self.kept_text = "kept"  # of stored responses
        self.gated = self.failing = False

    @property
    def asked(self) -> list[Json]:
        """Bodies of the requests for a response."""
        return [json.loads(each.body) for each in self.requests if each.target == "/v1/responses"]

    def script(self, received: Received) -> Script:
        path = urlsplit(received.target).path
        if received.method == "POST" and path == "/v1/responses":
            return self._created(json.loads(received.body))
        if path == "/v1/responses/compact":
            return [self._compacted(json.loads(received.body))]
        if path == "/v1/responses/input_tokens":
            return [reply(b'{"object":"response.input_tokens","input_tokens":14}', "200 OK", JSON)]
        if path.startswith("/v1/responses/"):
            return [self._kept(received.method, *path.split("/")[3:])]
        return [reply()]  # probes

    def _created(self, body: Json) -> Script:
        before = body.get("previous_response_id")
        if before is not None and before not in self.stored:
            return [missing(before)]
        items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        contents = [item["encrypted_content"] for item in items if item.get("encrypted_content")]
        if any(content != ENCRYPTED + self.name for content in contents):
            return [error(400, "invalid_encrypted_content", "The encrypted content could not be verified.")]
        history = [*self.stored.get(before or "", []), *items]
        number = f"resp_{self.name}{len(self.stored)}"
        self.stored[number] = history
        response = self._response(number, body, self.text or f"turn {len(history)} of {self.name}")
        return (
            self._streamed(response) if body.get("stream") else [reply(json.dumps(response).encode(), "200 OK", JSON)]
        )

    def _streamed(self, response: Json) -> Script:
        told = events(response)
        if self.failing:
            told[-4:] = [failed(response)]
        begun = STREAM_HEAD + b"".join(map(chunk, told[:6]))
        return [begun, *([GATE] if self.gated else []), b"".join(map(chunk, told[6:])) + LAST_CHUNK]

    def _response(self, number: str, body: Json, text: str) -> Json:
        reasoning = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": ENCRYPTED + self.name}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        return {
            **MEMBERS,
            "id": number,
            "model": body["model"],
            "instructions": body.get("instructions"),
            "output": [reasoning, message],
            "previous_response_id": body.get("previous_response_id"),
            "store": body.get("store", True),
        }

    def _compacted(self, body: Json) -> bytes:
        item = {"id": "cmp_1", "type": "compaction", "encrypted_content": ENCRYPTED + self.name}
        found = {"id": "resp_c", "object": "response.compaction", "created_at": 1, "output": [item], "usage": USAGE}
        return reply(json.dumps(found).encode(), "200 OK", JSON)

    def _kept(self, method: str, number: str, action: str = "") -> bytes:
        if number not in self.stored:
            return missing(number)
        found: Mapping[str, Any] = self._response(number, {"model": "served"}, self.kept_text)
        if method == "DELETE":
            del self.stored[number]
            found = {"id": number, "object": "response.deleted", "deleted": True}
        elif action == "input_items":
            found = {"object": "list", "data": self.stored[number], "first_id": "a", "last_id": "b", "has_more": False}
        elif action == "cancel":
            self.cancelled.append(number)
            found = {**found, "status": "cancelled"}
        return reply(json.dumps(found).encode(), "200 OK", JSON)


def missing(number: str) -> bytes:
    """As vLLM 0.32 says it."""
    return error(404, 404, f"Response with id '{number}' not found.", "response_id")


def failed(response: Json) -> bytes:
    told = {"code": "server_error", "message": "out of memory"}
    event = {"type": "response.failed", "response": {**response, "status": "failed", "error": told}}
    return f"event: response.failed\ndata: {json.dumps({**event, 'sequence_number': 9})}\n\n".encode()


def error(status: int, code: str | int, message: str, param: str | None = None) -> bytes:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
    return reply(json.dumps(body).encode(), f"{status} No", JSON)


def events(response: Json) -> list[bytes]:
    """The events of a response, in the order in which OpenAI sends them."""
    reasoning, message = response["output"]
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    place = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    part = message["content"][0]
    texts = part["text"].split(" ")
    deltas = [text if number == 0 else f" {text}" for number, text in enumerate(texts)]
    told: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**reasoning, "encrypted_content": None}},
        {"type": "response.output_item.done", "output_index": 0, "item": reasoning},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **place, "delta": delta, "logprobs": []} for delta in deltas),
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 1, "item": message},
        {"type": "response.completed", "response": response},
    ]
    return [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
        for number, event in enumerate(told)
    ]
