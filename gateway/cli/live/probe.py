"""`firsttoken probe POOL`: measures TTFT and TPOT of a pool's endpoints by prompt size, and saves the profile.

Rules:
- Requests use the gateway's own path, one endpoint after the other: endpoints may share a machine.
- Prompts are random words, to avoid cache hits. The first request of an endpoint is not measured: a model may have to
  load.
- The requests and their price are printed before sending. Paid requests need consent: `--tokens`, or an answer on the
  terminal. `--no-tokens` ends there.
- Total time is bounded: a request has a timeout, and a failure ends the measurement of its endpoint.
- The fleet learns as from callers' requests. Learned state is merged into the saved state
  (`gateway.fleet.learned_keeper`), as when a gateway stops.

The report is a table, with bars for a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from statistics import median

from backends.interface import FailureKind
from gateway.cli.foreground import may_ask
from gateway.cli.live import live_findings as findings
from gateway.cli.live.live_check import PROMPT_TOKENS, LiveFleet, ask_endpoint, live_fleet
from gateway.cli.live.live_facts import harmless, secrets_of
from gateway.cli.tables import aligned, bars
from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.config.notes import duration
from gateway.fleet.discovery import Discovery
from gateway.fleet.learned_keeper import LearnedKeeper, StateFile
from gateway.part_list import CONFIG
from gateway.process import loop_factory, raise_file_limit
from gateway.runtime import RuntimeHolder
from gateway.synthetic_request import send_synthetic, synthetic
from gateway.tokenize.tokenizers import EncoderError
from policies.fleet.fleet import Fleet
from policies.types import Endpoint


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """One request. `size`: intended prompt tokens, `tokens`: reported. Times in s; `failure` empty: none."""

    endpoint: str
    size: int
    at_once: int
    ttft: float | None = None
    tpot: float | None = None
    tokens: int | None = None
    total: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ProbeCell:
    """Requests of one size to one endpoint, `at_once` concurrently. NaN: no value."""

    endpoint: str
    size: int
    at_once: int
    samples: Sequence[ProbeSample]

    @property
    def ttfts(self) -> list[float]:
        return sorted(sample.ttft for sample in self.samples if sample.ttft is not None)

    @property
    def tpots(self) -> list[float]:
        return [sample.tpot for sample in self.samples if sample.tpot is not None]

    @property
    def tokens(self) -> int | None:
        """Prompt tokens, as the server counts."""
        return next((sample.tokens for sample in self.samples if sample.tokens), None)

    @property
    def failure(self) -> str:
        return next((sample.failure for sample in self.samples if sample.failure), "")

    @property
    def name(self) -> str:
        return "alone" if self.at_once == 1 else f"{self.at_once} at once"

    @property
    def title(self) -> str:
        return f"{_size(self.size)} {self.name}"


def cells(samples: Sequence[ProbeSample]) -> list[ProbeCell]:
    keys = dict.fromkeys((sample.endpoint, sample.size, sample.at_once) for sample in samples)
    return [
        ProbeCell(*key, [sample for sample in samples if (sample.endpoint, sample.size, sample.at_once) == key])
        for key in keys
    ]


def report(samples: Sequence[ProbeSample]) -> list[str]:
    found = cells(samples)
    head = ("endpoint", "prompt", "tokens", "", "first token", "slowest", "per token")
    lines = aligned([head, *map(_row, found)], {0, 3})
    several = len({cell.endpoint for cell in found}) > 1
    rows = [
        (f"{cell.endpoint} {cell.title}" if several else cell.title, median(cell.ttfts), _ms(cell.ttfts))
        for cell in found
        if cell.ttfts
    ]
    failed = [f"{cell.endpoint}, {cell.title}: {cell.failure}" for cell in found if cell.failure]
    return [*lines, "", *(("first token, median", *bars(rows), "") if rows else ()), *failed]


def _row(cell: ProbeCell) -> tuple[str, ...]:
    slowest = duration(round(cell.ttfts[-1], 3)) if cell.ttfts else "-"
    tokens = "-" if cell.tokens is None else str(cell.tokens)
    return cell.endpoint, _size(cell.size), tokens, cell.name, _ms(cell.ttfts), slowest, _ms(cell.tpots, 4)


def _ms(values: Sequence[float], digits: int = 3) -> str:
    return duration(round(median(values), digits)) if values else "-"


def _size(tokens: float) -> str:
    return f"{tokens:g}" if tokens < 1000 else f"{tokens / 1000:g}k"


SIZES = (100, 1_000, 8_000, 32_000)  # tokens of a prompt; the shortest shows the time that every request takes
ALONE = 3  # requests of each size, one after the other
AT_ONCE = 4
OUTPUT = 64  # tokens: enough for a TPOT
FRAME = 64  # tokens of the template and of the last line of a prompt, at most
LAST_LINE = "\n\nGo on with this list of words."
QUESTION = "Send them? [y/N] "


def probe(args: argparse.Namespace) -> int:
    """Raises ConfigError where the pool is unknown, nobody agreed to the price, or an endpoint is not as configured."""
    config, pool = load(args.files, os.environ, CONFIG), args.pool
    if pool not in config.pools:
        raise ConfigError([f"firsttoken: no pool '{pool}'{did_you_mean(pool, config.pools)}"])
    if not config.pools[pool].model:
        raise ConfigError([f"firsttoken: pools.{pool} has no model to ask for; add model: NAME to it"])
    if config.pools[pool].caller_keys:
        raise ConfigError([f"firsttoken: callers have the keys for pools.{pool}: there is none to measure it with"])
    config = asyncio.run(_resolved(config))
    print(announcement(config, pool), flush=True)
    if args.tokens is False:
        return 0
    agree(config, pool, args.tokens)
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            samples, faults = runner.run(_measured(config, pool, args.timeout))
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
    if samples:
        print("\n".join(report(samples)), flush=True)
    if any(sample.ttft is not None for sample in samples):
        print(_saved(config), flush=True)
    elif not faults:  # of a host name without an address too
        faults.append("firsttoken: nothing was measured")
    if faults:
        raise ConfigError(faults)
    return 0


def announcement(config: Config, pool: str) -> str:
    """Lines that list the requests and the price."""
    section, sizes = config.pools[pool], sizes_of(config, pool)
    endpoints, each = len(config.addresses_of(pool)), ALONE + AT_ONCE
    most = sum(each * section.price_in_force.at_most(size + FRAME, OUTPUT) for size in sizes)
    usd = endpoints * (most + section.price_in_force.at_most(PROMPT_TOKENS, 1))
    text = f"probe: {each * len(sizes)} requests to each of {endpoints} endpoints of {pool}, with prompts of"
    text += f" {', '.join(f'{size:,}' for size in sizes)} tokens and at most {OUTPUT} tokens of output,"
    text += f" {ALONE} alone and {AT_ONCE} at once: {usd:.6f} USD at most, by the price of the pool"
    return text if usd or section.kind.local else f"{text}, which has none: look it up"


def sizes_of(config: Config, pool: str) -> tuple[int, ...]:
    """Prompt sizes, in tokens, that fit the context window if known. Raises ConfigError if no size fits."""
    window = config.pools[pool].context_window
    sizes = tuple(size for size in SIZES if window is None or size + FRAME + OUTPUT <= window)
    if not sizes:
        raise ConfigError(
            [f"firsttoken: pools.{pool}.context_window is {window}: too small for a prompt of {SIZES[0]}"]
        )
    return sizes


def agree(config: Config, pool: str, tokens: bool | None) -> None:
    """Raises ConfigError where requests cost something and nobody agreed."""
    section = config.pools[pool]
    if tokens or (section.kind.local and not section.price_in_force.at_most(1, 1)):
        return
    if not may_ask():
        raise ConfigError(["firsttoken: nothing was sent: add --tokens to agree to the price"])
    print(QUESTION, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(["firsttoken: nothing was sent"])


def _saved(config: Config) -> str:
    if config.state.dir is None:
        return "not saved: the configuration has no directory for it; add state: {dir: DIR}"
    return f"saved in {config.state.dir}: a gateway that starts with this configuration begins with these times"


async def _resolved(config: Config) -> Config:
    """The configuration with the addresses that are to be found, each of which is an endpoint."""
    discovery = Discovery()
    try:
        await discovery.follow(config)
        return config.with_discovered(discovery.found)
    finally:
        await discovery.close()


# --------------------------------------------------------------------------- measuring


async def _measured(config: Config, pool: str, timeout: float) -> tuple[list[ProbeSample], list[str]]:
    """Samples, and faults of endpoints that are not as configured. The profile is saved."""
    async with live_fleet(config, tokens=True, timeout=timeout) as live:
        keeper = None
        if config.state.dir is not None:
            keeper = LearnedKeeper(StateFile(config.state.dir), live.fleet, RuntimeHolder(live.runtime))
            await keeper.restore()
        samples, faults = list[ProbeSample](), list[str]()
        for endpoint in live.runtime.pools[pool].endpoints:
            if (fault := await _fault(live, endpoint)) is not None:
                faults.append(fault)
                continue
            samples += [sample async for sample in PoolProbe(live, endpoint).samples(sizes_of(config, pool))]
        if keeper is not None and any(sample.ttft is not None for sample in samples) and not await keeper.save():
            faults.append(f"firsttoken: the profile was not saved in {config.state.dir}; make the directory writable")
        return samples, faults


async def _fault(live: LiveFleet, endpoint: Endpoint) -> str | None:
    """A fault as `check --live` finds it. The question loads the model, and teaches the fleet nothing."""
    config = live.runtime.config
    facts = await ask_endpoint(replace(live, fleet=Fleet(config.fleet())), endpoint)
    found = findings.finding(facts, secrets_of(config), keyed=findings.is_keyed(config, endpoint.pool))
    return None if found is None or not found.fault else found.line


@dataclass(slots=True)
class PoolProbe:
    """Requests to one endpoint. `tokens_per_word`: by the server's report of prompt tokens."""

    live: LiveFleet
    endpoint: Endpoint
    tokens_per_word: float = 1.0

    async def samples(self, sizes: Sequence[int]) -> AsyncIterator[ProbeSample]:
        """Ends with the first failure."""
        for size in sizes:
            alone = []
            for _ in range(ALONE):
                alone.append(await self._send(size, 1))
                yield alone[-1]
                if alone[-1].failure:
                    return
            if median(sample.total for sample in alone) * AT_ONCE > self.live.timeout:
                yield ProbeSample(self.endpoint.id, size, AT_ONCE, failure="left out: longer than the timeout")
                return
            together = await asyncio.gather(*(self._send(size, AT_ONCE) for _ in range(AT_ONCE)))
            for sample in together:
                yield sample
            if any(sample.failure for sample in together):
                return

    async def _send(self, size: int, at_once: int) -> ProbeSample:
        live, endpoint = self.live, self.endpoint
        upstream, operation = live.runtime.upstreams[endpoint.id], live.operation(endpoint.pool)
        if operation is None:
            return ProbeSample(endpoint.id, size, at_once, failure="takes no chat")
        words = round(size / self.tokens_per_word)
        body = {"messages": [{"role": "user", "content": random_text(words) + LAST_LINE}]}
        estimate = live.estimate(endpoint.pool, operation, body)
        request = synthetic(upstream, operation, body, upstream.model, max_tokens=OUTPUT)
        wire = await send_synthetic(live.fleet, endpoint, upstream, request, estimate, live.timeout)
        sample = ProbeSample(endpoint.id, size, at_once, total=wire.times.ended - wire.times.opened)
        if wire.times.first_in is None:
            cause = f"no token within {live.timeout:g} s" if wire.failure is None else wire.failure.said
            if wire.failure is not None and wire.failure.kind is FailureKind.CONTEXT:
                cause = "does not fit its context window"
            return replace(sample, failure=harmless(cause, secrets_of(live.runtime.config)))
        reported = None if wire.report is None else wire.report.prompt_tokens
        if reported:
            self.tokens_per_word = max((reported - PROMPT_TOKENS) / words, 1.0)  # no token spans two words
        return replace(sample, ttft=wire.times.first_in - wire.times.opened, tpot=wire.tpot(), tokens=reported)


