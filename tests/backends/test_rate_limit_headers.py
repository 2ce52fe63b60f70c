"""Rate limits in headers, in the spellings of the providers' references."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.rate_limit_headers import RateLimitReport, read

DATE = "Sat, 22 Nov 2026 10:00:00 GMT"
REQUESTS, TOKENS = False, True


@pytest.mark.parametrize(
    ("headers", "reports"),
    [
        (  # OpenAI, Groq
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            [RateLimitReport(REQUESTS, 59, 60, 1.0), RateLimitReport(TOKENS, 149984, 150000, 360.0)],
        ),
        (  # Azure OpenAI: no reset
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "12"},
            [RateLimitReport(REQUESTS, 0, None, 10.0), RateLimitReport(TOKENS, 12, None, 10.0)],
        ),
        (  # Anthropic
            {
                "date": DATE,
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "49",
                "anthropic-ratelimit-requests-reset": "2026-11-22T10:00:01Z",
                "anthropic-ratelimit-input-tokens-limit": "30000",
                "anthropic-ratelimit-input-tokens-remaining": "0",
                "anthropic-ratelimit-input-tokens-reset": "2026-11-22T10:01:00Z",
                "anthropic-ratelimit-output-tokens-remaining": "0",
                "anthropic-ratelimit-output-tokens-reset": "2026-11-22T10:00:30Z",
            },
            [
                RateLimitReport(REQUESTS, 49, 50, 1.0),
                RateLimitReport(TOKENS, 0, 30000, 60.0),
                RateLimitReport(REQUESTS, 0, None, 30.0),
            ],
        ),
        (  # Mistral
            {"x-ratelimit-limit-req-minute": "60", "x-ratelimit-remaining-req-minute": "3"},
            [RateLimitReport(REQUESTS, 3, 60, 60.0)],
        ),
        (  # OpenRouter: a Unix time in ms
            {
                "date": DATE,
                "x-ratelimit-limit": "20",
                "x-ratelimit-remaining": "0",
                "x-ratelimit-reset": "1795341610000",
            },
            [RateLimitReport(REQUESTS, 0, 20, 10.0)],
        ),
        (  # Together
            {"x-ratelimit-limit": "20", "x-ratelimit-remaining": "4", "x-ratelimit-reset": "2"},
            [RateLimitReport(REQUESTS, 4, 20, 2.0)],
        ),
        (  # Groq's shorter units
            {"x-ratelimit-remaining-tokens": "17997", "x-ratelimit-reset-tokens": "7.66s"},
            [RateLimitReport(TOKENS, 17997, None, 7.66)],
        ),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "12ms"}, [(REQUESTS, 1, None, 0.012)]),
        ({"x-ratelimit-limit-requests": "60"}, []),
        ({"x-ratelimit-remaining-requests": "many", "x-ratelimit-remaining-tokens": "nan"}, []),
        ({"x-ratelimit-remaining-tokens": "-5", "ratelimit-policy": "x"}, []),
    ],
)
def test_every_providers_headers_are_read(headers: dict[str, str], reports: list[object]) -> None:
    found = [(report.counts_tokens, report.remaining, report.limit, report.reset) for report in read(headers)]
    expected = [
        (one.counts_tokens, one.remaining, one.limit, one.reset) if isinstance(one, RateLimitReport) else one
        for one in reports
    ]
    assert found == [pytest.approx(one) for one in expected]


@given(st.dictionaries(st.sampled_from(["reset", "limit", "remaining"]), st.text(max_size=20)))
def test_no_header_of_a_hostile_server_raises(fields: dict[str, str]) -> None:
    for report in read({f"x-ratelimit-{name}": value for name, value in fields.items()}):
        assert report.remaining >= 0
        assert 0 <= report.reset < 1e7
