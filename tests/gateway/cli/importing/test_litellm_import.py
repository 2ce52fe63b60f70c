"""LiteLLM's configuration: pools, routes, fallbacks, secrets, and an account of every key."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
import yaml

from gateway.cli.importing.imported_config import Fate
from gateway.cli.importing.litellm_import import import_litellm
from gateway.cli.importing.stack_import import import_stack
from gateway.config.config_errors import ConfigError
from tests.support.import_cases import CANARY, HELM, TEAM, deployment, litellm, loaded
from tests.support.loading_cases import places, spoilt


def pool(params: str, **more: Any) -> dict[str, Any]:
    """The one pool of a file with one deployment; the file is also loaded."""
    found = litellm(deployment(params, **more))
    loaded(found)
    [section] = found.document["pools"].values()
    return dict(section)


# --------------------------------------------------------------------------- the whole of a file


def test_a_whole_file_loads_and_every_key_is_accounted_for() -> None:
    """No key is unknown; each has one fate."""
    found = litellm(TEAM)
    config = loaded(found)
    assert found.account.unknown() == []
    assert sum(found.account.counts().values()) == len(found.account.keys)
    aliases = [alias for route in found.document["routes"].values() for alias in route.get("aliases", ())]
    names = ["chat", "azure-chat", "claude", "embed", "gpt-4", "azure chat", "hidden-one"]
    assert [*config.routes, *aliases] == names
    assert config.passthrough == "any-model"


def test_no_literal_secret_is_written_or_shown() -> None:
    """Variables take their place, and are named."""
    found = litellm(TEAM)
    assert CANARY not in found.text() + "\n".join(found.report())
    assert found.variables.literals == ["AZURE_CHAT_API_KEY"]  # equal literals share a variable


def test_a_literal_gets_no_variable_that_has_a_meaning_of_its_own() -> None:
    """Else the key of OpenAI, or one that another entry refers to, would be sent to the server of the literal."""
    params = "model: openai/m, api_base: 'http://h:1/v1', api_key: sk-literal-000000"
    of_api, of_entry = deployment(params, "openai"), deployment(params, "team")
    of_entry += deployment("model: gpt-4o, api_key: os.environ/TEAM_API_KEY", "other")[12:]
    assert litellm(of_api).document["pools"]["openai"]["api_key"] == "${OPENAI_API_KEY_2}"
    pools = litellm(of_entry).document["pools"]
    assert (pools["team"]["api_key"], pools["other"]["api_key"]) == ("${TEAM_API_KEY_2}", "${TEAM_API_KEY}")


def test_servers_of_one_model_are_one_pool_and_others_are_tiers_by_order() -> None:
    """LiteLLM's `order`."""
    document = litellm(TEAM).document
    assert document["pools"]["chat"] == {
        "backend": "vllm",
        "model": "qwen3-8b",
        "endpoints": ["http://gpu1:8000/v1", "http://gpu2:8000/v1"],
        "drop": ["logit_bias"],
        "concurrent_requests": 40,
        "first_token": "30s",
        "stream_idle": "30s",
    }
    assert document["routes"]["chat"]["tiers"] == [
        "chat",
        {"pool": "chat-2", "after": "failure"},
        {"pool": "claude", "after": "context"},
    ]
    assert document["pools"]["chat-2"]["context_window"] == 1000000
    assert document["pools"]["chat-2"]["requests_per_minute"] == 60


def test_fallbacks_become_tiers_for_their_own_cause() -> None:
    found = litellm(TEAM)
    routes = found.document["routes"]
    assert routes["azure-chat"]["tiers"] == [
        "azure-chat",
        {"pool": "chat", "after": "failure"},
        {"pool": "chat-2", "after": "failure"},
    ]
    assert {key: routes["claude"][key] for key in ("tiers", "limits", "fallback", "escalate", "prefer")} == {
        "tiers": ["claude", {"pool": "azure-chat", "after": "content_filter"}],
        "limits": {"output_tokens": 8000},
        "fallback": {"context": False, "content_filter": True},
        "escalate": ["refusal"],
        "prefer": "latency",
    }
    gone = found.account.entry(("router_settings", "fallbacks", 1, "gone", 0))
    assert gone.text == "gone: there is no route of this name"


