"""Loading of merged files, variables and extras: errors and effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.config_errors import ConfigError
from gateway.config.loading import load, load_without_secrets
from tests.support.contract import CONTRACT
from tests.support.loading_cases import POOLS, PRESETS, ROUTES, loaded, pool, refusal

# ---------------------------------------------------------------------------- files and environment


def test_routes_and_fleet_may_be_separate_files() -> None:
    """Later files are merged over earlier files."""
    config = loaded(POOLS, ROUTES, "routes: {chat: {tiers: [small]}}\ndefaults: {max_attempts: 2}")
    assert [tier.pool for tier in config.routes["chat"].tiers] == ["small"]
    assert (list(config.pools), config.routes["chat"].max_attempts) == (["small", "large"], 2)


def test_a_problem_is_located_in_its_file() -> None:
    """The message names the file and line of the wrong value among the merged files."""
    assert refusal(POOLS, "# policy\nroutes:\n  chat: {tiers: [smal]}") == [
        "g.yaml:3: routes.chat.tiers[0]: no pool 'smal'; did you mean 'small'?"
    ]


def test_problems_of_all_files_are_reported_together() -> None:
    """Every file is read before an error is raised."""
    Path("latin.yaml").write_bytes(b"a: \xe9")
    Path("broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError) as caught:
        load([Path("nowhere.yaml"), Path("latin.yaml"), Path(), Path("broken.yaml")], {})
    assert list(caught.value.problems) == [
        "nowhere.yaml: cannot be read: No such file or directory",
        "latin.yaml: not UTF-8 text at byte 3",
        ".: cannot be read: Is a directory",
        "broken.yaml:1:5: not YAML: expected the node content, but found '<stream end>'",
    ]


def test_extension_sections_are_ignored() -> None:
    """`x-...` is a place for anchors."""
    config = loaded(
        "x-vllm: &vllm {backend: vllm, endpoints: [http://a]}\n"
        "pools: {p: {<<: *vllm, model: m}}\n"
        "routes: {r: {tiers: [p]}}"
    )
    assert config.pools["p"].backend == "vllm"


def test_numbers_and_switches_may_come_from_the_environment() -> None:
    """A variable is text; the section converts the text to the field's type."""
    config = loaded(f"{POOLS}{ROUTES}server: {{workers: '${{W}}', open: '${{O:-true}}'}}", W="3")
    assert (config.server.workers, config.server.open) == (3, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: {connect: '${S}'}", "defaults.connect: '${S}' is not understood; write it like 250ms, 2s or 5m"),
        ("server: {workers: '${S}'}", "server.workers: expected an integer, got '${S}'"),
        (
            "routes: {r: {prefer: '${S}', tiers: [p]}}",
            "routes.r.prefer: expected quality, cost, latency, completion or throughput, got '${S}'",
        ),
        (
            pool(endpoints="['${S}']"),
            "pools.p.endpoints[0]: '${S}' is not a server's URL; write it like http://10.0.0.11:8000",
        ),
        (
            pool(tokenizer="'/x/${S}'"),
            "pools.p.tokenizer: '/x/${S}' is neither an encoding nor a file; "
            "known: o200k_base, cl100k_base, o200k_harmony",
        ),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_shown(text: str, message: str) -> None:
    """Messages end up in logs: a message shows the variable, never the value."""
    assert refusal(text, S="sk-canary-0123456789") == [f"f.yaml:1: {message}"]


def test_a_short_variable_value_is_not_replaced_inside_words() -> None:
    """The value `a` occurs in many words."""
    assert refusal("server: {listen: '${S}'}", S="a") == [
        "f.yaml:1: server.listen: '${S}' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080"
    ]


def test_a_literal_secret_is_not_shown_either() -> None:
    """A key written without quotes is a number, and still a key."""
    assert refusal(pool(api_key="12345678", headers="{x-key: 87654321}")) == [
        "f.yaml:1: pools.p.api_key: expected text (in quotes), got another value",
        "f.yaml:1: pools.p.headers.x-key: expected text (in quotes), got another value",
    ]


# ---------------------------------------------------------------------------- nothing but the environment


def test_the_example_of_the_contract_loads() -> None:
    """Every section and every documented form."""
    config = loaded(CONTRACT, OPENAI_API_KEY="k")
    assert (len(config.pools), len(config.urls()), list(config.routes)) == (3, 4, ["chat"])


def test_one_api_key_is_a_configuration() -> None:
    """The API takes every model name unchanged."""
    config = load([], {"OPENAI_API_KEY": "sk-1"})
    assert (list(config.pools), config.passthrough, dict(config.routes)) == (["openai"], "openai", {})
    assert config.pools["openai"].backend_config().api_key == "sk-1"
    assert dict(config.urls()) == {"openai/api.openai.com:443": "https://api.openai.com/v1"}


def test_every_api_key_is_a_pool_and_the_first_is_the_passthrough() -> None:
    """The order follows the catalog of backends, not the environment."""
    config = load([], {"GEMINI_API_KEY": "g", "GROQ_API_KEY": "q", "OPENAI_API_KEY": "o", "XAI_API_KEY": ""})
    assert (list(config.pools), config.passthrough) == (["openai", "groq", "gemini"], "openai")


def test_the_base_url_of_an_api_may_come_from_the_environment_too() -> None:
    """Same variable as in OpenAI's own clients."""
    config = load([], {"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1/"})
    assert dict(config.urls()) == {"openai/127.0.0.1:9": "http://127.0.0.1:9/v1"}


def test_a_wrong_variable_is_named() -> None:
    """There is no file to look into."""
    with pytest.raises(ConfigError) as caught:
        load([], {"OPENAI_API_KEY": "sk-1", "OPENAI_BASE_URL": "localhost"})
    assert str(caught.value) == (
        "environment variable OPENAI_BASE_URL: pools.openai.base_url: "
        "'${OPENAI_BASE_URL}' is not a server's URL; write it like http://10.0.0.11:8000"
    )


def test_an_empty_environment_gives_a_helpful_error() -> None:
    """The error lists the ways to configure the gateway, and the demo, which needs no configuration."""
    with pytest.raises(ConfigError) as caught:
        load([], {"HOME": "/"})
    message = str(caught.value)
    assert message.startswith("no --config, and none of OPENAI_API_KEY, GROQ_API_KEY, ")
    assert message.endswith(" is set: name a file, set a key, or try `firsttoken demo`")


# ---------------------------------------------------------------------------- shipped files


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_shipped_policy_loads_over_a_small_fleet(preset: Path, here: Path) -> None:
    """A preset only needs a fleet with pools of the usual names."""
    fleet = here / "fleet.yaml"
    fleet.write_text(POOLS + "  openai: {backend: openai, model: gpt-4.1-mini, api_key: k}\n")
    assert load([fleet, preset], {}).routes


# ---------------------------------------------------------------------------- cache events

EVENTS = "[{url: http://a, kv_events: tcp://a:5557}]"


def test_kv_events_need_a_backend_that_publishes_them() -> None:
    """Ollama publishes no KV events."""
    assert refusal(pool(backend="ollama", endpoints=EVENTS) + "routes: {r: {tiers: [p]}}") == [
        "f.yaml:1: pools.p.endpoints[0].kv_events: ollama servers publish no KV events; remove this"
    ]


def test_events_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at load time."""
    monkeypatch.setattr("gateway.config.loading.find_spec", lambda name: None)
    assert refusal(pool(endpoints=EVENTS) + "routes: {r: {tiers: [p]}}") == [
        "f.yaml:1: pools.p.endpoints[0].kv_events: requires a package that is not installed: "
        "pip install 'firsttoken[kvevents]'"
    ]


def test_without_events_their_package_is_not_loaded() -> None:
    """ZMQ is an extra."""
    code = "import sys, gateway.app, gateway.cli.main; assert 'zmq' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------- traces

ROUTED = pool() + "routes: {r: {tiers: [p]}}\n"


def test_a_collector_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at load time with the pip command, if all of OpenTelemetry or a part is missing."""
    expected = ["f.yaml:3: telemetry.otlp: requires packages that are not installed: pip install 'firsttoken[otel]'"]
    monkeypatch.setattr("gateway.config.loading.find_spec", lambda name: None)
    assert refusal(ROUTED + "telemetry: {otlp: http://c:4318}") == expected

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("gateway.config.loading.find_spec", absent)
    assert refusal(ROUTED + "telemetry: {otlp: http://c:4318}") == expected


def test_a_collector_url_has_no_signal_path() -> None:
    """Traces and metrics have separate paths."""
    assert refusal(ROUTED + "telemetry: {otlp: http://c:4318/base/v1/traces}") == [
        "f.yaml:3: telemetry.otlp: the gateway appends the path of each signal; write http://c:4318/base"
    ]


def test_a_share_of_traces_is_at_most_1() -> None:
    """1 is the largest share: all traces."""
    assert refusal(ROUTED + "telemetry: {traces: 100}") != []


def test_without_a_collector_opentelemetry_is_not_loaded() -> None:
    """OpenTelemetry is an extra, and takes 0.2 s to load."""
    code = "import sys, gateway.app, gateway.cli.main; assert not any(m.startswith('opentel') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_variable_that_is_not_set_hides_nothing_of_another_key_or_file() -> None:
    """Nor do placeholders show: of such a value its variable alone is told. In the order of files and lines."""
    Path("a.yaml").write_text(
        "pools:\n  large: {backend: vllm, model: m, endpoints: ['${URL}', 'http://${HOST}:8000'], api_key: '${KEY}'}\n"
    )
    Path("b.yaml").write_text(
        "state: {redis: '${REDIS}'}\nroutes:\n  chat: {tiers: [larg]}\nkeys: [{name: a, sha256: '${SHA}'}]\n"
    )
    unset = "the environment variable {0} is not set; set it, or write ${{{0}:-default}}"
    expected = [
        f"a.yaml:2: pools.large.endpoints[0]: {unset.format('URL')}",
        f"a.yaml:2: pools.large.endpoints[1]: {unset.format('HOST')}",
        f"a.yaml:2: pools.large.api_key: {unset.format('KEY')}",
        f"b.yaml:1: state.redis: {unset.format('REDIS')}",
        "b.yaml:3: routes.chat.tiers[0]: no pool 'larg'; did you mean 'large'?",
        f"b.yaml:4: keys[0].sha256: {unset.format('SHA')}",
    ]
    with pytest.raises(ConfigError) as caught:
        load([Path("a.yaml"), Path("b.yaml")], {})
    assert list(caught.value.problems) == expected
    with pytest.raises(ConfigError) as without:
        load_without_secrets([Path("a.yaml"), Path("b.yaml")], {})
    assert list(without.value.problems) == [expected[4]]
    Path("b.yaml").write_text(Path("b.yaml").read_text().replace("larg]", "large], ttft: {budget: 800}"))
    Path("c.yaml").write_text("x: [")
    with pytest.raises(ConfigError) as broken:
        load([Path("a.yaml"), Path("b.yaml"), Path("c.yaml")], {})
    assert "b.yaml:3: routes.chat.ttft.budget: 800 has no unit; write '800ms' or '800s'" in broken.value.problems
    assert broken.value.problems[-1].startswith("c.yaml:1:5: not YAML")


def test_files_are_checked_without_their_secrets() -> None:
    """A placeholder stands for each; the keys are told."""
    Path("a.yaml").write_text(
        "pools: {p: {backend: vllm, model: m, endpoints: ['${URL}'], api_key: '${KEY}'}}\n"
        "routes: {chat: {tiers: ['p'], ttft: {budget: '${TIME}'}}}\nserver: {listen: '${LISTEN}'}\n"
        "keys: [{name: a, sha256: '${A}'}, {name: b, sha256: '${B}'}]\nstate: {redis: '${REDIS}'}\n"
    )
    config, unset = load_without_secrets([Path("a.yaml")], {"KEY": "sk-set"})
    assert config is not None
    assert unset == [
        "keys[0].sha256",
        "keys[1].sha256",
        "pools.p.endpoints[0]",
        "routes.chat.ttft.budget",
        "server.listen",
        "state.redis",
    ]
