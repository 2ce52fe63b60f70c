"""Chooses the models of the routes `best`, `balanced` and `fast` among those that servers list.

Of each API the newest large model and the newest small one, by the provider's own naming; of a server of this machine
the model in its memory, or else its first. An API with names of no known form has one only where it lists few, or where
no other server has any: then its first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gateway.cli.up.known_servers import FoundServer, Reach

FEW = 3  # models of an API with names of no known form
_DATED = r"([\d.-]+?)(?:-\d{8})?"
_VERSION = r"(\d+(?:\.\d+)?)"
_LARGE: Mapping[str, Sequence[str]] = {  # patterns, the first that matches a model counts
    "anthropic": (f"claude-opus-{_DATED}", f"claude-sonnet-{_DATED}"),
    "openai": (f"gpt-{_VERSION}", r"gpt-(\d+)o"),
    "gemini": (f"gemini-{_VERSION}-pro",),
    "xai": (f"grok-{_VERSION}",),
    "deepseek": ("deepseek-chat",),
    "mistral": ("mistral-large-latest",),
    "groq": ("openai/gpt-oss-120b", f"llama-{_VERSION}-70b-versatile"),
}
_SMALL: Mapping[str, Sequence[str]] = {
    "anthropic": (f"claude-haiku-{_DATED}", f"claude-{_DATED}-haiku-.*"),
    "openai": (f"gpt-{_VERSION}-mini", r"gpt-(\d+)o-mini"),
    "gemini": (f"gemini-{_VERSION}-flash",),
    "xai": (f"grok-{_VERSION}-(?:fast|mini).*",),
    "mistral": ("mistral-small-latest",),
    "groq": (f"llama-{_VERSION}-8b-instant", "openai/gpt-oss-20b"),
}
_EMBEDDING = re.compile(r"embed|bge|rerank|minilm")


def large_model(found: FoundServer) -> str:
    """Of an API; empty: none is known."""
    if newest := _newest(_LARGE.get(found.kind, ()), found.models):
        return newest
    small = small_model(found)
    answering = [name for name in found.models if not _EMBEDDING.search(name) and name != small]
    return answering[0] if answering and len(found.models) <= FEW else ""


def _first_model(found: FoundServer) -> str:
    """Of an API, whatever its name; empty: it lists none that answers."""
    is_listed = found.is_api and found.reach is Reach.OK
    return next((name for name in found.models if is_listed and not _EMBEDDING.search(name)), "")


def small_model(found: FoundServer) -> str:
    """Of an API; empty: none is known."""
    return _newest(_SMALL.get(found.kind, ()), found.models)


def local_model(found: FoundServer) -> str:
    """Of a server of this machine; empty: it lists none that answers."""
    return found.loaded or next((name for name in found.models if not _EMBEDDING.search(name)), "")


def tier_models(found: FoundServer) -> dict[str, str]:
    """Model by the ending of its pool's name: `-best` and `-fast` of an API, none of a server of this machine."""
    if found.reach is not Reach.OK:
        return {}
    if not found.is_api:
        chosen = {"": local_model(found)}
    else:
        chosen = {"-best": large_model(found), "-fast": small_model(found)}
    return {ending: model for ending, model in chosen.items() if model}


def models_of_tiers(found: Sequence[FoundServer]) -> dict[str, dict[str, str]]:
    """By the name of the server, as `tier_models`. There is a tier wherever there is a model that answers."""
    tiers = {each.server.name: tier_models(each) for each in found}
    if not any(tiers.values()) and (first := next(filter(_first_model, quality_order(found)), None)):
        tiers[first.server.name] = {"-best": _first_model(first)}
    return tiers


def quality_order(found: Sequence[FoundServer]) -> list[FoundServer]:
    """APIs as in the table above, then all others as given."""
    order = list(_LARGE)
    return sorted(found, key=lambda each: order.index(each.kind) if each.kind in order else len(order))


def _newest(patterns: Sequence[str], names: Sequence[str]) -> str:
    for pattern in patterns:
        matched = [(match, name) for name in names if (match := re.fullmatch(pattern, name))]
        if matched:
            return max(matched, key=lambda pair: (_numbers(pair[0]), -len(pair[1])))[1]
    return ""


def _numbers(match: re.Match[str]) -> list[int]:
    return [int(number) for text in match.groups() for number in re.findall(r"\d{1,9}", text or "")]
