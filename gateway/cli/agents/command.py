"""`firsttoken agents`: the settings of a coding agent for a running gateway, to be pasted. Writes nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from gateway.cli.agents.recipes import AGENTS, GatewayFacts, settings, shown
from gateway.cli.gateway_client import ErrorReply, Gone, ask, ask_admin, authorization, key_in
from gateway.config.config_errors import ConfigError, did_you_mean

PLACEHOLDER = "YOUR-KEY"
DATA = "http://127.0.0.1:8080"
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of a machine
_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)  # needs no quotes in a shell, JSON, TOML or YAML
MOST_BYTES = 4 * 2**20  # of a list of models


def agents(args: argparse.Namespace) -> int:
    """Raises ConfigError without a gateway at the address, and for a name that it does not have."""
    if args.agent is None:
        print("\n".join(f"{agent.name:12} {agent.title}" for agent in AGENTS.values()))
        return 0
    if (agent := AGENTS.get(args.agent)) is None:
        raise ConfigError([f"firsttoken: no agent '{args.agent}'{did_you_mean(args.agent, tuple(AGENTS))}"])
    url = (args.url or data_url(args.admin)).removesuffix("/v1")
    facts = asked(url, key_in(args.key_env), args.model, args.small_model)
    print("\n".join(shown(settings(agent, facts))))
    return 0


def data_url(admin: str | None) -> str:
    """Address of the data port; by the configuration of the gateway with this admin port. Raises ConfigError."""
    if admin is None:
        return DATA
    found, own = ask_admin(admin, "/config"), urlsplit(admin)
    try:
        listen, tls = urlsplit(f"//{found['server']['listen']}"), found["server"]["tls"]
        host, port = listen.hostname or "", listen.port
    except (KeyError, TypeError, ValueError):
        raise ConfigError([f"{admin}: this is not the admin port of a gateway of this version"]) from None
    if not port:
        raise ConfigError([f"{admin}: the gateway was given no port; name its address: --url URL"])
    host = (own.hostname or "") if host in EVERYWHERE else host
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def asked(url: str, key: str, model: str | None = None, small_model: str | None = None) -> GatewayFacts:
    """Ask the gateway at `url` for its models. `model`: None takes the first of the list. `key`: empty for none,
    and never part of the result."""
    windows = _windows(url, key)
    for name in filter(None, (model, small_model)):
        if name not in windows:
            raise ConfigError([f"{url}: no model '{name}'{did_you_mean(name, tuple(windows))}"])
    if not windows:
        raise ConfigError([f"{url}: the gateway lists no model; name a route in its configuration"])
    chosen = model or next(iter(windows))
    return GatewayFacts(url, PLACEHOLDER, chosen, small_model or chosen, windows[chosen])


def _windows(url: str, key: str) -> Mapping[str, int | None]:
    """Context windows by model."""
    try:
        listed = ask(url, "/v1/models", headers=authorization(key), most=MOST_BYTES)["data"]
        found = {str(each["id"]): each.get("max_model_len") for each in listed if each["owned_by"] == "firsttoken"}
    except ErrorReply as reply:
        hint = "; name the variable of a key: --key-env NAME" if reply.status == 401 else ""
        raise ConfigError([f"{url}: {reply} for its list of models{hint}"]) from None
    except (Gone, KeyError, TypeError) as error:
        raise ConfigError([f"{url}: this is not the data port of a running gateway: {error}"]) from None
    return {name: window for name, window in found.items() if _PLAIN.fullmatch(name)}
