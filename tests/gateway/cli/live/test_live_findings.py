"""Findings from the facts of endpoints, and the reading of replies, without sockets."""

from __future__ import annotations

import pytest

from gateway.cli.live.live_facts import EndpointFacts, ListingFacts, harmless, is_listed, likely_urls, read_names
from gateway.cli.live.live_findings import clock


def facts(id: str, skew: float | None) -> EndpointFacts:
    return EndpointFacts(id, "a", "http://a", ("m",), True, ListingFacts(200, frozenset({"m"}), skew=skew))


def test_a_clock_that_all_endpoints_contradict_is_this_machines() -> None:
    """One warning, however many endpoints."""
    found = [facts("a/1", 400.0), facts("a/2", 401.0), facts("a/3", None)]
    assert [one.text for one in clock(found)] == [
        "the clock of this machine is 400s behind its endpoints; set it (NTP)"
    ]


def test_a_clock_that_one_endpoint_contradicts_is_named() -> None:
    """Nobody can tell which of two clocks is right."""
    found = [facts("a/1", 1.0), facts("a/2", -1.0), facts("a/3", -120.0)]
    assert [one.text.partition(";")[0] for one in clock(found)] == ["the clock of a/3 is 2m behind this machine's"]


@pytest.mark.parametrize(
    ("url", "known", "expected"),
    [
        ("http://h:1/v1/chat/completions", None, "http://h:1/v1"),
        ("http://h:1/v1/v1", None, "http://h:1/v1"),
        ("https://api.groq.com", "https://api.groq.com/openai/v1", "https://api.groq.com/openai/v1"),
        ("http://h:1/api/chat/completions", None, "http://h:1/api"),
    ],
)
def test_the_likely_place_of_an_api_is_among_the_first_two(url: str, known: str | None, expected: str) -> None:
    assert expected in likely_urls(url, known)[:2]
    assert url not in likely_urls(url, known)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data":[{"id":"a"},{"id":"b"}]}', {"a", "b"}),
        (b'[{"id":"a"}]', {"a"}),
        (b'{"data":[]}', set()),
        (b'{"data":{}}', None),
        (b"<html>", None),
        (b"[" * 100_000, None),
        (b'{"data":[{"id":"\\u001b[2J"},{"id":7},null]}', set()),
    ],
)
def test_a_list_of_models_is_read_whatever_it_holds(body: bytes, names: set[str] | None) -> None:
    assert read_names(body) == names


def test_names_with_a_tag_or_a_prefix_are_listed() -> None:
    """Ollama's tag, Gemini's prefix."""
    assert is_listed("llama3", {"llama3:latest"})
    assert is_listed("gemini-2.5-flash", {"models/gemini-2.5-flash"})
    assert not is_listed("llama3", {"llama3:70b"})


def test_text_of_a_server_is_one_masked_line() -> None:
    text = harmless("a\r\nb\x1b[2J sk-1234567890 " + "x" * 500, ["sk-1234567890"])
    assert text.startswith("a b [2J [key] xxx")
    assert (len(text), text.isprintable()) == (160, True)
