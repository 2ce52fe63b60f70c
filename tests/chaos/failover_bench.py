"""Row 1: FailoverBench's sixteen faults, each REPEATS times, with `rescue: on` and `off`.

A fault is given to the primary provider; a fallback is healthy but in fault 14. The caller is the OpenAI SDK without
retries of its own. Verdicts, as FailoverBench gives them:

    pass  the caller got the whole right answer in time; of faults 12 and 13 the provider's own error, not routed around
    safe  an explicit error, and nothing false before it
    fail  a hang, an end that says success without the whole answer, or text that is not the answer's

Each repeat has a gateway of its own, so that no circuit breaker hides the fault from the next; a second table sends as
many callers to one new gateway at once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai

from tests.chaos.lab import Lab, within
from tests.chaos.provider import ANSWER, TOKENS, Provider, ProviderFault
from tests.chaos.rows import Result, row
from tests.support.gateways import running

REPEATS = 20
AT_ONCE = 10  # repeats that run at a time
LIMIT = 40.0  # s: a hang
HEALTHY = ProviderFault()
TTFT_LIMIT = 15.0  # s, of fault 7
OUTAGE = 60.0  # s, of fault 15
BACK = 10.0  # s until a recovered primary is used
IDLE = "5s"  # silence within a stream


@dataclass
class Seen:
    """What one caller got. `error`: class of the SDK's exception; `code`: of the provider's error."""

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
        return not self.error and self.text == ANSWER and self.finish == "stop"


Judge = Callable[[Seen, list[Provider]], str]


def by_answer(seen: Seen, providers: list[Provider]) -> str:
    if seen.whole:
        return "pass"
    return "safe" if seen.error not in ("", "hang") and ANSWER.startswith(seen.text) else "fail"


def in_time(seen: Seen, providers: list[Provider]) -> str:
    late = seen.ttft is None or seen.ttft > TTFT_LIMIT
    return "fail" if seen.whole and late else by_answer(seen, providers)


def by_own_error(code: str) -> Judge:
    """The provider's error with its code; an answer of the fallback is `fail` only for a content filter."""

    def judge(seen: Seen, providers: list[Provider]) -> str:
        if providers[1].calls and code == "content_policy_violation":
            return "fail"
        return "pass" if seen.error == "BadRequestError" and seen.code == code else by_answer(seen, providers)

    return judge


def by_accounting(seen: Seen, providers: list[Provider]) -> str:
    """The answer names the fallback's model, in the body and in the headers, and its usage."""
    named = seen.model == "fallback-model" == seen.headers.get("x-firsttoken-model")
    return "pass" if seen.whole and named and seen.tokens == len(TOKENS) else "fail" if seen.whole else "safe"


@dataclass(frozen=True)
class BenchFault:
    name: str
    primary: ProviderFault
    fallback: ProviderFault = HEALTHY
    judge: Judge = by_answer