def test_no_budget_is_added() -> None:
    """No first token is awaited for less, nothing is sent twice, and nothing is refused for being late."""
    for route in loaded(litellm(TEAM)).routes.values():
        assert (route.ttft, route.tpot, route.total, route.hedge, route.on_miss) == (None,) * 3 + ("off", "best_effort")


def test_settings_come_over_once_the_routers_before_the_programs() -> None:
    document = litellm(TEAM).document
    assert document["defaults"] == {"first_token": "120s", "stream_idle": "120s"}
    assert document["state"] == {"redis": "redis://:${AZURE_CHAT_API_KEY}@${REDIS_HOST}:6380", "answers": "redis"}
    assert {(route["retries"], route["max_attempts"]) for route in document["routes"].values()} <= {
        (1, 2),
        (1, 4),
        (1, 6),
    }
    assert document["routes"]["chat"]["cache"] == {"ttl": "1m", "any_temperature": True}
    assert document["keys"] == [{"name": "master-key", "sha256": sha256(CANARY.encode()).hexdigest()}]


def test_a_file_that_says_nothing_has_litellms_own_retries_and_no_limit_below_ten_minutes() -> None:
    document = litellm(deployment("model: gpt-4o")).document
    assert (document["routes"]["chat"]["retries"], document["routes"]["chat"]["max_attempts"]) == (2, 3)
    assert document["defaults"] == {"first_token": "10m", "stream_idle": "10m"}


def routes(settings: str, *names: str) -> dict[str, Any]:
    """Routes of a file with a deployment for each name."""
    listed = "".join(deployment(f"model: openai/{name}, api_key: os.environ/K", f"'{name}'")[12:] for name in names)
    found = litellm(f"model_list:\n{listed}{settings}")
    assert found.account.unknown() == []
    return dict(loaded(found).routes)


def after(route: Any) -> list[tuple[str, str]]:
    return [(tier.pool, " ".join(sorted(tier.after))) for tier in route.tiers]


def test_attempts_leave_room_for_every_fallback() -> None:
    """Each name has all of its retries."""
    found = routes("router_settings: {num_retries: 4, fallbacks: [{a: [b, c]}]}", "a", "b", "c")
    assert [(route.retries, route.max_attempts) for route in found.values()] == [(4, 15), (4, 5), (4, 5)]


def test_fallbacks_of_a_fallback_come_before_the_next() -> None:
    """As LiteLLM walks them; a default one stands in for a name without its own."""
    lists = "fallbacks: [{a: [b, c]}, {b: [d]}], default_fallbacks: [e]"
    found = routes(f"litellm_settings: {{{lists}}}", "a", "b", "c", "d", "e")
    assert [pool for pool, _ in after(found["a"])] == ["a", "b", "d", "e", "c"]
    assert [pool for pool, _ in after(found["c"])] == ["c", "e"]
    assert [pool for pool, _ in after(found["e"])] == ["e"]


def test_a_list_of_the_router_goes_before_the_programs() -> None:
    found = routes("litellm_settings: {fallbacks: [{a: [b]}]}\nrouter_settings: {fallbacks: [{a: [c]}]}", "a", "b", "c")
    assert after(found["a"]) == [("a", ""), ("c", "failure")]


def test_one_name_may_be_a_fallback_for_several_causes() -> None:
    lists = "fallbacks: [{a: [b, c]}], context_window_fallbacks: [{a: [c]}], content_policy_fallbacks: [{a: [b]}]"
    found = routes(f"router_settings: {{{lists}}}", "a", "b", "c")
    assert after(found["a"]) == [("a", ""), ("b", "content_filter failure"), ("c", "context failure")]


@pytest.mark.parametrize(
    ("lists", "context", "content"),
    [
        ("fallbacks: [{a: [b]}]", True, True),
        ("fallbacks: [{a: [b]}], context_window_fallbacks: [{b: [a]}]", False, True),
        ("fallbacks: [{a: [b]}], content_policy_fallbacks: [{b: [a]}]", True, False),
        ("num_retries: 1", True, False),
    ],
)
def test_a_refusal_goes_to_the_fallbacks_unless_there_is_a_list_for_it(
    lists: str, context: bool, content: bool
) -> None:
    """A list for others alone leaves this name without a fallback for the cause."""
    route = routes(f"router_settings: {{{lists}}}", "a", "b")["a"]
    assert (route.fallback.context, route.fallback.content_filter) == (context, content)


