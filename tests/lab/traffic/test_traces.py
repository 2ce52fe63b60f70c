"""Traces in recorded formats, and synthetic traffic."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from gateway.observe.record_columns import RECORD
from gateway.records.packed_record import packed
from gateway.records.record_file import RecordFile
from lab.traffic.traces import TraceError, agents, at_load, read_log, read_trace, spread
from tests.support.builders import record
from tests.support.replay_builders import mooncake

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_mooncake_lines_carry_lengths_and_prefixes(tmp_path: Path) -> None:
    """Timestamps are milliseconds; one hash per 512 tokens, of which the hashes of full blocks are taken."""
    found = read_trace(
        written(
            tmp_path,
            '{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
            '{"timestamp": 4500, "input_length": 512, "output_length": 0, "hash_ids": [7]}\n',
        )
    )
    assert [(a.at, a.prompt_tokens, a.output_tokens, list(a.hashes)) for a in found] == [
        (0.0, 1300, 5, [7, 8]),
        (3.5, 512, 1, [7]),
    ]


def test_azure_lines_have_prompts_of_their_own(tmp_path: Path) -> None:
    """The trace has no prefix information; fractions of a second have seven digits."""
    first, second = read_trace(
        written(tmp_path, AZURE + "2023-11-16 18:15:46.6805900,1100,44\n2023-11-16 18:15:50.9951690,600,109\n")
    )
    assert (first.at, second.at, second.prompt_tokens, second.output_tokens) == (0.0, pytest.approx(4.314579), 600, 109)
    assert (len(first.hashes), len(set(first.hashes) & set(second.hashes))) == (2, 0)


def test_the_gateways_access_log_has_route_and_prefix(tmp_path: Path) -> None:
    """A completed request without an output length is skipped, as is the line that counts lost lines."""
    told = [
        RECORD.view(record(wall=50.0, prompt_tokens_estimated=900, prompt_tokens_reported=1030, prefix=[11, 12])),
        RECORD.view(record(wall=52.0, prompt_tokens_estimated=900, output_tokens=None)),
        {"access_log_lines_lost": 3},
        RECORD.view(record(wall=53.0, prompt_tokens_estimated=900, route="agent")),
    ]
    found = read_trace(written(tmp_path, "".join(json.dumps(line) + "\n" for line in told)))
    assert [(a.at, a.route, a.prompt_tokens, a.output_tokens) for a in found] == [
        (0.0, "chat", 1030, 10),
        (3.0, "agent", 900, 10),
    ]
    assert [len(a.hashes) for a in found] == [1030 // found[0].block, 900 // found[0].block]


@pytest.mark.parametrize("end", ["shed", "unavailable", "failed", "client_gone", "upstream_broke", "cut"])
def test_what_was_not_answered_is_offered_load(tmp_path: Path, end: str) -> None:
    """An overload that is replayed without what it turned away looks like none. The answer that never came has the mean
    length of its route's; what the caller did wrong is no load."""
    told = [
        RECORD.view(record(wall=50.0, prompt_tokens_estimated=900, output_tokens=100)),
        RECORD.view(record(wall=51.0, prompt_tokens_estimated=900, output_tokens=300)),
        RECORD.view(record(wall=52.0, prompt_tokens_estimated=900, output_tokens=7, route="agent")),
        RECORD.view(record(wall=53.0, prompt_tokens_estimated=800, output_tokens=None, prefix=[5], end=end)),
        RECORD.view(record(wall=54.0, prompt_tokens_estimated=800, output_tokens=None, end="refused")),
        RECORD.view(record(wall=55.0, prompt_tokens_estimated=None, output_tokens=None, end=end)),
    ]
    found = read_trace(written(tmp_path, "".join(json.dumps(line) + "\n" for line in told)))
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in found[2:]] == [(2.0, 900, 7), (3.0, 800, 200)]
    assert found[3].leaves == (1.0 if end == "client_gone" else None)


def test_times_ascend_from_zero(tmp_path: Path) -> None:
    """Arrivals are sorted by time, for any order of lines."""
    found = read_trace(written(tmp_path, AZURE + "2023-11-16 18:15:50,5,5\n2023-11-16 18:15:46,6,6\n"))
    assert [(a.at, a.prompt_tokens) for a in found] == [(0.0, 6), (4.0, 5)]


