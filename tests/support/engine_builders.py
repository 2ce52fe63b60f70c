"""Engines, requests and an encoder for the tests of the simulated backend."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from zlib import crc32

from backends.server_profiles import PROFILES, EngineProfile
from lab.engines.engine import Engine
from lab.engines.engine_events import EngineRequest, RequestId
from lab.engines.virtual_engine import VirtualEngine

_TOKEN = re.compile(r" ?[^ ]+| ")


def encode(text: str) -> list[int]:
    """One token per word, with the space before, as in common vocabularies."""
    return [crc32(token.encode()) & 0xFFFFF for token in _TOKEN.findall(text)]


def quiet(name: str = "8b-h100", **changes: Any) -> EngineProfile:
    """A profile without noise and without API overhead, for exact times."""
    profile = PROFILES[name]
    assert isinstance(profile, EngineProfile)
    return replace(profile, **{"sigma": 0.0, "overhead": 0.0, **changes})


def ask(id: RequestId, prompt: int, output: int = 1, name: object = None, size: int = 16) -> EngineRequest:
    """A request with blocks named after `name`: equal names share a prefix, None shares nothing."""
    own = id if name is None else name
    hashes = [hash(("block", own, i)) for i in range((prompt + output) // size)]
    return EngineRequest(id, prompt, output, hashes[: prompt // size], hashes[prompt // size :])


def engine(**changes: Any) -> Engine:
    return Engine(quiet(**changes))


def virtual(**changes: Any) -> VirtualEngine:
    return VirtualEngine(engine(**changes))


def seconds(profile: EngineProfile, *args: Any, **kwargs: Any) -> float:
    return profile.duration_ms(*args, **kwargs) * 1e-3
