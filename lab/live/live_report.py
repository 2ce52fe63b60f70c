"""Report of a replay against a real address: a table, and bars with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.cli.live.live_facts import harmless
from gateway.cli.tables import BAR, aligned
from gateway.config.notes import duration
from lab.live.attainment import RouteAttainment, quantile
from lab.live.live_player import LiveAnswer

LATE = 0.05  # s after its time, from which a request is called late
LENGTHS = ("prompt_tokens", "output_tokens")
MAX_FAILURES = 8  # shown, each once


def announcement(url: str, prompts: int, outputs: int, requests: int, seconds: float) -> str:
    return (
        f"live: {requests} requests to {url} over {duration(round(seconds, 1))}, with {prompts:,} prompt tokens and at"
        f" most {outputs:,} tokens of output"
    )


def report(rows: Sequence[RouteAttainment], answers: Sequence[LiveAnswer], secrets: Sequence[str]) -> list[str]:
    head = ("route", "requests", "budget", "in budget", "95% interval", "p50", "p90", "p99", "per token", "failed")
    return [
        *aligned([head, *map(_row, rows)], {0}),
        *([""] if any(row.budgeted for row in rows) else []),
        *_bars(rows),
        *_notes(rows, answers, secrets),
    ]


def _row(row: RouteAttainment) -> tuple[str, ...]:
    times = [_time(quantile(row.ttfts, q)) if row.ttfts else "-" for q in (0.5, 0.9, 0.99)]
    low, high = row.interval
    shares = (f"{row.share:.1%}", f"{low:.1%} to {high:.1%}") if row.budgeted else ("-", "-")
    budget = "-" if row.budget is None else duration(row.budget)
    per_token = _time(quantile(row.tpots, 0.5), 4) if row.tpots else "-"
    return row.name, str(row.sent), budget, *shares, *times, per_token, str(row.failures.total())


def _time(seconds: float, digits: int = 3) -> str:
    return duration(round(seconds, digits))


def _bars(rows: Sequence[RouteAttainment]) -> Iterator[str]:
    """Attained shares: full up to the interval, half within it."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        if row.budgeted:
            low, high = (round(BAR * share) for share in row.interval)
            bar = "█" * low + "▒" * (high - low) + "·" * (BAR - high)
            yield f"{row.name.ljust(width)}  {bar} {row.share:.1%}"


def _notes(rows: Sequence[RouteAttainment], answers: Sequence[LiveAnswer], secrets: Sequence[str]) -> Iterator[str]:
    yield ""
    if counted := [answer for answer in answers if answer.prompt_tokens]:
        meant, wanted = (sum(getattr(each.arrival, name) for each in counted) for name in LENGTHS)
        found, output = sum(each.prompt_tokens or 0 for each in counted), sum(each.output_tokens for each in counted)
        yield f"prompt tokens: {meant:,} in the trace, {found:,} by the server's count; output: {wanted:,}, {output:,}"
    late = [answer.late for answer in answers if answer.late > LATE]
    if late:
        yield (
            f"warning: {len(late)} of {len(answers)} requests were sent more than {duration(LATE)} late, up to"
            f" {_time(max(late))}: this machine is too slow for the trace; lower --speed"
        )
    failures = rows[-1].failures if rows else None
    for words, count in failures.most_common(MAX_FAILURES) if failures else ():
        yield f"failed: {count} of {len(answers)}: {harmless(words, secrets)}"
