"""Mistakes that users make in YAML: each message names the place, and the mend."""

from __future__ import annotations

import pytest

from gateway.config.config_errors import FOREIGN, SYNONYMS
from gateway.config.schema import places
from tests.support.loading_cases import refusal

POOL = "pools:\n  p: {backend: vllm, model: m, endpoints: [http://a:1]}\n"
ROUTE = "routes:\n  r: {tiers: [p]}\n"
TOKEN = "sk-canary-0123456789"


def in_pool(text: str) -> str:
    return f"pools:\n  p: {{backend: vllm, model: m, endpoints: [http://a:1], {text}}}\n{ROUTE}"


def in_route(text: str) -> str:
    return f"{POOL}routes:\n  r: {{tiers: [p], {text}}}\n"


def with_section(text: str) -> str:
    return f"{POOL}{ROUTE}{text}\n"


MISTAKES = {
    # a key in another section
    "escalate of a pool": (in_pool("escalate: [refusal]"), 2, "pools.p.escalate", "it belongs to routes.NAME"),
    "a reason to escalate": (
        in_route("escalate: [refusl]"),
        4,
        "routes.r.escalate[0]",
        "'refusl'; did you mean 'refusal'",
    ),
    "a hold of streams": (
        in_route("escalate: {when: [refusal], hold: 40}"),
        4,
        "routes.r.escalate",
        "no stream is held back and judged any more; write the reasons alone, as in [invalid_json]",
    ),
    "a reason found in words": (in_route("escalate: [refusal, language]"), 4, "routes.r.escalate", "leave out refusal"),
    "one bare reason": (in_route("escalate: refusal"), 4, "routes.r.escalate", "write it in [ ]"),
    "price of a route": (in_route("price: {input: 1}"), 4, "routes.r.price", "it belongs to pools.NAME"),
    "ttft of defaults": (with_section("defaults: {ttft: {budget: 1s}}"), 5, "defaults.ttft", "belongs to routes.NAME"),
    "output_tokens of a route": (in_route("output_tokens: 9"), 4, "routes.r.output_tokens", "or routes.NAME.limits"),
    "api_key on top": (with_section("api_key: x"), 5, "api_key", "it belongs to pools.NAME"),
    # words of other programs
    "LiteLLM's file": ("model_list: []\n", 1, "model_list", "firsttoken import litellm FILE"),
    "production-stack's file": ("routerSpec: {}\n", 1, "routerSpec", "firsttoken import production-stack FILE"),
    "timeout": (in_route("timeout: 30s"), 4, "routes.r.timeout", "first_token and stream_idle of a pool"),
    "retries": (in_route("num_retries: 3"), 4, "routes.r.num_retries", "write max_attempts"),
    "fallbacks": (in_route("fallbacks: [p]"), 4, "routes.r.fallbacks", "write them into tiers"),
    "budget of a route": (in_route("budget: 1s"), 4, "routes.r.budget", "write ttft: {budget: TIME}"),
    "time of a session": (in_route("session: {total: 120s}"), 4, "routes.r.session", "total_ms of its Record"),
    "a time that was moved": (
        in_route("repair: [move_timestamp]"),
        4,
        "routes.r.repair[0]",
        "write the time at the end",
    ),
    "rpm": (in_pool("rpm: 60"), 2, "pools.p.rpm", "write requests_per_minute"),
    "rpm of a route": (in_route("rpm: 60"), 4, "routes.r.rpm", "keys: [{requests_per_minute"),
    "url": (in_pool("url: http://a"), 2, "pools.p.url", "write endpoints: [URL]"),
    "port": (with_section("server: {port: 80}"), 5, "server.port", "write listen: 127.0.0.1:PORT"),
    "log level": (with_section("telemetry: {level: debug}"), 5, "telemetry.level", "there are no levels"),
    "a key in clear": (
        with_section(f"keys:\n  - {{name: a, sha256: {TOKEN}}}"),
        6,
        "keys[0].sha256",
        'printf %s "$KEY" | sha256sum',
    ),
    "a key under `key`": (
        with_section(f"keys:\n  - {{name: a, sha256: {'a' * 64}, key: {TOKEN}}}"),
        6,
        "keys[0].key",
        "write sha256",
    ),
    # spelling
    "singular": (in_pool("header: {a: b}"), 2, "pools.p.header", "did you mean 'headers'?"),
    "camel case": (in_pool("apiKey: x"), 2, "pools.p.apiKey", "did you mean 'api_key'?"),
    "hyphens": (in_pool("context-window: 1"), 2, "pools.p.context-window", "did you mean 'context_window'?"),
    "a backend": (POOL.replace("vllm", "vlm") + ROUTE, 2, "pools.p.backend", "did you mean 'vllm'?"),
    "a pool": (POOL + "routes: {r: {tiers: [q]}}", 3, "routes.r.tiers[0]", "known: p"),
    "a model for a pool": (POOL + "routes: {r: {tiers: [m]}}", 3, "routes.r.tiers[0]", "it is the model of pool 'p'"),
    # kinds of values
    "no unit": (in_route("ttft: {budget: 800}"), 4, "routes.r.ttft.budget", "write '800ms' or '800s'"),
    "a bare budget": (in_route("ttft: 800ms"), 4, "routes.r.ttft", "write {budget: ...}"),
    "a bare share": (in_route("hedge: 3%"), 4, "routes.r.hedge", "write {max_extra: ...}"),
    "percent without its sign": (
        in_route("ttft: {budget: 1s, target: 95}"),
        4,
        "routes.r.ttft.target",
        "write 95% or 0.95",
    ),
    "text for a list": (POOL + "routes: {r: {tiers: p}}", 3, "routes.r.tiers", "write it in [ ]"),
    "a dash without a blank": (POOL + "routes:\n  r:\n    tiers:\n      -p", 5, "routes.r.tiers", "after the dash"),
    "a list of pools": ("pools:\n  - {backend: vllm}\n" + ROUTE, 1, "pools", "each is NAME: {...}"),
    "a host without http": (
        POOL.replace("http://a:1", "a:8000") + ROUTE,
        2,
        "pools.p.endpoints[0]",
        "write it like http://10.0.0.11:8000",
    ),
    "a port alone": (with_section("server: {listen: 8080}"), 5, "server.listen", "write it like 127.0.0.1:8080"),
    "a public port without keys": (
        with_section("server: {listen: 0.0.0.0:80}"),
        5,
        "server.listen",
        "add keys:, or listen on 127.0.0.1",
    ),
    "Redis without its scheme": (
        with_section("state: {redis: 'localhost:6379'}"),
        5,
        "state.redis",
        "write it like redis://127.0.0.1:6379/0",
    ),
    # variables
    "a variable that is not set": (in_pool('api_key: "${NO_SUCH}"'), 2, "pools.p.api_key", "${NO_SUCH:-default}"),
    "the shell's variable": (in_pool('api_key: "$API_KEY"'), 2, "pools.p", 'write "${NAME}"'),
    "LiteLLM's variable": (in_pool("api_key: os.environ/API_KEY"), 2, "pools.p", 'write "${NAME}"'),
    # YAML
    "a variable in { }": (in_pool("api_key: ${API_KEY}"), 2, "not YAML", 'quote the variable: "${API_KEY}"'),
    "a variable in [ ]": (in_pool("api_keys: [${A_KEY}]"), 2, "not YAML", 'quote the variable: "${A_KEY}"'),
    "a tab": ("pools:\n\tp: {}\n", 2, "not YAML", "indent with spaces"),
    "a level too few": ("pools:\n  p:\n    backend: v\n   model: m\n", 4, "not YAML", "indent this line as those"),
    "no colon": ("pools:\n  p\n    backend: vllm\n", 3, "not YAML", "the line before lacks its colon"),
    "no blank after a colon": (
        in_pool("first_token:3s"),
        2,
        "pools.p.first_token",
        "a colon and a blank belong between",
    ),
    "an open quote": (in_pool('proxy: "http://a'), 5, "not YAML", "close the quote of line 2"),
    "an open brace": ("pools:\n  p: {backend: vllm\nroutes: {}\n", 3, "not YAML", "close the { of line 2"),
    "an open bracket": ("pools:\n  p: {endpoints: [http://a\n}\n", 3, "not YAML", "close the [ of line 2"),
    "text with %": (in_route("hedge: {max_extra: %3}"), 4, "not YAML", "needs quotes"),
    "text with @": (in_pool("tokenizer: @a"), 2, "not YAML", "needs quotes"),
    "a name with *": (POOL + "routes:\n  *: {tiers: [p]}\n", 4, "not YAML", "needs quotes"),
    "a comparison with >": (
        POOL + "routes:\n  r:\n    tiers:\n      - pool: p\n        when:\n          turns: > 8\n",
        8,
        "not YAML",
        "needs quotes",
    ),
    "a section twice": (with_section("routes: {s: {tiers: [p]}}"), 5, "routes", "duplicate key, first on line 3"),
    "two documents": (POOL + "---\n" + ROUTE, 3, "not YAML", "write one per file"),
}


@pytest.mark.parametrize(("text", "line", "place", "mend"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_place_and_its_mend(text: str, line: int, place: str, mend: str) -> None:
    """One line for one mistake, at the line of the file; a key in the wrong place is not repeated."""
    [message] = refusal(text)
    assert message.startswith(f"f.yaml:{line}:")
    assert f": {place}: " in message
    assert mend in message
    assert TOKEN not in message


def test_forty_mistakes_are_tried() -> None:
    """A count that only grows."""
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("text", [f"api_key:{TOKEN}", f"api_key={TOKEN}", f"api_key :{TOKEN}x"])
def test_a_value_that_sticks_to_its_key_is_not_shown(text: str) -> None:
    """Without the blank the key of the mapping holds the secret."""
    assert TOKEN not in "\n".join(refusal(in_pool(text)))


def test_no_synonym_is_a_key_of_its_section() -> None:
    """A hint must not shadow a key that exists."""
    sections = {"pools": "pools.NAME", "routes": "routes.NAME", "keys": "keys[]"}
    for section, name in SYNONYMS:
        assert sections.get(section, section) not in places().get(name, [])
    assert not FOREIGN.keys() & {"server", "pools", "routes", "keys", "state", "telemetry"}
