"""`firsttoken up`: finds model servers, shows them, and serves them; `firsttoken serve` without a file does so unasked.

An API gets only a free request for its list of models, unless the user agrees to time a first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from textwrap import shorten

from gateway import serve as server
from gateway.cli.foreground import may_ask
from gateway.cli.tables import aligned
from gateway.cli.up.asking import TOKEN_TIME, ask, first_tokens
from gateway.cli.up.known_servers import FoundServer, Reach, apis, local_servers
from gateway.cli.up.tier_models import tier_models
from gateway.cli.up.written_config import config_text, named
from gateway.config.config_errors import ConfigError
from gateway.config.loading import load, validated
from gateway.config.models import Config
from gateway.config.notes import notes
from gateway.config.yaml_source import parse
from gateway.part_list import CONFIG
from gateway.process import serving_line
from gateway.reload import ConfigSource
from gateway.synthetic_request import PING
from gateway.tokenize.tokenizers import EncoderError
from policies.routes.model_names import is_pattern

FILE = Path("firsttoken.yaml")
PORT, ADMIN_PORT = 8080, 9090
TRIED = 20  # ports from the default upwards
SHOWN_MODELS = 3
SHOWN_WIDTH = 60  # columns of the names of models
QUESTION = (
    "Time the first token of {models}? A prompt of one word for each, and at most 16 tokens of answer:"
    " less than $0.01 together. [y/N] "
)
PASTE = """
base_url  {url}/v1      models: {names}
page      {admin}/dashboard   in a terminal: firsttoken top --admin {admin}

curl {url}/v1/chat/completions -d {body}
python -c "from openai import OpenAI; print(OpenAI(base_url='{url}/v1', api_key='none').models.list())"
ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL={name} claude

