"""The gateway's own count of a prompt's tokens, for callers of a route without a pool that counts them."""

from __future__ import annotations

from collections.abc import Mapping

from backends.interface import Operation
from gateway.api.api_error import bad_request
from gateway.api.inference_request import InferenceRequest
from gateway.strict_json import encode
from policies.types import PromptEstimate

_MEMBERS: Mapping[Operation, Mapping[str, str]] = {  # of a reply, beside the count
    Operation.COUNT_TOKENS: {},
    Operation.INPUT_TOKENS: {"object": "response.input_tokens"},
}
COUNTS = frozenset(_MEMBERS)


def count_reply(request: InferenceRequest, estimate: PromptEstimate) -> bytes:
    """A reply with the largest count of all pools. Raises ApiError (400) where a backend keeps part of the prompt."""
    if request.pinned:
        message = "The request refers to state that a backend keeps and the gateway cannot count: send the whole input."
        raise bad_request(message, "previous_response_id")
    tokens = max(each.tokens for each in estimate.pools.values())
    return encode({**_MEMBERS[request.operation], "input_tokens": tokens})
