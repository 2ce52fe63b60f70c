"""Names that callers send: aliases, models of pools, and names that never match."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.notes import notes
from tests.support.loading_cases import DIGEST, loaded, refusal

POOLS = """\
pools:
  p: {backend: vllm, model: m, endpoints: [http://a:1], adapters: {names: [sql]}}
  q: {backend: ollama, models: [x, y, "*"]}
routes:
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (
            "  a: {tiers: [p], aliases: [a]}",
            "f.yaml:5: routes.a.aliases[0]: 'a' is the name of the route itself; remove it",
        ),
        (
            "  a: {tiers: [p], aliases: [b]}\n  b: {tiers: [p]}",
            "f.yaml:5: routes.a.aliases[0]: 'b' never gets here: it is the name of route b; keep one",
        ),
        (
            "  a: {tiers: [p], aliases: [gpt-*]}\n  b: {tiers: [p], aliases: [o, gpt-*]}",
            "f.yaml:6: routes.b.aliases[1]: 'gpt-*' never gets here: it is the name of routes.a.aliases[0]; keep one",
        ),
        (
            "  a: {tiers: [p], aliases: [q/x]}",
            "f.yaml:3: pools.q.models[0]: 'q/x' never gets here: it is the name of routes.a.aliases[0]; keep one",
        ),
        (
            "  a: {tiers: [p], aliases: [q/*]}",
            "f.yaml:3: pools.q.models[2]: 'q/*' never gets here: it is the name of routes.a.aliases[0]; keep one",
        ),
        (
            "  q/y: {tiers: [p]}",
            "f.yaml:3: pools.q.models[1]: 'q/y' never gets here: it is the name of route q/y; keep one",
        ),
        (
            "  a: {tiers: [p], aliases: [sql]}",
            "f.yaml:2: pools.p.adapters.sql: 'sql' never gets here: it is the name of routes.a.aliases[0]; keep one",
        ),
        (
            "  a: {tiers: [p], aliases: [gpt-**]}",
            "f.yaml:5: routes.a.aliases[0]: 'gpt-**': one * stands for any characters; write it once",
        ),
        (
            '  a: {tiers: [p], aliases: [" a b"]}',
            "f.yaml:5: routes.a.aliases[0]: ' a b' is not a model name: printable text without blanks around it only",
        ),
        (
            "  a: {tiers: [p], aliases: gpt-4o}",
            "f.yaml:5: routes.a.aliases: expected a list, got 'gpt-4o'; write it in [ ]",
        ),
        (
            "  a: {tiers: [q]}",
            "f.yaml:3: pools.q: 'model' is missing: the name its servers know;"
            " of models, a route uses the one that 'model' names",
        ),
    ],
)
def test_a_name_that_never_matches_is_an_error_with_both_places(routes: str, problem: str) -> None:
    assert refusal(POOLS + routes) == [problem]


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ("[gpt-*]", "pools.q.models[0]: 'gpt-*' is no model: write its whole name, or '*' for every model"),
        ("[a, a]", "pools.q.models: 'a' is there twice"),
        ("[a b]", "pools.q.models[0]: a name is sent in a header: visible ASCII without spaces only"),
        ("gpt-4o", "pools.q.models: expected a list, got 'gpt-4o'; write it in [ ]"),
    ],
)
def test_a_wrong_list_of_models_is_an_error(models: str, problem: str) -> None:
    assert refusal(f"pools: {{q: {{backend: ollama, models: {models}}}}}") == [f"f.yaml:1: {problem}"]


def test_models_alone_are_a_configuration() -> None:
    """`*` may stand by itself; all models of a pool are one route."""
    config = loaded('pools: {q: {backend: ollama, models: "*"}}')
    assert (config.pools["q"].models, list(config.model_routes), [route.name for route in config.all_routes]) == (
        ("*",),
        ["q"],
        ["q/*"],
    )


def test_a_key_may_be_for_the_models_of_a_pool() -> None:
    key = f"keys: [{{name: a, sha256: {DIGEST}, routes: [q/*]}}]\n"
    assert loaded(POOLS + "  a: {tiers: [p]}\n" + key).keys[0].routes == ("q/*",)


def test_a_passthrough_behind_an_alias_for_everything_is_noted() -> None:
    config = loaded(POOLS + '  a: {tiers: [p], aliases: ["*"]}\npassthrough: q\n')
    assert "note: passthrough never acts: the alias '*' of route a takes every name" in notes(config)


@pytest.mark.parametrize(
    ("allowed", "models"),
    [("[passthrough]", ["x", "y"]), ("[passthrough, q/*]", []), ("[a]", []), (None, [])],
)
def test_models_that_a_pool_takes_from_a_key_for_the_passthrough_are_noted(
    allowed: str | None, models: list[str]
) -> None:
    """The names were passed on for this key before the pool listed these. `z` is a route all the same."""
    pools = POOLS.replace("[x, y, ", "[x, y, z, ")
    routes = "" if allowed is None else f", routes: {allowed}"
    text = f"  a: {{tiers: [p], aliases: [z]}}\npassthrough: p\nkeys: [{{name: k, sha256: {DIGEST}{routes}}}]\n"
    assert [line for line in notes(loaded(pools + text)) if "404" in line] == [
        f"note: key k may use passthrough, and gets a 404 for {model}, which is a model of pool q:"
        " add q/* to its routes"
        for model in models
    ]


def test_no_route_has_the_name_of_the_route_of_a_pools_models() -> None:
    """Else a key of the one could use the other."""
    text = 'pools:\n  p: {backend: ollama, model: m, models: [x]}\nroutes:\n  "p/*": {tiers: [p]}\n'
    assert refusal(text) == [
        "f.yaml:4: routes.\"p/*\": 'p/*' is the name of the route of all models of pool p; choose another"
    ]
