"""Row 1: the sixteen faults of FailoverBench, each REPEATS times, with `rescue: on` and `off`.

Peers are of two kinds: one continues an unfinished answer, the other takes it for a message of the conversation and
writes the answer anew, like a server that drops `continue_final_message`.

The primary provider has the fault; the fallback is healthy except in fault 14. The caller is the OpenAI SDK with
`max_retries=0`. Verdicts of FailoverBench:

    pass  the whole right answer in time; for faults 12 and 13 the provider's error, not routed around
    safe  an explicit error, and nothing false before it
    fail  a hang, success reported without the whole answer, or text foreign to the answer

Each repeat has a new gateway: no circuit breaker hides the fault from the next repeat. A second table sends as many
callers to a new gateway at once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import openai

from tests.programs.chaos.lab import Lab, within
from tests.programs.chaos.provider import ANSWER, TOKENS, Provider, ProviderFault
from tests.programs.chaos.rows import Result, row
from tests.support.gateways import running
from tests.support.simulated import eventually

REPEATS = 20
AT_ONCE = 10  # concurrent repeats
LIMIT = 40.0  # s: a hang
HEALTHY = ProviderFault()
MID_STREAM = (8, 9, 10, 14)
TTFT_LIMIT = 15.0  # s, of fault 7
OUTAGE = 60.0  # s, of fault 15
BACK = 10.0  # s until a recovered primary is used
IDLE = "5s"  # silence within a stream


@dataclass
class Seen:
    """Answer or error of a caller. `error`: class of the SDK's exception; `code`: code of the provider's error."""

    text: str = ""
    finish: str | None = None
    model: str = ""
    tokens: int | None = None
    error: str = ""
    code: str | None = None
    ttft: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        counted = self.tokens in (None, len(TOKENS))
        return not self.error and self.text == ANSWER and self.finish == "stop" and counted


Verdict = tuple[str, Seen]
Judge = Callable[[Seen, list[Provider]], str]


def by_answer(seen: Seen, providers: list[Provider]) -> str:
    if seen.whole:
        return "pass"
    return "safe" if seen.error not in ("", "hang") and ANSWER.startswith(seen.text) else "fail"


def in_time(seen: Seen, providers: list[Provider]) -> str:
    late = seen.ttft is None or seen.ttft > TTFT_LIMIT
    return "fail" if seen.whole and late else by_answer(seen, providers)


def by_own_error(code: str) -> Judge:
    """Pass the provider's error with the right code; an answer of the fallback fails only for a content filter."""

    def judge(seen: Seen, providers: list[Provider]) -> str:
        if providers[1].calls and code == "content_policy_violation":
            return "fail"
        return "pass" if seen.error == "BadRequestError" and seen.code == code else by_answer(seen, providers)

    return judge


def by_accounting(seen: Seen, providers: list[Provider]) -> str:
    """Pass an answer with model, header and usage of the fallback."""
    named = seen.model == "fallback-model" == seen.headers.get("x-firsttoken-model")
    return "pass" if seen.whole and named and seen.tokens == len(TOKENS) else "fail" if seen.whole else "safe"


@dataclass(frozen=True)
class BenchFault:
    name: str
    primary: ProviderFault
    fallback: ProviderFault = HEALTHY
    judge: Judge = by_answer


FAULTS = {
    1: BenchFault("429 with Retry-After", ProviderFault(status=429, retry_after=lambda: "1")),
    2: BenchFault("429 without, persistent", ProviderFault(status=429)),
    3: BenchFault("500 once", ProviderFault(status=500, once=True)),
    4: BenchFault("503, persistent", ProviderFault(status=503)),
    5: BenchFault("reset before the head", ProviderFault(reset=True)),
    6: BenchFault("accepted, never answered", ProviderFault(silent=True)),
    7: BenchFault("head at once, first token after 20 s", ProviderFault(first_token=20.0), judge=in_time),
    8: BenchFault("cut after 40 of 60 tokens", ProviderFault(cut_after=40)),
    9: BenchFault("stalls for 30 s in mid-stream", ProviderFault(stall_after=40)),
    10: BenchFault("invalid JSON in the tenth event", ProviderFault(garbage_at=9)),
    11: BenchFault("no [DONE]", ProviderFault(no_done=True)),
    12: BenchFault(
        "context_length_exceeded",
        ProviderFault(status=400, code="context_length_exceeded"),
        judge=by_own_error("context_length_exceeded"),
    ),
    13: BenchFault(
        "content_policy_violation",
        ProviderFault(status=400, code="content_policy_violation"),
        judge=by_own_error("content_policy_violation"),
    ),
    14: BenchFault(
        "cut, and a fallback that rejects a prefill",
        ProviderFault(cut_after=40),
        ProviderFault(rejects_prefill=True),
    ),
    15: BenchFault("primary down, then healthy", ProviderFault(status=503)),
    16: BenchFault("accounting after a fail-over", ProviderFault(status=503), judge=by_accounting),
}


