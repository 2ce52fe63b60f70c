"""In-flight tokens of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency.token_counts import InflightTokens

RATE = 1000.0  # tokens/s


def ahead(ledger: InflightTokens, now: float) -> float:
    return ledger.queue.tokens_left(now, RATE)


def test_a_prompt_counts_from_sending_to_first_token() -> None:
    """Then the request decodes until its end."""
    ledger = InflightTokens()
    ledger.on_sent("a", 500, now=0.0)
    assert (ahead(ledger, 0.0), len(ledger.prefilling), ledger.in_flight) == (500, 1, 1)
    ledger.on_first_token("a", now=0.5)
    assert (ahead(ledger, 0.5), len(ledger.prefilling), ledger.in_flight) == (0, 0, 1)
    ledger.on_ended("a", now=2.0)
    assert (len(ledger.prefilling), ledger.in_flight) == (0, 0)


def test_queued_tokens_drain_at_the_prefill_rate() -> None:
    """First come, first served: the second prefill begins at the end of the first."""
    ledger = InflightTokens()
    ledger.on_sent("a", 1000, now=0.0)
    ledger.on_sent("b", 1000, now=0.5)
    assert ahead(ledger, 0.5) == 1500
    assert ahead(ledger, 1.5) == 500


def test_a_prompt_without_a_first_token_keeps_a_tenth_of_its_tokens() -> None:
    """At any age."""
    ledger = InflightTokens()
    ledger.on_sent("a", 1000, now=0.0)
    ledger.on_sent("b", 500, now=0.0)
    assert ahead(ledger, 60.0) == 150


def test_a_first_token_restarts_the_prefill_of_the_rest() -> None:
    """The engine was slower than predicted: the assumed progress of the second prompt is void."""
    ledger = InflightTokens()
    ledger.on_sent("a", 1000, now=0.0)
    ledger.on_sent("b", 1000, now=0.0)
    ledger.on_first_token("a", now=1.8)
    assert ahead(ledger, 1.8) == 1000


def test_a_prefill_begins_no_earlier_than_it_was_sent() -> None:
    """A first token that is known late, from the next report of its engine."""
    ledger = InflightTokens()
    ledger.on_sent("a", 1000, now=0.0)
    ledger.on_sent("b", 1000, now=1.2)
    ledger.on_first_token("a", now=1.0)
    assert ahead(ledger, 1.2) == 1000


def test_a_first_token_completes_earlier_prompts_up_to_the_remainder() -> None:
    """Only the remainder of the earlier prompt is left."""
    ledger = InflightTokens()
    ledger.on_sent("a", 1000, now=0.0)
    ledger.on_sent("b", 100, now=0.0)
    ledger.on_first_token("b", now=0.1)
    assert ahead(ledger, 0.1) == 100
    assert len(ledger.prefilling) == 1


def test_a_whole_answer_leaves_the_prefill_queue_by_time() -> None:
    """A whole answer shows no first token, so the predicted time counts."""
    ledger = InflightTokens()
    for key in "ab":
        ledger.on_sent(key, 1000, now=0.0, stream=False)
    ledger.expire(now=1.5, rate=RATE)
    assert (ahead(ledger, 1.5), len(ledger.prefilling), ledger.in_flight) == (500, 1, 2)
    ledger.on_ended("a", now=1.6)
    assert ahead(ledger, 1.6) == pytest.approx(400)


def test_the_queue_keeps_the_context_per_token() -> None:
    """A token on top of a cached conversation reads all of the context: 100 tokens on 900, each reading 950 on
    average."""
    ledger = InflightTokens()
    ledger.on_sent("a", 100, now=0.0, context=900)
    assert ledger.queue.context_per_token == 950


def test_a_key_that_is_sent_again_counts_once() -> None:
    """The later attempt replaces the earlier."""
    ledger = InflightTokens()
    ledger.on_sent("a", 500, now=0.0)
    ledger.on_sent("a", 200, now=0.0)
    assert (ahead(ledger, 0.0), ledger.in_flight) == (200, 1)


events = st.tuples(
    st.sampled_from(["charge", "clear", "release", "expire"]), st.integers(0, 5), st.integers(0, 4000), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=60))
def test_no_order_of_events_leaks_or_makes_counts_negative(history: list) -> None:
    """Repeated, late and unknown events: leaked or negative counters have broken other routers."""
    ledger, open_ = InflightTokens(), set()
    for now, (what, key, tokens, stream) in enumerate(history):
        if what == "charge":
            ledger.on_sent(key, tokens, now, context=tokens, stream=stream)
            open_.add(key)
        elif what == "clear":
            ledger.on_first_token(key, now)
        elif what == "expire":
            ledger.expire(now, RATE)
        else:
            ledger.on_ended(key, now)
            open_.discard(key)
        assert ledger.in_flight == len(open_)
        assert 0 <= len(ledger.prefilling) <= ledger.in_flight
        assert 0 <= ledger.queue.remainder <= ahead(ledger, now)
        assert ledger.queue.pairs >= 0
    for key in range(6):
        ledger.on_ended(key, len(history))
    queue = ledger.queue
    assert (ledger.in_flight, queue.tokens, queue.pairs, queue.remainder) == (0, 0, 0, 0)
