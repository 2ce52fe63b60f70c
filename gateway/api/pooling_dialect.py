"""Operations without generated text: embeddings, rerank, score, tokenize. Bodies pass through to pools that serve
them; the gateway reads the model and the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from backends.interface import Operation
from gateway.api.api_error import bad_request
from gateway.api.openai_shapes import MessageShape
from gateway.api.parsed_body import Parameters, ParsedBody, checked, decode_object
from gateway.tokenize.prompt import prompt_of

_TEXTS = ("input", "query", "documents", "text_1", "text_2", "queries", "prompt")  # members rendered into prompts


class _Pooling(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: list[MessageShape] | None = None


class _Embeddings(_Pooling):
    input: str | list[Any] | None = None


class _Rerank(_Pooling, kw_only=True):
    query: str | dict[str, Any]
    documents: list[Any]


_SHAPES: Mapping[Operation, type[_Pooling]] = {Operation.EMBEDDINGS: _Embeddings, Operation.RERANK: _Rerank}


def read(operation: Operation, raw: bytes) -> ParsedBody:
    """Raises ApiError (400)."""
    body = decode_object(raw)
    valid = checked(body, _SHAPES.get(operation, _Pooling))
    if isinstance(valid, _Embeddings) and not valid.input and not valid.messages:
        raise bad_request("'input' is required and must not be empty.", "input")
    texts = [text for name in _TEXTS for text in _strings(body.get(name))]
    ids = body.get("input")
    if not texts and isinstance(ids, list) and all(_is_ids(each) for each in ids):
        texts = ids
    if valid.messages:
        prompt = prompt_of(Operation.CHAT, {"messages": body["messages"]})
    else:
        prompt = prompt_of(Operation.COMPLETION, {"prompt": texts or ""})
    parameters = Parameters(
        model=valid.model, stream=False, wants_usage=True, max_tokens=1, tools=False, json_schema=False
    )
    return ParsedBody(members=body, prompt=prompt, parameters=parameters)


def _is_ids(value: Any) -> bool:
    """A token, or the tokens of a text."""
    return isinstance(value, int) or (isinstance(value, list) and all(isinstance(each, int) for each in value))


def _strings(value: Any) -> Iterator[str]:
    """All texts of a member: a text, a list of texts, or of objects with a text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        yield from _strings(value.get("text") or value.get("content"))
