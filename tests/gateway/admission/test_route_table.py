"""Routes by model name."""

from __future__ import annotations

import pytest

from gateway.admission.auth import ANYONE, Tenant
from gateway.admission.route_table import PoolModels, RoutedName, Routes
from gateway.api.api_error import ApiError
from tests.support.builders import route

CHAT, AGENT, REST = route("chat"), route("agent"), route("passthrough")
ROUTES = {"chat": CHAT, "agent": AGENT}


def refused(routes: Routes, model: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        routes.match(model)
    return caught.value


def test_the_model_names_the_route() -> None:
    """Case matters."""
    assert Routes(ROUTES).match("agent").route is AGENT
    assert refused(Routes(ROUTES), "Agent").status == 404


def test_an_unknown_model_is_404_with_the_known_models() -> None:
    """In OpenAI's wording, sorted, so that callers can correct a misspelling."""
    refusal = refused(Routes(ROUTES), "gpt")
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert refusal.message == "The model 'gpt' does not exist here. Known: agent, chat."


def test_an_error_message_repeats_a_bounded_model_name() -> None:
    """A name can be as long as a body, and there can be many routes."""
    many = Routes({f"route-{i}": CHAT for i in range(1000)})
    assert len(refused(many, "x" * 100_000).message) < 500


def test_passthrough_takes_every_other_name() -> None:
    """A named route keeps its name."""
    routes = Routes(ROUTES, REST)
    found = [routes.match(name) for name in ("chat", "gpt", "passthrough")]
    assert found == [RoutedName(CHAT), RoutedName(REST, "gpt"), RoutedName(REST, "passthrough")]


def test_a_route_outside_the_keys_routes_looks_unknown() -> None:
    """With an equal message: route names are for permitted keys only."""
    routes, web = Routes(ROUTES), Tenant("web", routes=frozenset({"chat"}))
    routes.admit(ANYONE, AGENT, "agent")
    routes.admit(Tenant("web", routes=frozenset({"agent"})), AGENT, "agent")
    with pytest.raises(ApiError) as forbidden:
        routes.admit(web, AGENT, "agent")
    with pytest.raises(ApiError) as absent:
        routes.match("other", web)
    assert forbidden.value.message.replace("agent", "other") == absent.value.message
    assert (forbidden.value.status, forbidden.value.code) == (absent.value.status, absent.value.code)


def test_wanted_headers_are_those_of_all_conditions() -> None:
    """The API keeps these headers and no others."""
    tiers = [{"pool": "small", "when": {"header.x-team": "web", "stream": True}}, "large"]
    more = [{"pool": "small", "when": {"header.X-Region": "eu"}}, {"pool": "small", "when": {"turns": "> 3"}}]
    routes = Routes({"chat": route(tiers=tiers)}, passthrough=route(tiers=more))
    assert {name.lower() for name in routes.wanted_headers()} == {"x-team", "x-region"}
    assert Routes({"chat": route()}).wanted_headers() == frozenset()


# --------------------------------------------------------------------------- aliases and models of pools


OPENAI, OLLAMA = route("openai/*"), route("ollama/*")
MODELS = {"openai": PoolModels(OPENAI, ["gpt-4o", "o3", "*"]), "ollama": PoolModels(OLLAMA, ["llama3.2", "o3"])}
CODING = route("coding", aliases=["claude-*", "claude-opus-*", "gpt-4o", "openai/gpt-*"])
NAMED = Routes({"chat": CHAT, "coding": CODING}, models=MODELS)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("chat", RoutedName(CHAT)),
        ("claude-sonnet-9", RoutedName(CODING, via="claude-*")),
        ("claude-opus-9", RoutedName(CODING, via="claude-opus-*")),
        ("gpt-4o", RoutedName(CODING, via="gpt-4o")),
        ("openai/gpt-4o", RoutedName(OPENAI, "gpt-4o", "openai/gpt-4o")),
        ("openai/gpt-9", RoutedName(CODING, via="openai/gpt-*")),
        ("openai/ft:a/b", RoutedName(OPENAI, "ft:a/b", "openai/*")),
        ("llama3.2", RoutedName(OLLAMA, "llama3.2", "ollama/llama3.2")),
        ("ollama/o3", RoutedName(OLLAMA, "o3", "ollama/o3")),
    ],
)
def test_an_exact_name_comes_before_a_pattern_and_a_longer_pattern_before_a_shorter(
    model: str, found: RoutedName
) -> None:
    """A model has the name POOL/MODEL, and its own where no other pool lists it."""
    assert NAMED.match(model) == found