# -- prompts ---------------------------------------------------------------------------------------
#
# Uncached prompts: random words, each a single token in the usual vocabularies.


# Frequent words of English: a token each, with the space before, in the encodings of OpenAI.
WORDS = """
able about above across act add after again age ago air all also always animal answer any area arm around art ask away
baby back bad ball bank base bear beat bed before begin behind best better big bird black blue board boat body book
born both box boy bring brother brown build business buy call car care carry case cat center change check child city
class clean clear close cloud cold color common cook cool copy corner cost count country course cover cross cut dark
data daughter day deal deep door double down draw dream dress drink drive drop dry during each early earth east eat
edge egg end energy enough even evening event ever every eye face fact fall family far farm fast father feel field
fill final find fine fire first fish five floor flow flower fly follow food foot force forest form forward four free
fresh friend front fruit full game garden gas glass gold good grass gray great green ground group grow guess hair half
hand happy hard hat head hear heart heat heavy help high hill history hold hole home hope horse hotel hour house ice
idea inch iron island job join joy jump keep key kind king kitchen lake land large last late laugh law lead learn left
leg letter level lie life light like line list little live local long look loud love low luck lunch machine main map
mark market matter meal mean meet metal middle milk mind minute money month moon more morning mother mountain mouth
move music name near neck need never new next night noise north nose note number ocean office oil old once open orange
order other own page paint pair paper park part party pass past path pay peace people person picture piece place plan
plant play point poor post power press price problem pull push quick quiet race radio rain reach read ready reason red
rest rice rich ride ring rise river road rock roof room root round rule run safe salt same sand save school science
sea season seat second seed sell send sense serve set seven shape share sharp ship shoe shop short show side sign
silver simple sing sister six size skin sky sleep slow small smell smile snow soft soil song soon sound south space
speak speed spring square stand star start state station stay step stone stop store storm story street strong student
study sugar summer sun sure sweet swim table tail take talk tall taste teach team tell ten test thing think third
three tie time tiny today together tone tooth top total touch town trade train travel tree trip true turn twelve uncle
under unit until use valley value very view village visit voice walk wall warm wash watch water wave way weather week
weight west wheel white whole wide wild wind window winter wish wonder wood word work world year yellow young zero
""".split()


def random_text(words: int, random: Random | None = None) -> str:
    """As many words. Without `random` nobody has seen the text before."""
    return " ".join((random or SystemRandom()).choices(WORDS, k=words))