def test_a_target_that_is_no_model_of_the_file_is_told() -> None:
    found = litellm(deployment("model: gpt-4o") + "router_settings: {fallbacks: [{chat: [gone]}]}")
    assert "there is no route of this name" in found.account.entry(("router_settings", "fallbacks", 0, "chat", 0)).text


@pytest.mark.parametrize(
    ("models", "unused"),
    [
        ("{model_name: '*', litellm_params: {model: openai/*, api_key: os.environ/OPENAI_API_KEY}}", 4),
        ("{model_name: chat, litellm_params: {model: anthropic/claude-sonnet-4-5}}", 0),
        ("{model_name: chat, litellm_params: {model: gpt-4o}}", 1),
    ],
)
def test_a_member_of_routes_is_not_told_as_written_where_there_is_none(models: str, unused: int) -> None:
    """Retries, cache and what is dropped have no place in a passthrough; a route to OpenAI drops nothing."""
    settings = "num_retries: 1, drop_params: true, cache: true, cache_params: {type: local, ttl: 60}"
    found = litellm(f"model_list: [{models}]\nlitellm_settings: {{{settings}}}\n")
    keys = [("num_retries",), ("drop_params",), ("cache",), ("cache_params", "ttl")]
    entries = [found.account.entry(("litellm_settings", *key)) for key in keys]
    assert sum(entry.fate is Fate.NONE for entry in entries) == unused
    moved = [entry.text.split(".")[2] for entry in entries if entry.text.startswith("routes.")]
    assert all(member in route for member in moved for route in found.document.get("routes", {}).values())


SERVERS = [f"model: openai/m, api_base: 'http://h{i}:1/v1'" for i in range(3)]


def grouped(*params: str, settings: str = "", backend: str = "openai") -> Any:
    listed = "".join(deployment(each.replace("openai/", f"{backend}/"))[12:] for each in params)
    return loaded(litellm(f"model_list:\n{listed}{settings}"))


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        (("", "", ""), [1, 1, 1]),
        ((", weight: 6", ", weight: 3", ", weight: 3"), [2, 1, 1]),
        ((", rpm: 900", ", rpm: 300", ", rpm: 300"), [3, 1, 1]),
        ((", tpm: 900, weight: 1", ", tpm: 300, weight: 5", ", tpm: 300, weight: 1"), [1, 5, 1]),
    ],
)
def test_apis_of_one_name_share_its_requests_by_their_weights(more: tuple[str, ...], weights: list[float]) -> None:
    """By `weight`, else by `rpm`, else by `tpm`, as LiteLLM's shuffle draws."""
    tiers = grouped(*map("".join, zip(SERVERS, more, strict=True))).routes["chat"].tiers
    assert [(tier.beside, tier.weight) for tier in tiers] == [*zip((False, True, True), weights, strict=True)]


def test_a_deployment_without_a_weight_beside_weighted_ones_is_the_last() -> None:
    """LiteLLM draws it only where no other is left; so with `order`."""
    for key in ("weight", "order"):
        config = grouped(SERVERS[0], SERVERS[1] + f", {key}: 2", SERVERS[2] + f", {key}: 2")
        tiers = config.routes["chat"].tiers
        assert [(tier.beside, set(tier.after)) for tier in tiers] == [
            (False, set()),
            (True, set()),
            (False, {"failure"}),
        ]
        assert "h0" in str(config.pools[tiers[-1].pool].endpoints)


def test_engines_of_one_name_are_one_pool() -> None:
    """Their load and caches are seen: the pool spreads by these."""
    config = grouped(*SERVERS, backend="hosted_vllm")
    assert (len(config.pools), len(config.routes["chat"].tiers)) == (1, 1)


def test_apis_under_latency_based_routing_are_one_pool() -> None:
    config = grouped(*SERVERS, settings="router_settings: {routing_strategy: latency-based-routing}")
    assert len(config.pools) == 1


def test_callers_may_go_on_sending_a_name_that_headers_cannot_carry() -> None:
    """The route has another name, which the report tells."""
    found = litellm(
        deployment("model: gpt-4o", "My Model") + "router_settings: {model_group_alias: {Größtes: My Model}}"
    )
    assert loaded(found).routes["My-Model"].aliases == ("My Model", "Größtes")
    assert "model_list[*].model_name -> routes.My-Model.aliases" in "\n".join(found.report())


