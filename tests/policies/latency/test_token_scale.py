"""Corrected token counts."""

from __future__ import annotations

from random import Random

import pytest

from policies.latency.token_counts import TokenScale


def test_before_any_report_a_chat_template_is_added() -> None:
    """Four tokens per message, plus three."""
    scale = TokenScale()
    assert (scale.correct(1000, 3), scale.correct(0, 0), scale.scale) == (1015, 3, 1.0)


@pytest.mark.parametrize(("a", "b", "c"), [(1.0, 5, 4), (1.18, 4, 3), (0.8, 8, 40)])
def test_counts_are_within_two_percent_after_forty_reports(a: float, b: float, c: float) -> None:
    """For any tokenizer and chat template of the engine."""
    scale, random = TokenScale(), Random(1)

    def prompt() -> tuple[int, int, float]:
        text, messages = int(random.lognormvariate(6.5, 1)), random.randint(1, 20)
        return text, messages, a * text + b * messages + c

    for _ in range(40):
        text, messages, reported = prompt()
        scale.observe(text, messages, round(reported))
    errors = sorted(
        abs(scale.correct(text, messages) / count - 1) for text, messages, count in (prompt() for _ in range(99))
    )
    assert errors[49] < 0.02
    assert scale.scale == pytest.approx(a, rel=0.05)


def test_an_image_does_not_spoil_the_count_of_text() -> None:
    """Twenty times the tokens of the text, once in fifty requests."""
    scale = TokenScale()
    for number in range(200):
        scale.observe(500, 2, 10_000 if number % 50 == 25 else 511)
    assert scale.correct(500, 2) == pytest.approx(511, rel=0.1)


def test_a_report_of_zero_tokens_teaches_nothing() -> None:
    """Some engines report zero for an unknown count."""
    scale = TokenScale()
    scale.observe(500, 2, 0)
    assert scale.correct(500, 2) == 511


def test_the_error_of_a_count_is_large_before_any_report_and_small_after_a_few() -> None:
    """An engine with a tokenizer of 20% more tokens is within the first error; the next reports agree."""
    scale = TokenScale()
    assert 1.2 * 10_000 < scale.correct(10_000, 1) + scale.error(10_000, 1) < 1.5 * 10_000
    for _ in range(3):
        scale.observe(10_000, 1, 12_000)
    assert abs(scale.correct(10_000, 1) - 12_000) < scale.error(10_000, 1) < 0.1 * 12_000


@pytest.mark.parametrize("text", [10, 1000, 50_000])
def test_reports_of_a_lying_engine_have_a_bound(text: int) -> None:
    """A hundred million tokens for any prompt: at most eight times the text, and a large template, are believed."""
    scale = TokenScale()
    for _ in range(500):
        scale.observe(text, 1, 100_000_000)
    for asked in (1, 1000, 100_000):
        assert scale.correct(asked, 1) <= 8 * asked + 1024 + 8192
    for _ in range(60):
        scale.observe(1000, 1, 1007)
    assert scale.correct(1000, 1) == pytest.approx(1007, rel=0.3)
