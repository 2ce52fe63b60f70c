"""Timing constants of servers: values of `profile`, by model and card. `check` and replays use them.

`EngineProfile` is a vLLM engine. The duration of one step, in ms, is

    T = c0 + seq*seqs + (t_w^1.3 + (n/R)^1.3)^(1/1.3) + c_ar*n + c_att*sum a(c + a/2) + c_kv*sum ctx

where n counts all scheduled tokens (prefill chunks, plus one per decoding sequence), a prefill chunk is `a` new tokens
on `c` already in the KV cache, and ctx is the context of each decoding sequence. The smooth maximum joins the time to
read the weights (t_w) with the time to compute on n tokens (n/R).

`ApiProfile` is an external API, without visible internals: a log-normal TTFT, a steady TPOT and a rate limit.

Sources: the linear terms are fitted to the kernel measurements published with Vidur (MLSys 2024; median error 1.4 to
4.1%), the Qwen3-32B row is calibrated on llm-d's published 15.9k tokens/s, the API overhead is the alpha of BLIS. c0,
attention efficiency (.45) and KV bandwidth (.55) are estimates; the L4 row is scaled from data sheets. Scheduler limits
are vLLM 0.32's defaults for the class of card: 8192 tokens / 1024 sequences from 70 GiB on (not A100), else 2048 / 256.
"""

from __future__ import annotations

from dataclasses import dataclass

_JOIN = 1.3  # exponent of the smooth maximum


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """A vLLM engine. Constants named `_ms`, `_ns`, `_us` are in the named unit; all others in seconds and tokens."""

    name: str
    model: str  # default name of the served model
    step_ms: float  # c0: scheduling and launch
    weights_ms: float  # t_w: reading the weights once
    tokens_per_ms: float  # R: compute-bound rate of the linear layers
    allreduce_ms: float  # c_ar, per token
    attention_ns: float  # c_att, per (query, key) pair
    context_us: float  # c_kv, per token of decoding context
    kv_tokens: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    max_model_len: int = 131_072
    block_size: int = 16
    sequence_ms: float = 0.0045  # per sequence of a step
    overhead: float = 0.015  # API server and tokenizer, before the scheduler sees a request
    sigma: float = 0.05  # log-normal noise of a step
    host_tokens: int = 0  # KV cache in the CPU's memory
    load_us: float = 2.44  # to load one of these: 64k tokens on an H20 in 0.16 s
    max_queued_requests: int | None = None  # vLLM --max-num-queued-reqs: unfinished requests, waiting or running

    @property
    def num_blocks(self) -> int:
        """Capacity of the KV cache, in blocks."""
        return self.kv_tokens // self.block_size

    @property
    def tpot_alone(self) -> float:
        """Seconds per token of an answer that decodes alone, after a short prompt."""
        return self.duration_ms(1, 1) * 1e-3

    def fixed_ms(self, tokens: int, seqs: int) -> float:
        """The part of a step independent of contexts: launch, linear layers, all-reduce."""
        linear: float = (self.weights_ms**_JOIN + (tokens / self.tokens_per_ms) ** _JOIN) ** (1 / _JOIN)
        return self.step_ms + self.sequence_ms * seqs + linear + self.allreduce_ms * tokens

    def duration_ms(self, tokens: int, seqs: int, pairs: float = 0.0, context: int = 0) -> float:
        """A whole step: `pairs` = sum a(c + a/2) over prefill chunks, `context` = sum over decoding sequences."""
        return self.fixed_ms(tokens, seqs) + self.attention_ns * 1e-6 * pairs + self.context_us * 1e-3 * context


@dataclass(frozen=True, slots=True)
class ApiProfile:
    """An external API (assumptions, of the order of today's small hosted models)."""

    name: str
    model: str
    ttft: float = 0.35  # median of an empty prompt, s
    ttft_per_token: float = 20e-6  # s per prompt token
    ttft_sigma: float = 0.35  # log-normal
    tpot: float = 0.012  # s
    tpot_sigma: float = 0.10  # between requests; steady within a request
    requests_per_minute: int = 600
    burst: int = 0  # requests at once, refilled evenly, by a limit that refusals alone tell; 0: any in each 60 s
    max_model_len: int = 128_000
    block_size: int = 16

    @property
    def tpot_alone(self) -> float:
        return self.tpot


Profile = EngineProfile | ApiProfile

_LLAMA_8B = "llama-3.1-8b"
_A100 = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        EngineProfile("8b-h100", _LLAMA_8B, 0.98, 5.74, 46.8, 0.0, 1.18, 0.071, 453_000),
        EngineProfile("8b-a100", _LLAMA_8B, 0.98, 9.20, 15.2, 0.0, 3.36, 0.107, 453_000, **_A100),
        EngineProfile("8b-l4", _LLAMA_8B, 0.98, 58.9, 4.33, 0.0, 12.4, 0.62, 50_000, **_A100, max_model_len=32_768),
        EngineProfile("32b-2xh100", "qwen3-32b", 2.74, 12.2, 20.9, 0.0048, 2.36, 0.071, 325_000, max_model_len=40_960),
        EngineProfile("70b-4xh100", "llama-3.3-70b", 3.62, 13.3, 19.1, 0.012, 1.47, 0.045, 490_000),
        ApiProfile("api", "hosted-mini"),
        ApiProfile("api-slow-start", "hosted-large", ttft=2.1, tpot=1 / 140),
        ApiProfile("api-burst", "hosted-large", 0.7, ttft_sigma=0.63, tpot_sigma=0.2, requests_per_minute=240, burst=6),
    )
}
