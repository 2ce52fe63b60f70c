"""Requests that fail in forty ways, with canaries in all sent and received parts (see test_secrets.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gateway.observe.record import RequestOutcome
from tests.support.builders import post
from tests.support.canaries import ANSWER, BACKEND, CALLER, HEADER, HEADERS, OWN, PROMPT, TOOL, UNKNOWN, canary_request
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Script, chunk, reply

TOKEN = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{ANSWER}"}}}}]}}\n\n'.encode()
DONE = b"data: [DONE]\n\n"
BEGUN = STREAM_HEAD + chunk(TOKEN)
ECHO = f"you sent {PROMPT} {TOOL} with {HEADER} and our key {BACKEND}"
LEAKY = f"x-leak: {ECHO}"
JSON = "content-type: application/json"


def error(status: str, message: str = ECHO, **more: Any) -> Script:
    body = {"error": {"message": message, "type": "invalid_request_error", **more}}
    return [reply(json.dumps(body).encode(), status, JSON, LEAKY)]


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


@dataclass
class FailureCase:
    """A failing request. `status` of the reply, None without a reply; `end` of the Record, if any."""

    status: int | None
    end: RequestOutcome | None
    script: Script = ()
    raw: bytes = field(default_factory=canary_request)
    config: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = OWN


STREAM = canary_request(stream=True)
SOON = {"defaults": {"first_token": "100ms", "stream_idle": "100ms", "max_attempts": 1}}
SMALL = {"defaults": {"max_body": "1KB"}}
REFUSED, FAILED, BROKE, COMPLETED = (
    RequestOutcome.REFUSED,
    RequestOutcome.FAILED,
    RequestOutcome.UPSTREAM_BROKE,
    RequestOutcome.COMPLETED,
)
QUERY = canary_request().replace(b"/completions ", f"/completions?api_key={CALLER}&q={PROMPT} ".encode(), 1)
WRONG = (f"authorization: Bearer {UNKNOWN}", *HEADERS[1:])

PATHS = {
    # the request's fault
    "bad JSON": FailureCase(400, REFUSED, raw=post(f'{{"model":"chat","messages":["{PROMPT}"'.encode(), *HEADERS)),
    "a field given twice": FailureCase(400, REFUSED, raw=post(f'{{"{PROMPT}":1,"{PROMPT}":2}}'.encode(), *HEADERS)),
    "a field of the wrong type": FailureCase(400, REFUSED, raw=canary_request(messages=PROMPT)),
    "an unknown key": FailureCase(401, REFUSED, raw=canary_request(WRONG)),
    "a key of another scheme": FailureCase(
        401, REFUSED, raw=canary_request((f"authorization: Basic {CALLER}", *HEADERS[1:]))
    ),
    "the key in the query": FailureCase(200, COMPLETED, [reply(b"{}", "200 OK", JSON)], QUERY),
    "the key in the path": FailureCase(
        404, None, raw=canary_request().replace(b"/v1/chat", f"/v1/{CALLER}".encode(), 1)
    ),
    "an unknown model": FailureCase(404, REFUSED, raw=canary_request(model=f"{PROMPT}-{CALLER}"), own=(*OWN, CALLER)),
    "a body that is too large": FailureCase(413, REFUSED, raw=canary_request(more=PROMPT * 100), config=SMALL),
    "a compressed body": FailureCase(415, REFUSED, raw=canary_request((*HEADERS, "content-encoding: gzip"))),
    "a header that is no number": FailureCase(400, REFUSED, raw=canary_request((*HEADERS, f"x-priority: {HEADER}"))),
    "a budget that is none": FailureCase(400, REFUSED, raw=canary_request((*HEADERS, f"x-slo-ttft-ms: {HEADER}"))),
    "no HTTP": FailureCase(400, None, raw=f"{PROMPT} {CALLER}\r\n{HEADER}\r\n\r\n".encode()),
    "a head that is too large": FailureCase(431, None, raw=canary_request((*HEADERS, f"x-more: {PROMPT * 40_000}"))),
    # the backend's fault
    "401 with our key": FailureCase(502, FAILED, error("401 Unauthorized", f"Incorrect API key provided: {BACKEND}")),
    "403 with our key": FailureCase(502, FAILED, error("403 Forbidden")),
    "400 with the prompt": FailureCase(400, REFUSED, error("400 Bad Request")),
    "400 with the prompt as a code": FailureCase(400, REFUSED, error("400 Bad Request", code=PROMPT, param=BACKEND)),
    "500 with the prompt": FailureCase(502, FAILED, error("500 Internal Server Error")),
    "429 with the prompt": FailureCase(429, FAILED, error("429 Too Many Requests")),
    "503 as a page": FailureCase(503, FAILED, [reply(f"<html>{ECHO}".encode(), "503 Service Unavailable", LEAKY)]),
    "a context overflow": FailureCase(
        400, REFUSED, error("400 Bad Request", f"This model's maximum context length is 8 tokens: {PROMPT}")
    ),
    "a content policy": FailureCase(400, REFUSED, error("400 Bad Request", code="content_policy_violation")),
    "a redirect": FailureCase(
        502, FAILED, [reply(b"", "301 Moved Permanently", f"location: http://{PROMPT}.example/")]
    ),
    "garbage in place of HTTP": FailureCase(502, FAILED, [f"{ECHO}\r\n\r\n".encode(), CLOSE]),
    "garbage in a header": FailureCase(502, FAILED, [f"HTTP/1.1 200 OK\r\n{ECHO}\r\n\r\n".encode(), CLOSE]),
    "garbage in place of JSON": FailureCase(502, FAILED, [reply(f"{{{ECHO}".encode(), "200 OK", JSON)]),
    "an error in place of an answer": FailureCase(
        502, FAILED, [reply(json.dumps({"error": {"message": ECHO}}).encode(), "200 OK", JSON)]
    ),
    "a reset before the head": FailureCase(502, FAILED, [RESET]),
    "a reset in the head": FailureCase(502, FAILED, [f"HTTP/1.1 200 OK\r\n{LEAKY}\r\nx-mo".encode(), RESET]),
    "a reset in the stream": FailureCase(200, BROKE, [STREAM_HEAD + chunk(TOKEN), RESET], STREAM),
    "an error before the first token": FailureCase(
        502, FAILED, [STREAM_HEAD + chunk(event(json.dumps({"error": {"message": ECHO}}))) + LAST_CHUNK], STREAM
    ),
    "an error in the stream": FailureCase(
        200, BROKE, [BEGUN, chunk(event(json.dumps({"error": {"message": ECHO}}))), CLOSE], STREAM
    ),
    "an error with the first token": FailureCase(
        200, BROKE, [STREAM_HEAD + chunk(TOKEN + event(json.dumps({"error": {"message": ECHO}}))), CLOSE], STREAM
    ),
    "garbage in the stream": FailureCase(200, BROKE, [BEGUN, chunk(event(f"{{{ECHO}")), CLOSE], STREAM),
    "an end without [DONE]": FailureCase(200, BROKE, [STREAM_HEAD + chunk(TOKEN) + LAST_CHUNK], STREAM),
    "silence before the first token": FailureCase(504, FAILED, [HANG], STREAM, SOON),
    "silence in the stream": FailureCase(200, BROKE, [STREAM_HEAD + chunk(TOKEN), HANG], STREAM, SOON),
    # no fault
    "shed": FailureCase(
        429,
        RequestOutcome.SHED,
        raw=canary_request((*HEADERS, "x-slo-ttft-ms: 0.001"), stream=True),
        config={"routes": {"chat": {"tiers": ["only"], "ttft": {"budget": "1s"}, "on_miss": "shed"}}},
    ),
}