Ctrl-C ends it.
"""
NOTHING = (
    "no server was found: no --config, no answer on {ports} of 127.0.0.1, and no key in the environment"
    " (OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY ...): set a key, start a server, name a file, or try"
    " `firsttoken demo`"
)


def up(args: argparse.Namespace) -> int:
    """Run `up`. `args`: port, admin_port (None: the default or the next free port), local (ports), tokens, write."""
    if args.write and FILE.exists():
        raise ConfigError([f"{FILE} exists and is not overwritten; serve it: firsttoken serve --config {FILE}"])
    port = _free_port(PORT) if args.port is None else args.port
    admin = _free_port(ADMIN_PORT) if args.admin_port is None else args.admin_port
    found = discovered(os.environ, args.local, port)
    if args.tokens is not False:
        found = asyncio.run(first_tokens([(each, _timed_models(each, args.tokens)) for each in found]))
    print(*table(found), sep="\n", flush=True)
    if args.tokens is None and (priced := _agreed(found)):
        found = asyncio.run(first_tokens([(each, _timed_models(each, each in priced)) for each in found]))
        print("\n".join(table(found)), flush=True)
    text = text_of(found, port, admin, access_log="off", ports=args.local)
    if args.write:
        _write(text)
    config = _config(text)
    source = ConfigSource(lambda: load([FILE], os.environ, CONFIG), [FILE]) if args.write else None
    return server.serve(config, source, lambda url, admin_url: greeting_of(config, url, admin_url))


def serve_found(args: argparse.Namespace) -> int:
    """`serve` without a file. A reload looks for servers again."""

    def read() -> Config:
        port = PORT if args.port is None else args.port
        found = discovered(os.environ, args.local, port)
        print("\n".join(table(found)), file=sys.stderr, flush=True)
        admin = ADMIN_PORT if args.admin_port is None else args.admin_port
        config = _config(text_of(found, port, admin, access_log="stdout", ports=args.local))
        return config if args.workers is None else config.with_workers(args.workers)

    config = read()
    for note in notes(config):
        print(f"firsttoken: {note}", file=sys.stderr)
    try:
        return server.serve(config, ConfigSource(read))
    except EncoderError as error:
        raise ConfigError([str(error)]) from None


def discovered(environ: Mapping[str, str], ports: Sequence[int] | None, own_port: int) -> list[FoundServer]:
    """Servers that were asked, with pool names. Raises ConfigError for a wrong URL in the environment."""
    local = [each for each in local_servers(environ, ports) if each.port != own_port]
    return named(asyncio.run(ask([*apis(environ, own_port), *local])))


def text_of(found: Sequence[FoundServer], port: int, admin: int, access_log: str, ports: Sequence[int] | None) -> str:
    """The configuration as YAML. Raises ConfigError where no server is usable."""
    usable = [each for each in found if each.is_usable]
    if not usable and (empty := [each for each in found if each.reach is Reach.EMPTY]):
        raise ConfigError(_mends(empty))
    if not usable:
        asked = ", ".join(str(each.port) for each in local_servers(os.environ, ports)) or "no port"
        raise ConfigError([NOTHING.format(ports=asked)])
    return config_text(usable, f"127.0.0.1:{port}", f"127.0.0.1:{admin}", access_log, str(FILE))


def table(found: Sequence[FoundServer]) -> list[str]:
    """A line for each server, under a heading, and one for each mend; nothing without servers."""
    rows = [("server", "at", "models", "first token", "state"), *map(_row, found)]
    return [*aligned(rows, left=None), *_mends(found)] if found else []


def _mends(found: Sequence[FoundServer]) -> list[str]:
    mends = {
        Reach.REFUSED: "{0.name} refuses the key: set {0.key_variable} to a valid one",
        Reach.EMPTY: "the server at {0.url} has no models: load one, as `ollama pull llama3.2` does",
        Reach.DOWN: "{0.name} cannot be reached: check the network{1}",
    }
    return [
        mends[each.reach].format(each.server, f", and {each.server.url_variable}" if each.server.url_variable else "")
        for each in found
        if each.reach in mends
    ]


def _row(found: FoundServer) -> tuple[str, ...]:
    address = found.server.url.partition("//")[2]
    names = ", ".join(found.models[:SHOWN_MODELS])
    more = f" and {len(found.models) - SHOWN_MODELS} more" if len(found.models) > SHOWN_MODELS else ""
    models = shorten(names, SHOWN_WIDTH, placeholder=" …") + more if names else "-"
    times = ", ".join(f"{model} {_time(ttft)}" for model, ttft in found.ttfts.items())
    return found.server.name or "?", address, models, times or "not timed", found.reach.value


def _time(ttft: float | None) -> str:
    return f"none in {TOKEN_TIME:g} s" if ttft is None else f"{ttft * 1e3:.0f} ms"


def _timed_models(found: FoundServer, priced: bool | None) -> list[str]:
    """Models of tiers without a time; of an API only where `priced`, because a token of it costs."""
    if found.is_api and not priced:
        return []
    return [model for model in dict.fromkeys(tier_models(found).values()) if model not in found.ttfts]


def _agreed(found: Sequence[FoundServer]) -> list[FoundServer]:
    """APIs whose first token may be timed: all or none, as the user answers on a terminal; none in the background."""
    priced = [each for each in found if each.is_api and _timed_models(each, True)]
    if not priced or not may_ask():
        return []
    models = ", ".join(f"{each.server.name}/{model}" for each in priced for model in _timed_models(each, True))
    try:
        print(QUESTION.format(models=models), end="", flush=True)
        answer = input()
    except EOFError:
        return []
    return priced if answer.strip().lower() in ("y", "yes") else []


def _config(text: str) -> Config:
    return validated(parse(text, str(FILE), os.environ), CONFIG)


def _write(text: str) -> None:
    """Raises ConfigError where the file exists: it is created, never opened."""
    try:
        with FILE.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError([f"{FILE} cannot be written: {error.strerror}"]) from None
    print(f"wrote {FILE}", flush=True)


def greeting_of(config: Config, url: str, admin_url: str) -> str:
    """The addresses, and lines to paste into a shell, in which the name of a server's model is quoted."""
    models = [f"{pool}/{model}" for pool, each in config.pools.items() for model in each.models]
    names = [*config.routes] or [name for name in models if not is_pattern(name)] or models
    name = "balanced" if "balanced" in names else names[0].replace("*", "MODEL")
    body = quote(json.dumps({"model": name, **PING}))
    lines = PASTE.format(url=url, admin=admin_url, body=body, name=quote(name), names=", ".join(names[:SHOWN_MODELS]))
    return f"{serving_line(url, admin_url)}\n{lines}"


def _free_port(first: int) -> int:
    """The first free port from `first` upwards."""
    for port in range(first, first + TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    return first
