"""`firsttoken facts`: shows the facts of a model with their sources, and updates the fact files of the release.

`show` prints each fact and price that a row or a pool states, with its source, and lists unknown facts. `update` reads
a fact file, checks the digest and every row, and writes the file to `state.dir`; an invalid file, or a file not newer
than the file in use, is refused whole. Gateways read fact files at start and on reload.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from datetime import date
from enum import Enum
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import msgspec

from backends.facts import refreshed
from backends.facts.fact_checks import LARGEST, BadFacts
from backends.facts.fact_rows import APIS, MODELS, Document, apis, in_use, is_refreshed, read_on
from backends.facts.listed_price import ListedPrice, in_force
from backends.facts.lookup import LIKE, Origin, facts_of, is_fact, listed_prices, model_row, origins
from backends.facts.model_facts import Facts
from backends.facts.priors import prior_ttft
from gateway.cli.learned_facts import learned
from gateway.cli.tables import printable, terminal_width, within, wrapped
from gateway.config.config_errors import ConfigError, nearest
from gateway.config.kept_facts import left_files
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.config.pool_section import PoolSection
from gateway.config.price_section import PriceSection, today
from gateway.files import NotAFile, read_regular, replace_file
from gateway.part_list import CONFIG
from policies.types import Price

PATIENCE = 30.0  # s for a URL
ANY = "compatible"  # API of a model whose family is of no API
PREFIX = "sha256:"
RELOAD = "a running gateway reads it at its next reload: send SIGHUP, or POST /reload to its admin port"
Row = tuple[str, str, str]


def facts(args: argparse.Namespace) -> int:
    """Run `show` or `update` and print the result. Raises ConfigError for every mistake of the operator."""
    config = load(args.files, os.environ, CONFIG) if args.files else None
    if args.action == "show":
        width = terminal_width()
        lessons = [] if args.admin is None else learned(args.admin, args.model, args.pool, width)
        print("\n".join([*shown(args.model, args.pool, config, width), *lessons]))
    else:
        print("\n".join(updated(args.source, args.digest, config)))
    return 0


# ---------------------------------------------------------------- show


def shown(model: str, pool: str | None, config: Config | None, width: int | None = None) -> list[str]:
    """Table of known facts, and a line that lists unknown facts. `width`: columns at most; None: a line for each."""
    api, own = (_api_of(model), {}) if pool is None else _of_pool(pool, config)
    believed, whence = facts_of(api, model, own), origins(api, model, own)
    rows = [(name, _text(getattr(believed, name)), _whence(whence[name], own)) for name in _stated(whence, own)]
    members = [(name, _text(own[name]), "pool: accepts") for name in _members(own)]
    prior = (
        f"{effort or 'otherwise'} {seconds:g}" for effort, seconds in prior_ttft(api, own.get(LIKE, model)).items()
    )
    rows += [*members, ("first token, s", ", ".join(prior), f"{_file(MODELS)}: ttft, or the rules of `priors`")]
    prices = _prices(api, model) if pool is None or config is None else _prices_of_pool(config.pools[pool])
    rows += prices
    unknown = ", ".join([name for name in FACT_NAMES if name not in whence] + ([] if prices else ["price"]))
    last = [f"nothing is known of: {unknown}", *left_files()]
    lines = last if width is None else [line for text in last for line in wrapped(text, width)]
    return [f"{model} at {api}", *within([("fact", "value", "whence"), *rows], width), *lines]


def _prices_of_pool(section: PoolSection) -> list[Row]:
    if "price" in section.model_fields_set:
        return _priced("", section.price.model_dump(exclude_none=True), "pool: price")
    if not section.model or section.models:
        return [("price", "none: callers choose the model", "pool: write its price")]
    return [] if section.price_in_force == Price() else _prices(section.api, section.model)


def _prices(api: str, model: str) -> list[Row]:
    """Rows of the current and future prices; expired prices are left out."""
    listed, row = listed_prices(api, model), model_row(api, model)
    now = in_force(listed, today())
    valid = [price for price in listed if price is now or (price.since or date.min) > today()]
    return [
        each for price in valid if row for each in _of_price(price, f"{_file(MODELS)}: {row.name} ({price.source})")
    ]


def _of_price(price: ListedPrice, whence: str) -> list[Row]:
    since = "" if price.since is None else f" from {price.since}"
    rows = _priced(since, msgspec.to_builtins(price), whence)
    if price.long is not None:
        rows += _priced(f"{since} from {price.long_from} prompt tokens", msgspec.to_builtins(price.long), whence)
    return rows


def _priced(when: str, said: Mapping[str, Any], whence: str) -> list[Row]:
    figures = ", ".join(f"{name} {said[name]:g}" for name in PriceSection.model_fields if said.get(name) is not None)
    return [(f"price{when}", f"{figures} (USD per million)", whence)]


FACT_NAMES = tuple(field.name for field in fields(Facts) if field.name != "ttft")


def _of_pool(name: str, config: Config | None) -> tuple[str, Mapping[str, Any]]:
    """Row of the API, and facts that the pool states."""
    if config is None:
        raise ConfigError(["--pool names a pool of a configuration: add --config FILE"])
    if name not in config.pools:
        raise ConfigError([f"there is no pool '{name}'{nearest(name, config.pools)}"])
    pool = config.pools[name]
    return pool.api, pool.own_facts


def _api_of(model: str) -> str:
    """The API of the model's maker."""
    row = model_row(ANY, model)
    return row.family if row is not None and row.family in apis() else ANY


