"""Writes the configuration of the servers that were found, as commented YAML.

Rules:
- The text is what is served, so the file of `--write` and the running gateway agree.
- Every text that comes from a server is quoted by the YAML library, and its dollar signs are doubled: else the loader
  would put a variable of the environment in place of `${NAME}`.
- Keys and URLs of the environment are written as `${NAME}`, never as values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from gateway.cli.up.known_servers import FoundServer, Reach
from gateway.cli.up.tier_models import models_of_tiers, quality_order

WIDTH = 110
OPEN_ENDED = ("ollama", "compatible")  # local servers that load further models at run time
HEADER = """\
# Written by `firsttoken up` from the servers that it found. Serve it with: firsttoken serve --config {file}
# Every model answers as POOL/MODEL, and under its own name where one pool alone lists it. Keys stay in the environment.
# All keys are explained in docs/configuration.md; `firsttoken check {file}` reports mistakes.
"""
PASSTHROUGH = """
# Takes every other name, because its list of models is not known.
passthrough: {pool}
"""
ROUTES = """
# The same models under three promises. Of the tiers that can keep the promise, `quality` takes the first and `latency`
# the fastest. A request for one of them may go to an API, and cost.
"""


class QuotedText(str):
    """Text to be written in double quotes, whatever it looks like."""


class _Dumper(yaml.SafeDumper):
    """Aliases would hide a value that occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class FlowList(list[QuotedText]):
    """List to be written in lines of several values."""


_Dumper.add_representer(FlowList, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True))
_Dumper.add_representer(QuotedText, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"'))


def named(found: Sequence[FoundServer]) -> list[FoundServer]:
    """Servers with unique pool names: a second vLLM gets its port as suffix."""
    times = Counter(each.server.name for each in found)
    return [
        replace(each, server=replace(each.server, name=f"{each.server.name}-{each.server.port}"))
        if times[each.server.name] > 1
        else each
        for each in found
    ]


def config_text(found: Sequence[FoundServer], listen: str, admin: str, access_log: str, file: str) -> str:
    """`found`: usable servers with names of their own."""
    first = {"server": {"listen": listen, "admin": admin}, "telemetry": {"access_log": access_log}}
    parts = [HEADER.format(file=file), _yaml(first), "\npools:\n"]
    tiers = models_of_tiers(found)
    for each in found:
        pools = _indented(_pools(each, tiers[each.server.name]))
        parts += [f"  # {each.reach.value}; models found: {len(each.models)}\n", pools]
    if (passthrough := _passthrough(found)) is not None:
        parts.append(PASSTHROUGH.format(pool=passthrough))
    if routes := _routes(found, tiers):
        parts += [ROUTES, _yaml({"routes": routes})]
    return "".join(parts)


def _pools(found: FoundServer, chosen: Mapping[str, str]) -> dict[str, Any]:
    """A pool with all models of a server; for an API also a pool per tier model, as latencies differ by model."""
    section, name = _reached(found), found.server.name
    models = FlowList(_written(model) for model in found.models)
    if found.is_api or found.kind in OPEN_ENDED:
        models.append(QuotedText("*"))
    if not found.is_api and chosen:
        section["model"] = _written(chosen[""])
    pools = {name: {**section, "models": models}}
    if found.is_api:
        pools |= {name + ending: {**section, "model": _written(model)} for ending, model in chosen.items()}
    return pools


def _reached(found: FoundServer) -> dict[str, Any]:
    server = found.server
    if not found.is_api:
        known = {} if found.window is None else {"context_window": found.window}
        return {"backend": found.kind, "endpoints": [QuotedText(server.url)], **known}
    section: dict[str, Any] = {"backend": found.kind, "api_key": QuotedText(f"${{{server.key_variable}}}")}
    if server.url_variable:
        section["base_url"] = QuotedText(f"${{{server.url_variable}}}")
    return section


def _passthrough(found: Sequence[FoundServer]) -> str | None:
    """The API for unlisted model names: the first API without a list. None if a local server was found: a misspelt name
    must not send a prompt off the machine."""
    unlisted = [each for each in found if each.is_api and each.reach is not Reach.OK]
    unlisted.sort(key=lambda each: each.reach is Reach.REFUSED)
    if not unlisted or not all(each.is_api for each in found):
        return None
    return unlisted[0].server.name


def _routes(found: Sequence[FoundServer], models: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """`best`, `balanced` and `fast`, where there is a tier. `models`: by server and ending of its pool's name."""
    ordered = quality_order([each for each in found if each.is_api]) + [each for each in found if not each.is_api]
    pools = {each.server.name + ending: ending for each in ordered for ending in models[each.server.name]}
    tiers = sorted(pools, key=lambda pool: ("-best", "-fast", "").index(pools[pool]))
    if not tiers:
        return {}
    quick = [pool for pool in tiers if pools[pool] != "-best"] or tiers
    return {
        "best": {"ttft": {"budget": "5s"}, "prefer": "quality", "tiers": tiers},
        "balanced": {"ttft": {"budget": "1s"}, "prefer": "quality", "tiers": tiers},
        "fast": {"ttft": {"budget": "1s"}, "prefer": "latency", "tiers": quick},
    }


def _written(text: str) -> QuotedText:
    return QuotedText(text.replace("$", "$$"))


def _yaml(value: Mapping[str, Any]) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=WIDTH))


def _indented(value: Mapping[str, Any]) -> str:
    return "".join(f"  {line}\n" for line in _yaml(value).splitlines())
