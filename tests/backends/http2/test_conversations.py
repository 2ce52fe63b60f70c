"""Conversations with a client of h2: what it sends is read, at any split, and what is answered arrives whole.
`python -m tests.backends.http2.test_conversations CASES` plays more of them."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived as H2Data
from h2.events import TrailersReceived
from h2.settings import SettingCodes

from backends.http2 import server as ours
from backends.http2.server import Http2Server

CASES, STEPS = 60, 40
STREAMS, WINDOW = 100, 1 << 17
PATHS = ("/a.B/C", "/a.B/D", "/" + "x" * 300)
ANSWER, TRAILERS = ((":status", "200"), ("x", "y" * 200)), (("grpc-status", "0"),)


@dataclass
class Read:
    """By stream: path, bytes, how it ended."""

    paths: dict[int, str] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    ended: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)

    def add(self, events: list[ours.Event]) -> None:
        for event in events:
            match event:
                case ours.RequestReceived():
                    self.paths[event.stream] = event.path
                case ours.DataReceived():
                    self.data[event.stream] += event.data
                case ours.RequestEnded():
                    self.ended.add(event.stream)
                case ours.StreamReset():
                    self.reset.add(event.stream)


class Pair:
    """A client of h2, and the server. `expected`: what the client has sent."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.client = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.server = Http2Server(STREAMS, WINDOW, 16 * WINDOW)
        self.expected, self.found = Read(), Read()
        self.answered, self.answers = dict[int, bytes](), defaultdict[int, bytes](bytes)
        self.over = set[int]()
        self.client.initiate_connection()
        # Once: hpack keeps no account of a size that changes twice before an answer.
        self.client.update_settings({SettingCodes.HEADER_TABLE_SIZE: random.choice((0, 100, 8_192))})
        self.server.start()
        self.deliver()

    def deliver(self) -> None:
        """Bytes of both, until none has more to say."""
        while data := self.client.data_to_send():
            at = 0
            while at < len(data) or self.server.is_behind:
                step = self.random.choice((1, 5, 9, 100, 1 << 18))
                self.found.add(self.server.receive(data[at : at + step], 0.0))
                at += step
            self.hear()
        self.hear()

    def hear(self) -> None:
        for event in self.client.receive_data(self.server.take()):
            if isinstance(event, H2Data):
                self.answers[event.stream_id or 0] += event.data or b""
                if event.flow_controlled_length:
                    self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id or 0)
            elif isinstance(event, TrailersReceived):
                self.over.add(event.stream_id or 0)

    def step(self) -> None:
        """Something that a client may do, or the server."""
        random, live = self.random, [each for each in self.found.paths if each not in self.found.reset]
        open_ = [each for each in live if each not in self.found.ended]
        match random.choice(("begin", "data", "data", "data", "end", "reset", "ping", "settings", "answer", "last")):
            case "begin" if len(live) < 20:
                self.begin()
            case "data" if open_:
                self.send(random.choice(open_), random.randbytes(random.choice((0, 1, 300, 40_000))))
            case "end" if open_:
                self.client.end_stream(ended := random.choice(open_))
                self.expected.ended.add(ended)
            case "reset" if open_ and random.random() < 0.3:
                self.client.reset_stream(reset := random.choice(open_), ErrorCodes.CANCEL)
                self.expected.reset.add(reset)
            case "ping":
                self.client.ping(random.randbytes(8))
            case "settings" if random.random() < 0.3:
                sizes = {SettingCodes.INITIAL_WINDOW_SIZE: random.choice((0, 9, 65_535, 1 << 20))}
                self.client.update_settings(sizes)
            case "answer" | "last" as what if unanswered := [each for each in live if each not in self.answered]:
                self.answer(random.choice(unanswered), is_last=what == "last")
        self.deliver()

    def begin(self) -> None:
        stream, path = self.client.get_next_available_stream_id(), self.random.choice(PATHS)
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "picker"), ("te", "trailers")]
        more = [(f"x-{self.random.randint(0, 5)}", "y" * self.random.choice((1, 40))) for _ in range(3)]
        is_last = self.random.random() < 0.1
        self.client.send_headers(stream, [*head, *more], end_stream=is_last)
        self.expected.paths[stream] = path
        self.expected.ended |= {stream} if is_last else set()

    def send(self, stream: int, data: bytes) -> None:
        """As much as the window allows."""
        padding = self.random.choice((None, None, 0, 200))
        data = data[: max(self.client.local_flow_control_window(stream) - 1_000, 0)]
        for at in range(0, len(data), 16_000):
            self.client.send_data(stream, data[at : at + 16_000], pad_length=padding)
            self.expected.data[stream] += data[at : at + 16_000]
        self.deliver()
        self.server.acknowledge(stream, len(data))

    def answer(self, stream: int, *, is_last: bool) -> None:
        self.answered[stream] = self.random.randbytes(self.random.choice((0, 5, 100_000)))
        self.server.headers(stream, ANSWER)
        self.server.data(stream, self.answered[stream])
        if is_last:
            self.server.end(stream, TRAILERS)

    def finish(self) -> None:
        """All windows open: every answer arrives."""
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        self.client.increment_flow_control_window(1 << 24)
        self.deliver()


def play(seed: int) -> Pair:
    pair = Pair(Random(seed))
    for _ in range(STEPS):
        pair.step()
    pair.finish()
    assert pair.found == pair.expected
    for stream, answer in pair.answered.items():
        if stream not in pair.found.reset:
            assert pair.answers[stream] == answer
    assert not pair.server.has_unsent
    return pair


@pytest.mark.parametrize("begin", range(0, CASES, 10))
def test_all_is_read_and_answers_arrive(begin: int) -> None:
    assert all(play(seed).found.paths is not None for seed in range(begin, begin + 10))


if __name__ == "__main__":
    for case in range(int(sys.argv[1])):
        play(case)
