"""Loading files and environment into a Config, or into error messages; every test checks the whole message."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gateway.config.config_errors import ConfigError
from gateway.config.loading import validated
from gateway.config.yaml_source import parse
from tests.support.contract import CONTRACT
from tests.support.loading_cases import DIGEST, POOLS, ROUTES, loaded, places, pool, refusal, route, spoilt

# ---------------------------------------------------------------------------- values of a section


SHORT = "a secret needs at least 16 characters: openssl rand -hex 32"

SERVER_KEYS = (
    "listen, admin, admin_key, workers, open, drain, hosts, max_connections, max_body_bytes, cors, websockets, tls"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # keys
        ("servr: {}", "servr: unknown key; did you mean 'server'?"),
        ("server: {lisen: x}", "server.lisen: unknown key; did you mean 'listen'?"),
        (
            "server: {zzz: x}",
            f"server.zzz: unknown key; known: {SERVER_KEYS}",
        ),
        (
            "pools: {p: {backend: vllm, endpoints: [http://a], modle: m}}",
            "pools.p.modle: unknown key; did you mean 'model'?",
        ),
        ("pools: {p: {model: m}}", "pools.p: 'backend' is missing"),
        ("routes: {r: {}}", "routes.r: 'tiers' is missing"),
        ("routes: {r: {tiers: [{when: {}}]}}", "routes.r.tiers[0]: 'pool' is missing"),
        (
            'routes: {"r 1": {tiers: [p]}}',
            'routes."r 1": a name is sent in a header: visible ASCII without spaces only',
        ),
        ("pools: {a/b: {backend: ollama}}", "pools.a/b: a pool name may contain letters, digits and . _ : - only"),
        (
            "routes: {gpt-4.1: {tiers: [p], max_attempts: 0}}",
            'routes."gpt-4.1".max_attempts: must be at least 1, got 0',
        ),
        # kinds of values
        ("server: {workers: many}", "server.workers: expected an integer, got 'many'"),
        ("server: {workers: 1.5}", "server.workers: expected an integer, got 1.5"),
        ("server: {workers: [1]}", "server.workers: expected an integer, got a list"),
        ("server: {workers: true}", "server.workers: write a number, not true or false"),
        ("routes: {r: {tiers: [p], max_attempts: true}}", "routes.r.max_attempts: write a number, not true or false"),
        (
            f"keys: [{{name: a, sha256: '{DIGEST}', tokens_per_minute: true}}]",
            "keys[0].tokens_per_minute: write a number, not true or false",
        ),
        (
            f"keys: [{{name: a, sha256: '{DIGEST}', monthly_cost_usd: true}}]",
            "keys[0].monthly_cost_usd: write a number, not true or false",
        ),
        ("server: {open: maybe}", "server.open: expected true or false, got 'maybe'"),
        ("server: 8080", f"server: expected {{{SERVER_KEYS}}}, got 8080"),
        ("server:", f"server: expected {{{SERVER_KEYS}}}, got nothing"),
        ("pools:", "pools: expected a mapping, got nothing"),
        ("pools: [a]", "pools: expected a mapping, got a list; each is NAME: {...}"),
        ("keys: {}", "keys: expected a list, got a mapping"),
        (pool(model="7"), "pools.p.model: expected text (in quotes), got 7"),
        (pool(model="true"), "pools.p.model: expected text (in quotes), got true"),
        (pool(price="{input: free}"), "pools.p.price.input: expected a number, got 'free'"),
        (pool(price="{input: -1}"), "pools.p.price.input: must be at least 0, got -1"),
        (pool(price="{output: 1e400}"), "pools.p.price.output: expected a number, got inf"),
        (pool(context_window="0"), "pools.p.context_window: must be more than 0, got 0"),
        (pool(block_size="5000"), "pools.p.block_size: must be at most 4096, got 5000"),
        (pool(keep_warm="60s"), "pools.p.keep_warm: expected {idle}, got '60s'; write {idle: ...}"),
        (
            pool(keep_warm="{idle: 60s}", model='""'),
            "pools.p: keep_warm requires model: add model, or remove keep_warm",
        ),
        (
            pool(capabilities="[tool]"),
            "pools.p.capabilities[0]: expected tools, images or json_schema, got 'tool'; did you mean 'tools'?",
        ),
        (pool(capabilities="tools"), "pools.p.capabilities: expected a list, got 'tools'; write it in [ ]"),
        (
            pool(endpoints="[7]"),
            "pools.p.endpoints[0]: expected the URL of a server or "
            "{url, region, kv_events, kv_replay, profile, resolve, dp_rank, kubernetes}, got 7",
        ),
        (
            route(tiers="[3]"),
            "routes.r.tiers[0]: expected the name of a pool or {pool, when, adapter, after, beside, weight}, got 3",
        ),
        (route(tiers="[]"), "routes.r.tiers: is empty; at least one is required"),
        # routes
        (route("ttft: {budget: 800}"), "routes.r.ttft.budget: 800 has no unit; write '800ms' or '800s'"),
        (
            route("ttft: {budget: 8 parsecs}"),
            "routes.r.ttft.budget: '8 parsecs' has no unit of time; write it like 250ms, 2s or 5m",
        ),
        (route("ttft: {budget: 1s, target: 1}"), "routes.r.ttft.target: must be less than 1, got 1"),
        (route("ttft: {budget: 1s, target: 0}"), "routes.r.ttft.target: must be more than 0, got 0"),
        (
            route("ttft: 1s"),
            "routes.r.ttft: expected {budget, per_1k_tokens, target, of} or off, got '1s'; write {budget: ...}",
        ),
        (route("tpot: on"), "routes.r.tpot: expected {budget, target} or off, got 'on'; write {budget: ...}"),
        (
            route("prefer: cheap"),
            "routes.r.prefer: expected quality, cost, latency, completion or throughput, got 'cheap'",
        ),
        (
            route("on_miss: shedd"),
            "routes.r.on_miss: expected best_effort, queue or shed, got 'shedd'; did you mean 'shed'?",
        ),
        (
            route("scorer: dualmap"),
            "routes.r.scorer: expected predicted, round_robin, least_request or prefix_hash, got 'dualmap'",
        ),
        (
            route("workload: chatt"),
            "routes.r.workload: expected autocomplete, chat, task, agent or batch, got 'chatt'; did you mean 'chat'?",
        ),
        (route("hedge: on"), "routes.r.hedge: expected {max_extra} or off, got 'on'; write {max_extra: ...}"),
        (route("hedge: 3%"), "routes.r.hedge: expected {max_extra} or off, got '3%'; write {max_extra: ...}"),
        (route("hedge: {max_extra: 150%}"), "routes.r.hedge.max_extra: must be at most 1, got '150%'"),
        (route("hedge: {max_extr: 3%}"), "routes.r.hedge.max_extr: unknown key; did you mean 'max_extra'?"),
        (route("limits: {output_tokens: 0}"), "routes.r.limits.output_tokens: must be more than 0, got 0"),
        (
            route(tiers="[{pool: p, when: {turn: 1}}]"),
            "routes.r.tiers[0].when.turn: unknown key; did you mean 'turns'?",
        ),
        (
            route(tiers="[{pool: p, when: {turns: many}}]"),
            "routes.r.tiers[0].when.turns: 'many' is not a comparison; write it like '<= 8000', '1000..8000' or 3",
        ),
        (
            route(tiers="[{pool: p, when: {reasoning_effort: hihg}}]"),
            "routes.r.tiers[0].when.reasoning_effort: 'hihg' is no effort of reasoning; did you mean 'high'?",
        ),
        (
            route(tiers="[{pool: p, when: {header.x-team: '>= a'}}]"),
            "routes.r.tiers[0].when.\"header.x-team\": '>= a' is not a comparison; "
            "write it like '<= 8000', '1000..8000' or 3",
        ),
        # addresses
        (
            "server: {listen: localhost}",
            "server.listen: 'localhost' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080",
        ),
        (
            "server: {cors: {origins: [app.example.com]}}",
            "server.cors.origins[0]: 'app.example.com' is not an origin; "
            "write it like https://app.example.com, without a path",
        ),
        (
            "server: {cors: {origins: ['https://app.example.com/']}}",
            "server.cors.origins[0]: 'https://app.example.com/' is not an origin; "
            "write it like https://app.example.com, without a path",
        ),
        (
            "server: {cors: {origins: ['https://app.example.com:443']}}",
            "server.cors.origins[0]: browsers leave the default port out of 'https://app.example.com:443'; do so too",
        ),
        (
            "server: {listen: 8080}",
            "server.listen: '8080' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080",
        ),
        (
            "server: {listen: '127.0.0.1:99999'}",
            "server.listen: '127.0.0.1:99999' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080",
        ),
        (
            pool(endpoints="[10.0.0.11:8000]"),
            "pools.p.endpoints[0]: '10.0.0.11:8000' is not a server's URL; write it like http://10.0.0.11:8000",
        ),
        (
            pool(endpoints="[{url: ftp://a}]"),
            "pools.p.endpoints[0].url: 'ftp://a' is not a server's URL; write it like http://10.0.0.11:8000",
        ),
        (
            pool(endpoints="['http://u:pass@a']"),
            "pools.p.endpoints[0]: a backend's URL holds credentials; put the key into api_key",
        ),
        (
            pool(endpoints="[{url: http://a, kv_events: http://a}]"),
            "pools.p.endpoints[0].kv_events: 'http://a' is not a KV event URL; write it like tcp://10.0.0.12:5557",
        ),
        (
            pool(endpoints="[{url: http://a, kv_replay: tcp://a:1}]"),
            "pools.p.endpoints[0]: kv_replay requires kv_events: add kv_events, or remove kv_replay",
        ),
        (
            pool(endpoints="[{url: http://10.0.0.11:8000, resolve: 10s}]"),
            "pools.p.endpoints[0]: 10.0.0.11 is an IP address, not a host name; remove resolve",
        ),
        (
            pool(endpoints="[{url: http://a.svc:8000, resolve: 10s, kv_events: tcp://b.svc:5557}]"),
            "pools.p.endpoints[0]: kv_events must have the host a.svc too: resolve replaces it by each address",
        ),
        ("server: {drain: {wait: 5}}", "server.drain.wait: 5 has no unit; write '5ms' or '5s'"),
        # pools
        (pool(backend="vlm"), "pools.p.backend: no backend 'vlm'; did you mean 'vllm'?"),
        (pool(profile="8b-h1000"), "pools.p.profile: no profile '8b-h1000'; did you mean '8b-h100'?"),
        (
            pool(tokenizer="o200k"),
            "pools.p.tokenizer: 'o200k' is neither an encoding nor a file; did you mean 'o200k_base'?",
        ),
        (pool(endpoints=""), "pools.p: a vllm pool needs endpoints, the URLs of its servers"),
        (pool(base_url="http://b"), "pools.p: endpoints and base_url exclude each other; keep one"),
        (
            pool(endpoints="[http://a:1, http://b, http://a:1/v1]"),
            "pools.p: endpoints[2] and endpoints[0] are both a:1; keep one",
        ),
        (
            pool(backend="openai", endpoints=""),
            'pools.p: openai needs a key; write api_key: "${OPENAI_API_KEY}" '
            "(a server without keys: backend: compatible)",
        ),
        (pool(headers="{x y: a}"), 'pools.p.headers."x y": not the name of a header'),
        (pool(headers="{Host: a}"), "pools.p.headers.Host: the connection sets this header itself; leave it out"),
        (pool(headers='{x: "a\\nb"}'), "pools.p.headers.x: the value of a header is one line of visible ASCII"),
        (
            pool(backend="llamacpp", priority_scheduling="true"),
            "pools.p: llamacpp servers have no priority scheduling; remove priority_scheduling",
        ),
        # the rest
        ("defaults: {connect: 0s}", "defaults.connect: must be more than 0, got '0s'"),
        ("defaults: {max_body: 32 apples}", "defaults.max_body: '32 apples' has no unit of size; write it like 32MB"),
        ("state: {cache_secret: short}", f"state.cache_secret: {SHORT}"),
        ('state: {cache_secret: ""}', f"state.cache_secret: {SHORT}"),
        ("state: {redis: localhost}", "state.redis: not a Redis URL; write it like redis://127.0.0.1:6379/0"),
        ("keys: [{name: a}]", "keys[0]: 'sha256' is missing"),
        (
            "keys: [{name: a, sha256: my-key}]",
            'keys[0].sha256: not a SHA-256 digest, 64 hex digits: printf %s "$KEY" | sha256sum',
        ),
        (f"keys: [{{name: a, sha256: {DIGEST}, routes: []}}]", "keys[0].routes: is empty; at least one is required"),
        (
            "telemetry: {access_log: stdot}",
            "telemetry.access_log: 'stdot' is not stdout, stderr, off or a path such as ./access.jsonl",
        ),
        ("telemetry: {prompts: always}", "telemetry.prompts: expected never, got 'always'"),
        ("records: {dir: ./records, size: 0}", "records.size: must be more than 0, got 0"),
        ("records: {size: 1GB}", "records: 'dir' is missing"),
    ],
)
def test_a_wrong_value_is_refused_with_location_and_remedy(text: str, message: str) -> None:
    """A single mistake gives a single line."""
    expected_line = 2 if text.startswith("pools") and "\nroutes" in text else 1
    assert refusal(text) == [f"f.yaml:{expected_line}: {message}"]


def test_every_wrong_value_is_reported_in_the_order_of_the_lines() -> None:
    """All errors are reported at once."""
    text = "routes:\n  chat:\n    prefer: cheap\npools:\n  p:\n    backend: vlm\nserver:\n  workers: x\n"
    assert refusal(text) == [
        "f.yaml:2: routes.chat: 'tiers' is missing",
        "f.yaml:3: routes.chat.prefer: expected quality, cost, latency, completion or throughput, got 'cheap'",
        "f.yaml:6: pools.p.backend: no backend 'vlm'; did you mean 'vllm'?",
        "f.yaml:8: server.workers: expected an integer, got 'x'",
    ]


@pytest.mark.parametrize("junk", [None, True, -1, 1e308, "", "$x\n", [], {}, [[]], {"a": {"b": 1}}], ids=repr)
def test_junk_anywhere_gives_no_pydantic_jargon(junk: object) -> None:
    """Junk at any path of the configuration is accepted, or refused with our own message."""
    document = parse(CONTRACT, "f.yaml", {"OPENAI_API_KEY": "k"})
    messages: list[str] = []
    for path in places(document.data):
        try:
            validated(replace(document, data=spoilt(document.data, path, junk), raw={}))
        except ConfigError as error:
            messages += error.problems
    assert len(messages) > 20
    jargon = re.compile(r"Input should|valid dict|Field required|Value error|literal\[|instance of")
    assert [line for line in messages if jargon.search(line) or not line.startswith("f.yaml")] == []


# ---------------------------------------------------------------------------- between sections


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routes: {chat: {tiers: [large, smal]}}", "routes.chat.tiers[1]: no pool 'smal'; did you mean 'small'?"),
        ("routes: {chat: {tiers: [{pool: gpu}]}}", "routes.chat.tiers[0]: no pool 'gpu'; known: small, large"),
        (
            "routes: {chat: {tiers: [small], region: {only: [eu]}}}",
            "routes.chat.tiers[0]: region.only (eu) leaves no endpoint of pool small; its endpoints have no region",
        ),
        (
            "routes: {chat: {tiers: [small], region: {prefer: closest}}}",
            "routes.chat.region.prefer: expected nearest or a list, got 'closest'; write it in [ ]",
        ),
        (
            "routes: {chat: {tiers: [small], region: eu}}",
            "routes.chat.region: expected {only, prefer}, got 'eu'",
        ),
        (
            "routes: {chat: {tiers: [small, small]}}",
            "routes.chat: tier 2 can never be reached: tier 1 takes every request to pool small; "
            "remove one, or give the first a `when`",
        ),
        ("routes: {chat: {name: talk, tiers: [small]}}", "routes.chat.name: the key is the route's name; remove this"),
        ("passthrough: lage", "passthrough: no pool 'lage'; did you mean 'large'?"),
        (
            f"passthrough: large\nkeys: [{{name: a, sha256: {DIGEST}, routes: [chta]}}]",
            "keys[0].routes[0]: no route 'chta'; known: passthrough",
        ),
        (
            f"passthrough: large\nkeys: [{{name: a, sha256: {DIGEST}}}, {{name: a, sha256: {DIGEST[::-1]}}}]",
            "keys[1].name: duplicate of keys[0]; names and digests must be unique",
        ),
        (
            f"passthrough: large\nkeys: [{{name: a, sha256: {DIGEST}}}, {{name: b, sha256: {DIGEST.upper()}}}]",
            "keys[1].sha256: duplicate of keys[0]; names and digests must be unique",
        ),
        (
            "passthrough: large\nserver: {listen: 127.0.0.1:80, admin: 127.0.0.1:80}",
            "server.admin: 127.0.0.1:80 is the same as server.listen; use another port",
        ),
        (
            "passthrough: large\nserver: {cors: {origins: ['*']}}",
            "server.cors.origins: without keys '*' lets every web page use this gateway; list its origins, or add keys",
        ),
        (
            "passthrough: large\nserver: {listen: 0.0.0.0:8080}",
            "server.listen: 0.0.0.0:8080: open mode is for loopback only: add keys:, or listen on 127.0.0.1"
            " (or set server.open: true behind your own authentication)",
        ),
    ],
)
def test_inconsistent_sections_are_refused(text: str, message: str) -> None:
    """References must resolve, and no public port is open by accident."""
    line = POOLS.count("\n") + text.count("\n") + 1
    assert refusal(POOLS + text) == [f"f.yaml:{line}: {message}"]


def test_a_pool_in_a_tier_needs_the_name_of_its_model() -> None:
    """The backend requires a model name in each request."""
    assert refusal(pool(model="") + "routes: {r: {tiers: [p]}}") == [
        "f.yaml:1: pools.p: 'model' is missing: the name its servers know"
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (POOLS, ["f.yaml: no routes: add routes: (policies/presets has one for each workload) or passthrough: POOL"]),
        (ROUTES, ["f.yaml: no pools: add pools:, or one more --config that has them"]),
    ],
)
def test_pools_without_routes_are_refused(text: str, messages: list[str]) -> None:
    """Half a configuration names the missing half."""
    assert refusal(text)[:1] == messages


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "127.8.8.8:0", "localhost:80", "'[::1]:8080'"])
def test_open_mode_is_allowed_on_loopback(listen: str) -> None:
    """Loopback is unreachable from other machines."""
    assert not loaded(f"{POOLS}{ROUTES}server: {{listen: {listen}}}").keys


@pytest.mark.parametrize(
    "consent",
    [
        "server: {listen: '[::]:80', open: true}",
        f"server: {{listen: '0.0.0.0:80'}}\nkeys: [{{name: a, sha256: {DIGEST}}}]",
    ],
)
def test_a_public_listen_address_needs_keys_or_open(consent: str) -> None:
    """A public listen address needs keys or an explicit `open: true`."""
    assert loaded(f"{POOLS}{ROUTES}{consent}").server.listen.port == 80


def test_each_worker_needs_room_for_its_records() -> None:
    """A file of less would keep next to nothing."""
    text = "records: {{dir: ./records, size: {size}}}\nserver: {{workers: 4}}\n"
    message = "f.yaml:1: records.size: must be at least 16MB for each worker: write 64MB or more"
    assert message in refusal(text.format(size="63MB"))
    assert message not in refusal(text.format(size="64MB"))


def test_a_misspelt_region_is_an_error_that_names_the_regions_of_the_pool() -> None:
    """It would leave the tier without an endpoint. One allowed region is enough."""
    placed = pool(endpoints="[{url: http://a:1, region: eu}, {url: http://b:1, region: us}, http://c:1]")
    for name, hint in (("euu", "did you mean 'eu'?"), ("ap", "known: eu, us")):
        assert refusal(placed + f"routes: {{r: {{tiers: [p], region: {{only: [{name}]}}}}}}") == [
            f"f.yaml:2: routes.r.tiers[0]: region.only ({name}) leaves no endpoint of pool p; {hint}"
        ]
    loaded(placed + "routes: {r: {tiers: [p], region: {only: [us, ap]}}}")
