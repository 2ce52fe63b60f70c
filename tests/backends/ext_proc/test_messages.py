"""Messages of ext_proc agree with Envoy's own definitions, and no input breaks the reader."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.ext_proc.messages import (
    PIECE,
    BodyMode,
    MessageKind,
    Mutation,
    answer,
    body_answers,
    decode,
    immediate,
    more_time,
)
from backends.ext_proc.protobuf import MAX_FIELDS, FieldReader, number, sized
from tests.support.ext_proc import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

KEY = "x-gateway-destination-endpoint"


def headers(**values: str) -> HttpHeaders:
    pairs = [HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()) for name, value in values.items()]
    return HttpHeaders(headers=HeaderMap(headers=pairs), end_of_stream=True)


def test_headers_and_modes_of_the_first_message_are_read() -> None:
    sent = ProcessingRequest(request_headers=headers(x_one="1", content_type="application/json"))
    sent.protocol_config.CopyFrom(
        ProtocolConfiguration(request_body_mode="FULL_DUPLEX_STREAMED", response_body_mode="STREAMED")
    )
    found = decode(sent.SerializeToString())
    assert found.kind is MessageKind.REQUEST_HEADERS
    assert found.headers == {"x-one": "1", "content-type": "application/json"}
    assert (found.end_of_stream, found.modes) == (True, (BodyMode.FULL_DUPLEX, BodyMode.STREAMED))


SIZES = st.sampled_from((1, 2, 100, 121, 122, 123, 127, 128, 300))


@given(st.lists(st.tuples(SIZES, st.one_of(st.just(0), SIZES), st.booleans()), max_size=120))
def test_headers_of_any_length_and_form_are_read(sizes: list[tuple[int, int, bool]]) -> None:
    """Short ones in one pass, others field by field, in any order, and more than are usual."""
    pairs = [(f"{'k' * size}-{at}", b"v" * value, raw) for at, (size, value, raw) in enumerate(sizes)]
    sent = [
        HeaderValue(key=key, raw_value=value) if raw else HeaderValue(key=key, value=value) for key, value, raw in pairs
    ]
    message = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=sent)))
    assert decode(message.SerializeToString()).headers == {key: value.decode() for key, value, _ in pairs}


@pytest.mark.parametrize("kind", [MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY])
def test_a_body_is_read(kind: MessageKind) -> None:
    sent = ProcessingRequest(**{kind.name.lower(): HttpBody(body=b"\x00{}" * 50_000, end_of_stream=True)})
    found = decode(sent.SerializeToString())
    assert (found.kind, found.body, found.end_of_stream) == (kind, b"\x00{}" * 50_000, True)


def test_what_served_is_read_from_metadata_and_attributes() -> None:
    """A list as text with commas: both forms of a subset are in use."""
    sent = ProcessingRequest(response_headers=headers(_status="200"))
    sent.metadata_context.filter_metadata["envoy.lb"].update({f"{KEY}-served": "10.0.0.1:8000"})
    sent.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({f"{KEY}-subset": ["10.0.0.1", "10.0.0.2"]})
    sent.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.1:8000"})
    found = decode(sent.SerializeToString())
    assert found.metadata == {
        "envoy.lb": {f"{KEY}-served": "10.0.0.1:8000"},
        "envoy.lb.subset_hint": {f"{KEY}-subset": "10.0.0.1,10.0.0.2"},
    }
    assert found.attributes == {"upstream.address": "10.0.0.1:8000"}


def parsed(data: bytes) -> ProcessingResponse:
    found = ProcessingResponse()
    found.ParseFromString(data)
    return found


def test_a_choice_is_a_header_and_metadata() -> None:
    """The caller's own value is replaced, and control headers do not reach the engine."""
    chosen = Mutation({KEY: "10.0.0.1:8000"}, ["x-llm-d-slo-ttft-ms"], {"envoy.lb": {KEY: "10.0.0.1:8000"}})
    for kind in (MessageKind.REQUEST_HEADERS, MessageKind.REQUEST_BODY):
        found = parsed(answer(kind, chosen))
        common = getattr(found, kind.name.lower()).response
        (option,) = common.header_mutation.set_headers
        assert (option.header.key, option.header.raw_value, option.append_action) == (KEY, b"10.0.0.1:8000", 2)
        assert list(common.header_mutation.remove_headers) == ["x-llm-d-slo-ttft-ms"]
        assert common.clear_route_cache
        assert found.dynamic_metadata["envoy.lb"][KEY] == "10.0.0.1:8000"