FAULTS = {
    1: BenchFault("429 with Retry-After", ProviderFault(status=429, retry_after="1")),
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


def configuration(primary: Provider, fallback: Provider, rescue: str) -> tuple[dict[str, Any], dict[str, Any]]:
    pools = {
        provider.model.partition("-")[0]: {"backend": "vllm", "model": provider.model, "endpoints": [provider.url]}
        for provider in (primary, fallback)
    }
    return pools, {"chat": {"tiers": list(pools), "rescue": rescue}}


async def call(url: str) -> Seen:
    seen = Seen()
    try:
        async with asyncio.timeout(LIMIT), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            await _consume(sdk, seen)
    except TimeoutError:
        seen.error = "hang"
    except openai.APIError as error:
        seen.error, seen.code = type(error).__name__, error.code
    except json.JSONDecodeError as error:  # an invalid event, as the SDK reports it
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


async def fresh(fault: BenchFault, rescue: str, callers: int = 1) -> list[tuple[str, Seen]]:
    """Verdicts of `callers` at once on one new gateway before two new providers."""
    async with AsyncExitStack() as stack:
        providers = [
            await stack.enter_async_context(Provider("primary-model", fault.primary)),
            await stack.enter_async_context(Provider("fallback-model", fault.fallback)),
        ]
        pools, routes = configuration(*providers, rescue)
        gateway = await stack.enter_async_context(running(pools, routes, defaults={"stream_idle": IDLE}))
        got = await asyncio.gather(*(call(gateway.url) for _ in range(callers)))
        ends = [record.end.value for record in gateway.recorder.recent]
        assert len(ends) == callers, f"{len(ends)} Records for {callers} requests"
        return [(fault.judge(seen, providers), seen) for seen in got]


async def repeated(fault: BenchFault, rescue: str, repeats: int) -> list[tuple[str, Seen]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> list[tuple[str, Seen]]:
        async with gate:
            return await fresh(fault, rescue)

    return [verdict for verdicts in await asyncio.gather(*(one() for _ in range(repeats))) for verdict in verdicts]


async def outage(rescue: str, seconds: float) -> list[tuple[str, Seen]]:
    """Fault 15: every request during the outage is answered, and the primary is used again within BACK."""
    verdicts = []
    async with (
        Provider("primary-model", FAULTS[15].primary) as primary,
        Provider("fallback-model") as fallback,
        running(*configuration(primary, fallback, rescue)) as gateway,
    ):
        ends = monotonic() + seconds
        while monotonic() < ends:
            seen = await call(gateway.url)
            verdicts.append((by_answer(seen, [primary, fallback]), seen))
            await asyncio.sleep(0.3)
        primary.fault = ProviderFault()

        async def back() -> bool:
            verdicts.append(("pass", seen := await call(gateway.url)))
            return seen.model == "primary-model"

        if not await within(BACK, back):
            verdicts.append(("fail", Seen(error="primary not used again")))
    return verdicts


def summary(verdicts: list[tuple[str, Seen]]) -> str:
    counts = Counter(verdict for verdict, _ in verdicts)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def worst(verdicts: list[tuple[str, Seen]]) -> str:
    order = ("fail", "safe", "pass")
    return min((verdict for verdict, _ in verdicts), key=order.index)


def answered_by(verdicts: list[tuple[str, Seen]]) -> str:
    names = Counter(seen.model.partition("-")[0] or seen.error for _, seen in verdicts)
    return ", ".join(name for name, _ in names.most_common())


async def _cell(number: int, rescue: str, repeats: int, lab: Lab) -> list[tuple[str, Seen]]:
    if number == 15:
        return await outage(rescue, OUTAGE if not lab.quick else 4.0)
    return await repeated(FAULTS[number], rescue, repeats)


async def _table(lab: Lab, repeats: int) -> tuple[list[str], Counter[str], list[str]]:
    lines, score, failed = [], Counter[str](), []
    for number, fault in FAULTS.items():
        cells = [await _cell(number, rescue, repeats, lab) for rescue in ("on", "off")]
        at_once = [("pass", Seen())] if number == 15 else await fresh(fault, "off", repeats)
        score.update(f"{rescue} {worst(cell)}" for rescue, cell in zip(("on", "off"), cells, strict=True))
        score[f"at once {worst(at_once)}"] += 1
        failed += [str(number)] if "fail" in map(worst, (*cells, at_once)) else []
        by = answered_by(cells[1])
        together = "-" if number == 15 else summary(at_once)
        lines.append(f"| {number} | {fault.name} | {summary(cells[0])} | {summary(cells[1])} | {together} | {by} |")
        print(lines[-1], flush=True)
    return lines, score, failed


@row(1, "faults", "FailoverBench's 16 faults", "13 pass, 3 safe, no fail, in every repeat")
async def failover_bench(lab: Lab) -> Result:
    """Each fault 20 times with the OpenAI SDK, `rescue` on and off, and with 20 callers at once."""
    repeats = lab.size(REPEATS, 3)
    lines, score, failed = await _table(lab, repeats)
    heads = ("on", "off", "at once")
    figures = "; ".join(
        f"{name}: " + ", ".join(f"{score[f'{name} {each}']} {each}" for each in ("pass", "safe", "fail"))
        for name in heads
    )
    header = f"| | fault | `rescue: on` | `off` | `off`, {repeats} callers at once | answered by (`off`) |"
    table = "\n".join(["### The sixteen faults", "", header, "|---|---|---|---|---|---|", *lines])
    passed = not failed and score["off pass"] >= 13
    return Result(figures, passed, f"fail in {', '.join(failed)}" if failed else "", table)
