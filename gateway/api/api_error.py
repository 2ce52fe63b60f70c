"""Error replies in OpenAI's envelope. An `ApiError` names the party at fault and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus

from gateway.strict_json import encode

REASONS = {status.value: status.phrase for status in HTTPStatus} | {529: "Overloaded"}  # the latter: Anthropic's


@dataclass(eq=False)
class ApiError(Exception):
    """An error reply. `type`, `code` and `param` are OpenAI's; `close` ends the connection after the reply."""

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False
    own_fault: bool = False  # the caller's, whatever the status
    logged: str = ""  # for Records: never the words of a caller or a backend; empty: the message

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.headers = dict(self.headers)
        self.logged = self.logged or self.message

    def body(self) -> bytes:
        """The OpenAI error envelope."""
        return encode(envelope(self.message, self.type, self.code, self.param))


def envelope(message: str, type: str, code: str | None, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def retry_later(seconds: float) -> dict[str, str]:
    """Headers honoured by the OpenAI and Anthropic SDKs; seconds are rounded up, so no client retries early."""
    millis = max(1, round(seconds * 1000))
    return {"retry-after": str(-(-millis // 1000)), "retry-after-ms": str(millis)}


def bad_request(message: str, param: str | None = None, code: str | None = None, logged: str = "") -> ApiError:
    return ApiError(400, message, param=param, code=code, logged=logged)


def stopped() -> ApiError:
    """The reply at shutdown: another gateway may serve the request at once."""
    message = "The gateway is being stopped; try again."
    return ApiError(503, message, type="server_error", code="unavailable", headers=retry_later(1.0), close=True)


def internal(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"The gateway failed on this request (id {request_id}); the fault is ours.",
        type="server_error",
        close=True,
    )
