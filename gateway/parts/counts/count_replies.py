"""The gateway's own count of a prompt's tokens, where no pool counts tokens in the caller's dialect, or none takes a
prompt of this length: an agent asks how much it has to leave out."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from backends.interface import TOKEN_COUNTS, Operation
from gateway.api.api_error import bad_request
from gateway.api.inference_request import InferenceRequest
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.downstream.answer_headers import gateway_headers
from gateway.strict_json import encode
from policies.types import Decision, PromptEstimate, RejectionKind

_MEMBERS: Mapping[Operation, Mapping[str, str]] = {  # of a reply, beside the count
    Operation.COUNT_TOKENS: {},
    Operation.INPUT_TOKENS: {"object": "response.input_tokens"},
}


class CountReplies(Part):
    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(answer=self.answer, unplaced=self.unplaced) if plan.operation in TOKEN_COUNTS else NO_HOOKS

    async def answer(self, ask: Ask) -> bool:
        if not all(pool in ask.request.unfit for pool in ask.route.pools):
            return False
        reply(ask)
        return True

    def unplaced(self, ask: Ask, decision: Decision) -> bool:
        if decision.cause is not RejectionKind.CONTEXT_WINDOW:
            return False
        reply(ask)
        return True


def reply(ask: Ask) -> None:
    body = count_reply(ask.request, ask.estimate)
    ask.http.respond(200, body, gateway_headers(ask.timeline, monotonic()))
    ask.timeline.replied(200, monotonic())


def count_reply(request: InferenceRequest, estimate: PromptEstimate) -> bytes:
    """A reply with the largest count of all pools. Raises ApiError (400) where a backend keeps part of the prompt."""
    if request.pinned:
        message = "The request refers to state that a backend keeps and the gateway cannot count: send the whole input."
        raise bad_request(message, "previous_response_id")
    tokens = max(each.tokens for each in estimate.pools.values())
    return encode({**_MEMBERS[request.operation], "input_tokens": tokens})
