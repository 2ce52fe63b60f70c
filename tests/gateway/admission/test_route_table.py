"""Routes by model name."""

from __future__ import annotations

import pytest

from gateway.admission.auth import ANYONE, Routes, Tenant, admit
from gateway.api.api_error import ApiError
from tests.gateway.builders import route

CHAT, AGENT, REST = route("chat"), route("agent"), route("passthrough")
ROUTES = {"chat": CHAT, "agent": AGENT}


def refused(routes: Routes, model: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        routes.match(model)
    return caught.value


def test_the_model_names_the_route() -> None:
    """Case matters."""
    assert Routes(ROUTES).match("agent") is AGENT
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
    assert [routes.match(name) for name in ("chat", "gpt", "passthrough", "")] == [CHAT, REST, REST, REST]


def test_a_route_outside_the_keys_routes_looks_unknown() -> None:
    """With an equal message: route names are for permitted keys only."""
    guarded = Routes(ROUTES, open=False)
    admit(ANYONE, AGENT, "agent")
    admit(Tenant("web", routes=frozenset({"agent"})), AGENT, "agent")
    with pytest.raises(ApiError) as forbidden:
        admit(Tenant("web", routes=frozenset({"chat"})), AGENT, "agent")
    with pytest.raises(ApiError) as absent:
        guarded.match("other")
    assert forbidden.value.message.replace("agent", "other") == absent.value.message
    assert (forbidden.value.status, forbidden.value.code) == (absent.value.status, absent.value.code)


def test_wanted_headers_are_those_of_all_conditions() -> None:
    """The API keeps these headers and no others."""
    tiers = [{"pool": "small", "when": {"header.x-team": "web", "stream": True}}, "large"]
    more = [{"pool": "small", "when": {"header.X-Region": "eu"}}, {"pool": "small", "when": {"turns": "> 3"}}]
    routes = Routes({"chat": route(tiers=tiers)}, passthrough=route(tiers=more))
    assert {name.lower() for name in routes.wanted_headers()} == {"x-team", "x-region"}
    assert Routes({"chat": route()}).wanted_headers() == frozenset()
