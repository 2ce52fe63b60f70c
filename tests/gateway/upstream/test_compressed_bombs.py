"""Replies of a few kilobytes that expand a thousandfold: the event loop is not held up, and little is kept."""

from __future__ import annotations

import gzip
import zlib

import pytest

from backends import failures
from backends.interface import FailureKind
from backends.stream.held_reply import MAX_EXPANDED
from gateway.upstream.attempt import Milestone
from tests.support.attempt_stage import Stage
from tests.support.builders import FINISH, TOKEN

pytestmark = pytest.mark.virtual_time

GZIP = {"content-encoding": "gzip"}
SPACES = b" " * (MAX_EXPANDED + 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "kind"), [(400, FailureKind.CLIENT), (500, FailureKind.SERVER)])
def test_a_bomb_in_an_error_reply_is_cut_and_judged(status: int, kind: FailureKind, stream: bool) -> None:
    """By its status and its beginning, before its end."""
    bomb = gzip.compress(b'{"error":{"message":"' + SPACES + b'"}}')
    stage = Stage(status=status, stream=stream, headers=GZIP).reads(bomb)
    assert stage.failure.kind is kind


def test_a_compressed_error_is_read_like_any_other() -> None:
    """Its message reaches the caller."""
    stage = Stage(status=400, headers=GZIP).reads(gzip.compress(b'{"error":{"message":"no such thing"}}')).ends()
    assert stage.failure.message == "no such thing"


@pytest.mark.parametrize("filler", [b":" + SPACES, TOKEN * (len(SPACES) // len(TOKEN) + 1)], ids=["comment", "tokens"])
@pytest.mark.parametrize("committed", [False, True])
def test_a_read_of_a_stream_that_expands_too_far_is_too_large(committed: bool, filler: bytes) -> None:
    """Before the commit and after."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    head = packer.compress(TOKEN) + packer.flush(zlib.Z_SYNC_FLUSH) if committed else b""
    stage = Stage(headers=GZIP).reads(head, packer.compress(filler) + packer.flush())
    assert (stage.sink.breaks if committed else stage.sink.failures) == [failures.TOO_LARGE]


def test_a_long_compressed_stream_is_passed_on() -> None:
    """Only a single read is bounded, not the answer."""
    packer, stage = zlib.compressobj(wbits=16 + zlib.MAX_WBITS), Stage(headers=GZIP)
    part = TOKEN * (MAX_EXPANDED // 2 // len(TOKEN))
    for data in (part, part, part, FINISH):
        stage.reads(packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))
    assert (stage.firsts, stage.ends().passed) == ([Milestone.FIRST_TOKEN], part * 3 + FINISH)