def test_the_digest_of_a_master_key_in_a_variable_is_a_variable_too() -> None:
    found = litellm(deployment("model: gpt-4o") + "general_settings: {master_key: os.environ/MASTER}")
    assert loaded(found).keys[0].name == "master-key"
    assert found.document["keys"][0]["sha256"] == "${MASTER_SHA256}"
    assert 'MASTER_SHA256 is the digest of the master key: printf %s "$MASTER" | sha256sum' in found.text()


@pytest.mark.parametrize(
    ("settings", "cache"),
    [
        ("cache: true, cache_params: {type: local}", {"ttl": "10m", "any_temperature": True}),
        ("cache: true, cache_params: {type: local, ttl: 30}", {"ttl": "30s", "any_temperature": True}),
        ("cache: true, cache_params: {type: redis, host: h, port: 1}", {"ttl": "1m", "any_temperature": True}),
        ("cache: true", {"ttl": "1m", "any_temperature": True}),
        ("cache: true, cache_params: {type: qdrant-semantic}", None),
        ("cache: true, cache_params: {type: local, mode: default_off}", None),
        ("cache: false, cache_params: {type: local}", None),
    ],
)
def test_a_cache_comes_over_or_is_named(settings: str, cache: Any) -> None:
    found = litellm(deployment("model: gpt-4o") + f"litellm_settings: {{{settings}}}")
    loaded(found)
    assert found.document["routes"]["chat"].get("cache") == cache
    assert found.account.unknown() == []


def test_a_limit_of_time_comes_over() -> None:
    """Of the deployment, else of the router, else of the program."""
    own = litellm(deployment("model: gpt-4o, timeout: 20")).document["pools"]["chat"]
    assert (own["first_token"], own["stream_idle"]) == ("20s", "20s")
    for settings in ("litellm_settings: {request_timeout: 7}", "router_settings: {timeout: 7}"):
        assert litellm(deployment("model: gpt-4o") + settings).document["defaults"]["first_token"] == "7s"


def test_a_window_of_the_prompt_leaves_room_for_the_answer() -> None:
    """LiteLLM's `max_input_tokens` is of the prompt alone, the window here of both."""
    more = "\n    model_info: {max_input_tokens: 1000, max_output_tokens: 200}"
    text = f"model_list:\n- {{model_name: a, litellm_params: {{model: gpt-4o}}, {more.strip()}}}"
    assert litellm(text).document["pools"]["a"]["context_window"] == 1200


# --------------------------------------------------------------------------- providers


@pytest.mark.parametrize(
    ("params", "section"),
    [
        ("model: openai/gpt-4o", {"backend": "openai", "model": "gpt-4o", "api_key": "${OPENAI_API_KEY}"}),
        ("model: gpt-4o", {"backend": "openai", "model": "gpt-4o", "api_key": "${OPENAI_API_KEY}"}),
        ("model: claude-x", {"backend": "anthropic", "model": "claude-x", "api_key": "${ANTHROPIC_API_KEY}"}),
        ("model: together_ai/a/b", {"backend": "together", "model": "a/b", "api_key": "${TOGETHERAI_API_KEY}"}),
        (
            "model: openai/m, api_base: 'http://h:8000/v1', api_key: none",
            {"backend": "compatible", "model": "m", "endpoints": ["http://h:8000/v1"]},
        ),
        (
            "model: openai/m, api_base: 'http://h:8000/v1/chat/completions'",
            {"backend": "compatible", "model": "m", "endpoints": ["http://h:8000/v1"]},
        ),
        (
            "model: openai/m, api_base: os.environ/MY_BASE_URL, api_key: os.environ/MY_KEY",
            {"backend": "compatible", "model": "m", "endpoints": ["${MY_BASE_URL}"], "api_key": "${MY_KEY}"},
        ),
        (
            "model: openai/a/b, api_base: 'https://openrouter.ai/api/v1', api_key: '${K}'",
            {"backend": "openrouter", "model": "a/b", "api_key": "${K}"},
        ),
        (
            "model: cerebras/m",
            {
                "backend": "compatible",
                "model": "m",
                "endpoints": ["https://api.cerebras.ai/v1"],
                "api_key": "${CEREBRAS_API_KEY}",
            },
        ),
        (
            "model: azure/d, api_base: 'https://r.openai.azure.com/openai/deployments/d?x=1', api_version: v1",
            {
                "backend": "azure",
                "model": "d",
                "base_url": "https://r.openai.azure.com",
                "api_key": "${AZURE_API_KEY}",
                "query": {"api-version": "v1"},
            },
        ),
        (
            "model: azure/d, api_base: 'https://r.openai.azure.com/openai/v1/', api_key: os.environ/K",
            {
                "backend": "openai",
                "model": "d",
                "base_url": "https://r.openai.azure.com/openai/v1",
                "api_key": "${K}",
            },
        ),
        (
            "model: m, custom_llm_provider: hosted_vllm, api_base: 'http://h:1'",
            {"backend": "vllm", "model": "m", "endpoints": ["http://h:1"]},
        ),
        (
            "model: openai/m, api_base: 'http://user:secret@h:1/v1'",
            {"backend": "compatible", "model": "m", "endpoints": ["${CHAT_BASE_URL}"]},
        ),
    ],
)
def test_a_deployment_becomes_a_pool_of_its_backend(params: str, section: dict[str, Any]) -> None:
    assert pool(params) == section