@pytest.mark.parametrize("model", ["o3", "openai/", "ollama/qwen", "claude", "OPENAI/gpt-4o"])
def test_a_name_without_a_single_place_is_unknown(model: str) -> None:
    """Two pools list o3; ollama takes the models that it lists, and no others."""
    assert refused(NAMED, model).status == 404


TAGGED = {
    "ollama": PoolModels(
        OLLAMA, ["llama3.2:latest", "llama3.2:1b", "qwen3:8b", "hf.co/x/y:Q4", "gemma3:1b", "gemma3:4b", "*"]
    ),
    "other": PoolModels(OPENAI, ["qwen3:8b", "phi4:14b", "ft:gpt-4o:org:x", "same:1", "same:2"]),
}


@pytest.mark.parametrize(
    ("model", "via"),
    [
        ("llama3.2", "ollama/llama3.2:latest"),
        ("llama3.2:1b", "ollama/llama3.2:1b"),
        ("hf.co/x/y", "ollama/hf.co/x/y:Q4"),
        ("phi4", "other/phi4:14b"),
        ("other/phi4", "other/phi4:14b"),
    ],
)
def test_a_model_is_found_without_its_tag(model: str, via: str) -> None:
    """`latest`, as Ollama means it, or the only one."""
    found = Routes({"chat": CHAT}, models=TAGGED).match(model)
    assert (found.via, found.model) == (via, via.partition("/")[2])


@pytest.mark.parametrize(
    ("model", "several"),
    [
        ("qwen3", "ollama/qwen3:8b or other/qwen3:8b"),
        ("qwen3:8b", "ollama/qwen3:8b or other/qwen3:8b"),
        ("gemma3", "ollama/gemma3:1b or ollama/gemma3:4b"),
        ("other/same", "other/same:1 or other/same:2"),
    ],
)
def test_a_name_of_several_models_is_refused_with_all_of_them(model: str, several: str) -> None:
    """Those that the key may use; one of them alone is meant."""
    routes = Routes({"chat": CHAT}, models=TAGGED)
    refusal = refused(routes, model)
    assert (refusal.status, refusal.code) == (404, "model_not_found")
    assert refusal.message == f"The model '{model}' is several here: {several}. Name one of them."
    assert Routes({"chat": CHAT}, REST, TAGGED).match(model) == RoutedName(REST, model)
    assert routes.match("qwen3", Tenant("web", routes=frozenset({OLLAMA.name}))).via == "ollama/qwen3:8b"


@pytest.mark.parametrize("model", ["ft:gpt-4o", "ft", "llama3", "llama3.2:", ":latest", ""])
def test_other_parts_of_a_name_are_no_name(model: str) -> None:
    """A tag is what follows the only colon."""
    assert refused(Routes({"chat": CHAT}, models=TAGGED), model).message.startswith(
        f"The model '{model}' does not exist"
    )


def test_a_404_names_the_nearest_names() -> None:
    """The names that the caller may use, and no others; the log has the name that was asked for."""
    refusal = refused(NAMED, "lama3.2")
    assert refusal.message == "The model 'lama3.2' does not exist here. Did you mean ollama/llama3.2?"
    assert refusal.logged == "unknown model lama3.2"
    with pytest.raises(ApiError) as guarded:
        NAMED.match("lama3.2", Tenant("web", routes=frozenset({"chat"})))
    assert guarded.value.message == "The model 'lama3.2' does not exist here. Known: chat."


def test_a_listed_name_can_be_sent() -> None:
    """Routes, aliases with their patterns, listed models; `openai/*` is no model."""
    listed = NAMED.listed(ANYONE)
    assert listed == ["chat", "coding", *CODING.aliases, "openai/gpt-4o", "openai/o3", "ollama/llama3.2", "ollama/o3"]
    assert all(NAMED.match(name) for name in listed)


@pytest.mark.parametrize(
    "model", ["tell me a story", "a\n\x1b[2J", "x" * 101, "ü", "", "my-sk-0123456789abcdefgh", "a-wombatkey"]
)
def test_a_name_that_may_be_a_prompt_or_a_key_is_not_logged(model: str) -> None:
    """A mistaken client puts either into `model`. A short placeholder in a header of keys is no key."""
    headers = {"authorization": "Bearer wombatkey", "api-key": "none"}
    with pytest.raises(ApiError) as caught:
        Routes(ROUTES).match(model, ANYONE, headers)
    assert caught.value.logged == "unknown model"
    with pytest.raises(ApiError) as plain:
        Routes(ROUTES).match("none-such/model:7b", ANYONE, headers)
    assert plain.value.logged == "unknown model none-such/model:7b"