@pytest.mark.parametrize("kind", list(MessageKind))
def test_an_answer_without_a_change_is_empty(kind: MessageKind) -> None:
    found = parsed(answer(kind))
    assert found.WhichOneof("response") == kind.name.lower()
    assert not found.HasField("dynamic_metadata")


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_body_goes_back_in_pieces(size: int) -> None:
    """Whole, none longer than data planes take; the end is told by the last one."""
    found = [parsed(each).request_body.response for each in body_answers(MessageKind.REQUEST_BODY, b"x" * size, True)]
    pieces = [each.body_mutation.streamed_response for each in found]
    assert b"".join(piece.body for piece in pieces) == b"x" * size
    assert max(len(piece.body) for piece in pieces) <= PIECE
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_refusal_is_an_immediate_response() -> None:
    found = parsed(immediate(503, {"retry-after": "2"}, b"{}", "shed")).immediate_response
    assert (found.status.code, found.body, found.details) == (503, b"{}", "shed")
    assert [(each.header.key, each.header.raw_value) for each in found.headers.set_headers] == [("retry-after", b"2")]


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    """A value or ValueError, whatever a hostile peer sends."""
    with suppress(ValueError):
        decode(data)


def test_a_list_of_lists_without_end_is_no_recursion() -> None:
    value = b""
    for _ in range(5000):
        value = sized(6, sized(1, value))
    struct = sized(1, sized(1, b"key") + sized(2, value))
    assert decode(sized(8, sized(1, sized(1, b"envoy.lb") + sized(2, struct)))).metadata == {"envoy.lb": {"key": ""}}


@pytest.mark.parametrize(
    "message",
    [
        number(99, 1) * (MAX_FIELDS + 1),
        sized(2, sized(1, sized(1, b"") * (MAX_FIELDS + 1))),
        sized(2, sized(1, sized(1, sized(9, b"") * 10) * 1_000)),
        sized(9, sized(2, sized(1, sized(2, b"")) * 6_000)),
        sized(8, sized(1, sized(2, sized(1, sized(2, sized(6, sized(1, b"") * MAX_FIELDS)))))),
    ],
    ids=["unknown", "headers", "in headers", "attributes", "list"],
)
def test_a_message_of_many_small_fields_is_refused(message: bytes) -> None:
    """64 MB of them would keep the loop for seconds."""
    with pytest.raises(ValueError, match="more than"):
        decode(message)


def test_a_request_with_all_the_headers_that_envoy_allows_is_read() -> None:
    """Ten times the default of 100, beside a subset of a thousand endpoints."""
    sent = ProcessingRequest(request_headers=headers(**{f"x_{number}": "1" for number in range(1_000)}))
    subset = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(1_000)]
    sent.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"subset": subset})
    found = decode(sent.SerializeToString())
    assert len(found.headers) == 1_000
    assert found.metadata["envoy.lb.subset_hint"]["subset"].count(",") == 999


@given(st.binary(max_size=64))
def test_fields_never_reach_beyond_their_message(data: bytes) -> None:
    try:
        found = list(FieldReader()(data))
    except ValueError:
        return
    assert sum(len(value) for _, value in found if isinstance(value, bytes)) <= len(data)


@pytest.mark.parametrize("seconds", [0.25, 10.25, 3600.0])
def test_more_time_is_asked_for(seconds: float) -> None:
    told = ProcessingResponse.FromString(more_time(seconds))
    assert told.override_message_timeout.ToMilliseconds() == seconds * 1e3
    assert told.WhichOneof("response") is None