def test_several_keys_of_one_api_share_a_pool() -> None:
    text = deployment("model: gpt-4o, api_key: os.environ/A") + deployment("model: gpt-4o, api_key: os.environ/B")[12:]
    found = litellm(text)
    loaded(found)
    assert found.document["pools"]["chat"]["api_keys"] == ["${A}", "${B}"]


def test_models_with_the_same_server_use_one_pool() -> None:
    """As LiteLLM's users alias a model."""
    params = "model: openai/m, api_base: 'http://h:1/v1'"
    found = litellm(deployment(params, "a") + deployment(params, "b")[12:])
    assert (list(found.document["pools"]), found.document["routes"]["b"]["tiers"]) == (["a"], ["a"])


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("model: bedrock/m", "requests are signed"),
        ("model: vertex_ai/m, vertex_project: p", "requests are signed"),
        ("model: unheard_of/m", "provider is not known"),
        ("model: '*'", "the provider is guessed of each name"),
        ("model: os.environ/MODEL", "the provider is in a variable"),
        ("model: lm_studio/m", "api_base is missing"),
        ("api_base: http://h", "the model is missing"),
    ],
)
def test_a_deployment_without_a_counterpart_is_left_out_with_its_reason(params: str, reason: str) -> None:
    """A file with nothing else is refused, and the reasons are in the error."""
    with pytest.raises(ConfigError, match=reason):
        litellm(deployment(params))


def test_names_that_a_header_cannot_carry_are_changed() -> None:
    """Route names are sent in headers: visible ASCII."""
    found = litellm(deployment("model: gpt-4o", "Größtes Modell"))
    loaded(found)
    assert list(found.document["routes"]) == ["Gr-tes-Modell"]


# --------------------------------------------------------------------------- the account


def test_a_key_that_the_importer_does_not_know_is_reported_as_unknown() -> None:
    """Never silently dropped: the sum of all fates is the number of keys."""
    found = litellm(deployment("model: gpt-4o, brand_new: 1") + "litellm_settings: {other_new: {a: 1, b: [2, 3]}}")
    assert [key[-1] for key in found.account.unknown()] == ["brand_new", "a", 0, 1]
    assert found.account.counts() == {Fate.SAME: 1, Fate.RENAMED: 1, Fate.NONE: 4}
    assert found.report()[-1].startswith("4 keys are not known to this importer")


def test_a_file_of_another_kind_is_refused() -> None:
    for text in ("pools: {}", "[]", "text", "model_list:"):
        with pytest.raises(ConfigError, match="not a configuration of LiteLLM"):
            litellm(text)


ODD = [None, -1.5, "${", "$X y", [{}], {"a": {"b": 1}}, "é\u001b[2J\n", float("inf")]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(("text", "read"), [(TEAM, import_litellm), (HELM, lambda data: import_stack(data, "v"))])
def test_a_file_with_a_strange_value_is_imported_or_refused(text: str, read: Any, odd: Any) -> None:
    """At every place. What is written loads; every key is accounted for; nothing but ConfigError is raised."""
    data, seen = yaml.safe_load(text), set()
    for path in places(data):
        try:
            found = read(spoilt(data, path, odd))
        except ConfigError:
            continue
        assert sum(found.account.counts().values()) == len(found.account.keys)
        assert CANARY not in found.text() + "\n".join(found.report())
        assert all(line.isprintable() for line in found.report())
        if (written := found.text()) not in seen:
            loaded(found)
        seen.add(written)
