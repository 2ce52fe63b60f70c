"""Entries of the access log agree with Envoy's own definitions, and no input breaks the reader."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.ext_proc.messages import CALLER_GONE, ENGINE_BROKE, LogEntry, decode_log
from tests.support.ext_proc import ResponseFlags, StreamAccessLogsMessage


def test_an_entry_is_read() -> None:
    sent = StreamAccessLogsMessage()
    entry = sent.http_logs.log_entry.add()
    entry.response.response_code.value = 200
    entry.response.response_body_bytes = 70_000
    entry.common_properties.time_to_last_upstream_rx_byte.FromMilliseconds(2_500)
    entry.common_properties.metadata.filter_metadata["envoy.lb"].update({"pick": "17"})
    entry.common_properties.response_flags.downstream_connection_termination = True
    other = sent.http_logs.log_entry.add()
    assert not other.HasField("response")
    found = LogEntry({"envoy.lb": {"pick": "17"}}, 200, 70_000, 2.5, frozenset({15}))
    assert decode_log(sent.SerializeToString()) == [found, LogEntry()]


def test_flags_have_the_numbers_of_envoy() -> None:
    names = {field.number: field.name for field in ResponseFlags.DESCRIPTOR.fields}
    assert {names[flag] for flag in CALLER_GONE} == {"downstream_connection_termination", "downstream_remote_reset"}
    assert {names[flag] for flag in ENGINE_BROKE} == {
        "upstream_request_timeout",
        "upstream_remote_reset",
        "upstream_connection_termination",
        "stream_idle_timeout",
        "upstream_max_stream_duration_reached",
        "duration_timeout",
        "upstream_protocol_error",
    }


@pytest.mark.parametrize("raw", [b"\x12\x04\x0a\x02\x0a\xff", b"\x10\x01", b"\x12\x06\x0a\x04\x22\x02\x08\x01"])
def test_a_malformed_entry_is_a_value_error(raw: bytes) -> None:
    """A field beyond its message; a number in place of a message, of a status."""
    with pytest.raises(ValueError, match=r"longer|number"):
        decode_log(raw)


@given(st.binary())
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    with suppress(ValueError):
        decode_log(raw)