def _stated(whence: Mapping[str, Origin], own: Mapping[str, Any]) -> Iterator[str]:
    members = set(_members(own))
    return (name for name in FACT_NAMES if name in whence and name not in members)


def _members(own: Mapping[str, Any]) -> Iterator[str]:
    """Names of members of a request, of which a pool says yes or no."""
    return (name for name, value in own.items() if name != LIKE and not is_fact(name, value))


def _whence(origin: Origin, own: Mapping[str, Any]) -> str:
    if origin.of == "pool":
        return "pool: accepts, reasoning"
    if origin.of == "api":
        return f"{_file(APIS)}: {origin.row}"
    like = f"like {own[LIKE]}, " if LIKE in own else ""
    return f"{like}{_file(MODELS)}: {origin.row} ({origin.source})"


def _file(name: str) -> str:
    return f"{'refreshed' if is_refreshed(name) else 'shipped'} {read_on(name)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "yes", False: "no"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    if isinstance(value, (frozenset, set)):
        return ", ".join(sorted(map(str, value)))
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


# ---------------------------------------------------------------- update


def updated(source: str, digest: str | None, config: Config | None) -> list[str]:
    """Write a newer fact file to `state.dir`; return a line for each changed row. Raises ConfigError."""
    folder = _state_dir(config)
    text = _read(source, digest)
    try:
        name, document = refreshed.checked_newer(text)
    except BadFacts as error:
        raise ConfigError([f"{source}: {error}; what there is is kept"]) from None
    path, before = refreshed.path_of(folder, name), in_use(name)
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}; make state.dir writable"]) from None
    head = f"{path}: {name} as read on {document['read']}, in place of {before['read']}"
    return [head, *changes(before, document), RELOAD]


def changes(before: Document, after: Document) -> list[str]:
    """A line for each row that was added, changed or removed."""
    old, new = dict(refreshed.rows(before)), dict(refreshed.rows(after))
    added = [f"added: {name}" for name in new if name not in old]
    removed = [f"removed: {name}" for name in old if name not in new]
    changed = [
        f"changed: {name}: {', '.join(_differing(old[name], row))}"
        for name, row in new.items()
        if name in old and old[name] != row
    ]
    return [*added, *changed, *removed] or ["no row changed"]


def _differing(old: Any, new: Any) -> list[str]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [f"{old} -> {new}"]
    names = [name for name in {**old, **new} if old.get(name, MISSING) != new.get(name, MISSING)]
    return [f"{name} {_side(old, name)} -> {_side(new, name)}" for name in names]


def _side(row: Mapping[str, Any], name: str) -> str:
    return str(row[name]) if name in row else "-"


def _state_dir(config: Config | None) -> str:
    if config is None:
        raise ConfigError(["newer facts are kept in state.dir of a configuration: add --config FILE"])
    if config.state.dir is None:
        raise ConfigError(["there is no place for newer facts: write state: {dir: ...} into the configuration"])
    return str(config.state.dir)


def _read(source: str, digest: str | None) -> bytes:
    """Raises ConfigError where there is nothing to read, or something else than the digest is of."""
    is_url = source.lower().startswith(("https://", "http://"))
    if is_url and digest is None:
        raise ConfigError([f"{source}: a URL vouches for nothing: add --digest sha256:... of its contents"])
    text = _fetched(source) if is_url else _file_of(Path(source))
    if len(text) > LARGEST:
        raise ConfigError([f"{source}: longer than {LARGEST >> 20} MB; what there is is kept"])
    found = PREFIX + hashlib.sha256(text).hexdigest()
    if digest is not None and found != f"{PREFIX}{digest.removeprefix(PREFIX).lower()}":
        raise ConfigError([f"{source}: its digest is {found}, not {digest}; what there is is kept"])
    return text


def _fetched(url: str) -> bytes:
    """The contents of a URL, with redirects followed: the digest vouches for what comes. Raises ConfigError."""
    try:
        with urlopen(url, timeout=PATIENCE) as reply:
            return _all_of(reply, monotonic() + PATIENCE)
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError([f"{url}: {_failure(error)}; what there is is kept"]) from None


def _all_of(reply: Any, deadline: float) -> bytes:
    text = bytearray()
    while (piece := reply.read1(1 << 16)) and len(text) <= LARGEST:
        text += piece
        if monotonic() > deadline:
            raise TimeoutError
    if reply.length and len(text) <= LARGEST:
        raise IncompleteRead(b"", reply.length)
    return bytes(text)


def _failure(error: Exception) -> str:
    """Describes the failure of a URL in one line."""
    reason = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    if isinstance(reason, TimeoutError):
        return f"no whole answer within {PATIENCE:g} s"
    if isinstance(reason, IncompleteRead):
        return "the answer ended before its end"
    said = " ".join(printable(str(reason)).split())[:200]
    return said or type(reason).__name__


def _file_of(path: Path) -> bytes:
    try:
        text = read_regular(path, LARGEST)
    except (OSError, NotAFile) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if text is None:
        raise ConfigError([f"{path}: there is no such file"])
    return text