def test_ticks_are_spread_within_themselves(tmp_path: Path) -> None:
    """Ten requests with one rounded timestamp are spread within the tick, determined by the seed."""
    rows = "".join(f"2023-11-16 18:15:{10 + tick},5,5\n" * 10 for tick in range(0, 9, 3))
    trace = read_trace(written(tmp_path, AZURE + rows))
    found = spread(trace, 1)
    ticks = [sum(low <= arrival.at < low + 3 for arrival in found) for low in (0, 3, 6)]
    assert (ticks, len({a.at for a in found})) == ([10, 10, 10], 30)
    assert found == spread(trace, 1)
    assert found != spread(trace, 2)


def test_exact_times_are_left_alone(tmp_path: Path) -> None:
    """Two requests with one timestamp are no tick: the trace stays unchanged."""
    trace = read_trace(mooncake(tmp_path / "trace", 20))
    assert spread(trace, 1) == trace


def test_a_load_is_the_same_requests_in_less_time(tmp_path: Path) -> None:
    """Twice the load halves all times."""
    found = at_load(read_trace(mooncake(tmp_path / "trace", 3, gap=1000)), 2.0)
    assert [a.at for a in found] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no usable request; each line needs its prompt and output tokens"),
        ("a,b\n1,2\n", "1: neither JSON lines nor a header TIMESTAMP,ContextTokens,GeneratedTokens"),
        (AZURE + "yesterday,5,5\n", "2: Invalid isoformat string: 'yesterday'; fix or remove the line"),
        (AZURE + "2023-11-16 18:15:46,5\n", "2: expected three fields; fix or remove the line"),
        ('{"timestamp": 1, "input_length": 5}\n', "1: output_length is missing; fix or remove the line"),
        ('{"timestamp": 1, "input_\n', "1: not valid JSON; fix or remove the line"),
    ],
)
def test_an_unreadable_trace_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The error names file, line, cause and remedy."""
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value) in (f"{path}:{message}", f"{path}: {message}")


def test_a_missing_trace_file_is_an_error(tmp_path: Path) -> None:
    """The error quotes the operating system's reason."""
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file or directory"):
        read_trace(tmp_path / "nowhere")


def test_a_limit_takes_the_first_requests(tmp_path: Path) -> None:
    """The limit applies to lines of the file: later lines are not read."""
    path = mooncake(tmp_path / "trace", 5)
    path.write_text(path.read_text() + "garbage\n")
    assert len(read_trace(path, limit=5)) == 5


# ---------------------------------------------------------------- synthetic


def test_turns_of_a_session_share_their_beginning() -> None:
    """Most blocks of a prompt occurred in an earlier prompt of the session or application."""
    seen, hit, total = set[int](), 0, 0
    for arrival in agents(seed=1):
        hit += sum(block in seen for block in arrival.hashes)
        total += len(arrival.hashes)
        seen.update(arrival.hashes)
    assert hit / total > 0.85


def test_a_prefix_is_base64_of_64_bit_hashes() -> None:
    """A Record shows block hashes, never text; null without a hash."""
    assert RECORD.view(record(prefix=[1]))["prefix"] == b64encode((1).to_bytes(8, "little")).decode()
    assert RECORD.view(record())["prefix"] is None


def test_a_directory_of_records_is_a_trace(tmp_path: Path) -> None:
    """The same arrivals as of the access log with the same requests; a directory without records is an error."""
    told = [record(request_id=f"r{at}", wall=1e9 + at, prompt_tokens_estimated=900, prefix=[at]) for at in range(5)]
    log, kept = tmp_path / "access.jsonl", tmp_path / "records"
    log.write_text("".join(json.dumps(RECORD.view(each)) + "\n" for each in told))
    with pytest.raises(TraceError, match=r"no file records-\*\.sqlite"):
        read_trace(tmp_path)
    for worker in (0, 1):
        RecordFile(kept / f"records-{worker}.sqlite", 16_000_000).append([packed(each) for each in told[worker::2]])
    assert read_trace(kept) == read_trace(log)
    assert read_log(kept) == read_log(log)
    assert len(read_trace(kept, limit=2)) == 2
