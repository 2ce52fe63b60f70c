"""Model name to Route."""

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
    """To the letter."""
    assert Routes(ROUTES).match("agent") is AGENT
    assert refused(Routes(ROUTES), "Agent").status == 404


def test_an_unknown_model_is_404_and_the_known_ones_are_named() -> None:
    """In OpenAI's words for it, sorted, so that a misspelling mends itself."""
    refusal = refused(Routes(ROUTES), "gpt")
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert refusal.message == "The model 'gpt' does not exist here. Known: agent, chat."


def test_what_is_repeated_of_a_model_name_is_bounded() -> None:
    """A name may be as long as a body, and there may be many routes."""
    many = Routes({f"route-{i}": CHAT for i in range(1000)})
    assert len(refused(many, "x" * 100_000).message) < 500


def test_passthrough_takes_every_other_name() -> None:
    """A route that has a name keeps it."""
    routes = Routes(ROUTES, REST)
    assert [routes.match(name) for name in ("chat", "gpt", "passthrough", "")] == [CHAT, REST, REST, REST]


def test_a_route_that_is_not_the_keys_does_not_exist() -> None:
    """To the word: names are only for those who may use them."""
    guarded = Routes(ROUTES, open=False)
    admit(ANYONE, AGENT, "agent")
    admit(Tenant("web", routes=frozenset({"agent"})), AGENT, "agent")
    with pytest.raises(ApiError) as forbidden:
        admit(Tenant("web", routes=frozenset({"chat"})), AGENT, "agent")
    with pytest.raises(ApiError) as absent:
        guarded.match("other")
    assert forbidden.value.message.replace("agent", "other") == absent.value.message
    assert (forbidden.value.status, forbidden.value.code) == (absent.value.status, absent.value.code)


def test_the_headers_that_policies_look_at_are_known_beforehand() -> None:
    """The API keeps these and no others."""
    tiers = [{"pool": "small", "when": {"header.x-team": "web", "stream": True}}, "large"]
    more = [{"pool": "small", "when": {"header.X-Region": "eu"}}, {"pool": "small", "when": {"turns": "> 3"}}]
    routes = Routes({"chat": route(tiers=tiers)}, passthrough=route(tiers=more))
    assert {name.lower() for name in routes.wanted_headers()} == {"x-team", "x-region"}
    assert Routes({"chat": route()}).wanted_headers() == frozenset()