def anew(fault: BenchFault) -> BenchFault:
    """The fault before providers that continue no answer."""
    primary, fallback = (replace(each, begins_anew=True) for each in (fault.primary, fault.fallback))
    return replace(fault, primary=primary, fallback=fallback)


def configuration(primary: Provider, fallback: Provider, rescue: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pool for each model: two pools, or a pool of two peers."""
    pools: dict[str, Any] = {}
    for provider in (primary, fallback):
        name = provider.model.partition("-")[0]
        pools.setdefault(name, {"backend": "vllm", "model": provider.model, "endpoints": []})
        pools[name]["endpoints"].append(provider.url)
    return pools, {"chat": {"tiers": list(pools), "rescue": rescue}}


def peers(fault: BenchFault) -> list[Provider]:
    """Two endpoints of a pool: the first called has the fault, the second is the fallback."""
    both = [Provider("primary-model", fault.primary) for _ in range(2)]

    def called(other: Provider) -> None:
        if len(both[0].calls) + len(both[1].calls) == 1:
            other.fault = fault.fallback

    for provider, other in (both, both[::-1]):
        provider.on_call = lambda other=other: called(other)
    return both


async def call(url: str) -> Seen:
    seen = Seen()
    try:
        async with asyncio.timeout(LIMIT), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            await _consume(sdk, seen)
    except TimeoutError:
        seen.error = "hang"
    except openai.APIError as error:
        seen.error, seen.code = type(error).__name__, error.code
    except json.JSONDecodeError as error:  # the SDK's error for an invalid event
        seen.error = type(error).__name__
    return seen


async def _consume(sdk: openai.AsyncOpenAI, seen: Seen) -> None:
    began = monotonic()
    raw = await sdk.chat.completions.with_raw_response.create(
        model="chat",
        messages=[{"role": "user", "content": "recite"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    seen.headers = {name.lower(): value for name, value in raw.headers.items()}
    async for chunk in raw.parse():
        seen.model = chunk.model or seen.model
        if chunk.usage is not None:
            seen.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content and seen.ttft is None:
                seen.ttft = monotonic() - began
            seen.text += choice.delta.content or ""
            seen.finish = choice.finish_reason or seen.finish


async def fresh(fault: BenchFault, rescue: str, callers: int = 1, *, one_pool: bool = False) -> list[Verdict]:
    """Verdicts of `callers` at once on a new gateway before two new providers."""
    two = [Provider("primary-model", fault.primary), Provider("fallback-model", fault.fallback)]
    async with AsyncExitStack() as stack:
        providers = [await stack.enter_async_context(each) for each in (peers(fault) if one_pool else two)]
        pools, routes = configuration(*providers, rescue)
        gateway = await stack.enter_async_context(running(pools, routes, defaults={"stream_idle": IDLE}))
        got = await asyncio.gather(*(call(gateway.url) for _ in range(callers)))
        recent = gateway.recorder.recent
        await eventually(lambda: len(recent) >= callers)  # the SDK returns at [DONE], before the body has ended
        assert len(recent) == callers, f"{len(recent)} Records for {callers} requests"
        return [(fault.judge(seen, providers), seen) for seen in got]


async def repeated(fault: BenchFault, rescue: str, repeats: int, *, one_pool: bool = False) -> list[Verdict]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> list[Verdict]:
        async with gate:
            return await fresh(fault, rescue, one_pool=one_pool)

    return [verdict for verdicts in await asyncio.gather(*(one() for _ in range(repeats))) for verdict in verdicts]


async def outage(fault: BenchFault, rescue: str, seconds: float) -> list[Verdict]:
    """Fault 15: every request during the outage is answered, and the primary is used again within BACK."""
    verdicts = []
    async with (
        Provider("primary-model", fault.primary) as primary,
        Provider("fallback-model", fault.fallback) as fallback,
        running(*configuration(primary, fallback, rescue)) as gateway,
    ):
        ends = monotonic() + seconds
        while monotonic() < ends:
            seen = await call(gateway.url)
            verdicts.append((by_answer(seen, [primary, fallback]), seen))
            await asyncio.sleep(0.3)
        primary.fault = fault.fallback

        async def back() -> bool:
            verdicts.append(("pass", seen := await call(gateway.url)))
            return seen.model == "primary-model"

        if not await within(BACK, back):
            verdicts.append(("fail", Seen(error="primary not used again")))
    return verdicts


def summary(verdicts: list[Verdict]) -> str:
    counts = Counter(verdict for verdict, _ in verdicts)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def worst(verdicts: list[Verdict]) -> str:
    order = ("fail", "safe", "pass")
    return min((verdict for verdict, _ in verdicts), key=order.index)


def answered_by(verdicts: list[Verdict]) -> str:
    names = Counter(seen.model.partition("-")[0] or seen.error for _, seen in verdicts)
    return ", ".join(name for name, _ in names.most_common())


COLUMNS = ("on", "on, one pool", "off", "off, at once")
Lines = dict[int, dict[str, list[Verdict]]]  # verdicts by fault and column, for applicable columns only


async def _cell(number: int, fault: BenchFault, column: str, lab: Lab) -> list[Verdict] | None:
    """None: the column does not apply."""
    repeats, rescue = lab.size(REPEATS, 3), column.partition(",")[0]
    if column.endswith("one pool"):
        return await repeated(fault, rescue, repeats, one_pool=True) if number in MID_STREAM else None
    if number == 15:
        seconds = OUTAGE if not lab.quick else 4.0
        return await outage(fault, rescue, seconds) if column == rescue else None
    return await (fresh if column.endswith("at once") else repeated)(fault, rescue, repeats)


async def _lines(faults: dict[int, BenchFault], columns: tuple[str, ...], lab: Lab) -> Lines:
    lines: Lines = {}
    for number, fault in faults.items():
        cells = [(column, await _cell(number, fault, column, lab)) for column in columns]
        lines[number] = {column: verdicts for column, verdicts in cells if verdicts is not None}
        print(_markdown(number, lines[number], columns), flush=True)
    return lines


def _markdown(number: int, line: dict[str, list[Verdict]], columns: tuple[str, ...]) -> str:
    """A row of the table. The last cell: who answered, in the last column that applies to every fault."""
    cells = [summary(line[name]) if name in line else "-" for name in columns]
    told = line["off"] if "off" in line else line["on"]
    return f"| {number} | {FAULTS[number].name} | {' | '.join(cells)} | {answered_by(told)} |"


def _score(lines: Lines, column: str) -> Counter[str]:
    return Counter(worst(line[column]) for line in lines.values() if column in line)


def _scores(lines: Lines, columns: tuple[str, ...]) -> tuple[dict[str, Counter[str]], str, list[str]]:
    """Worst verdicts by column, as figures too, and the columns with a failure."""
    scores = {column: _score(lines, column) for column in columns}
    counted = {name: ", ".join(f"{n} {what}" for what, n in score.items()) for name, score in scores.items()}
    figures = "; ".join(f"{name}: {counts}" for name, counts in counted.items())
    return scores, figures, [f"{name}: {score['fail']} fail" for name, score in scores.items() if score["fail"]]


def _below(lines: Lines, column: str, least: int) -> list[str]:
    """The faults that are not passed, if fewer than `least` are."""
    passed = _score(lines, column)["pass"]
    safe = [str(number) for number, line in lines.items() if worst(line[column]) == "safe"]
    return [f"{passed} pass with rescue {column}, safe: {', '.join(safe) or 'none'}"] if passed < least else []


ABOUT = """### The sixteen faults

Two pools with a model each; *one pool*: two servers of one model. *At once*: {repeats} callers on one new gateway, else
one caller on each. FailoverBench scores an answer of the fallback to faults 1 and 3 as partial; here it is a pass. The
last column says who answered without rescue.

| | fault | `rescue: on` | `on`, one pool | `off` | `off`, at once | answered by |
|---|---|---|---|---|---|---|
"""


@row(1, "faults", "FailoverBench's 16 faults", "with `rescue` 16 pass, without 13 pass and 3 safe, in every repeat")
async def failover_bench(lab: Lab) -> Result:
    """Each fault 20 times with the OpenAI SDK, `rescue` on and off, and with 20 callers at once."""
    lines = await _lines(FAULTS, COLUMNS, lab)
    scores, figures, short = _scores(lines, COLUMNS)
    short += _below(lines, "on", 16) + _below(lines, "off", 13)
    comparable = {number: line for number, line in lines.items() if "off, at once" in line}
    if scores["off, at once"]["pass"] < _score(comparable, "off")["pass"]:
        short.append("fewer pass with callers at once: the retry budget is spent")
    rendered = "\n".join(_markdown(number, line, COLUMNS) for number, line in lines.items())
    return Result(figures, not short, "; ".join(short), ABOUT.format(repeats=lab.size(REPEATS, 3)) + rendered)


ABOUT_ANEW = """### The sixteen faults, before peers that begin anew

A peer of the table above continues an unfinished answer that it is sent (`continue_final_message`). These take it for
a message of the conversation and write the answer from its first word. The text that the caller has already is
skipped.

| | fault | `rescue: on` | `on`, one pool | answered by |
|---|---|---|---|---|
"""


@row(1, "faults", "the same, before peers that begin anew", "with `rescue` 14 pass and none fails, in every repeat")
async def begun_anew(lab: Lab) -> Result:
    """Each fault 20 times, `rescue` on; both providers ignore `continue_final_message`."""
    columns = COLUMNS[:2]
    lines = await _lines({number: anew(fault) for number, fault in FAULTS.items()}, columns, lab)
    _, figures, short = _scores(lines, columns)
    short += _below(lines, "on", 14)
    rendered = "\n".join(_markdown(number, line, columns) for number, line in lines.items())
    return Result(figures, not short, "; ".join(short), ABOUT_ANEW + rendered)
