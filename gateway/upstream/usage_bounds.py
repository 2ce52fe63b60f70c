"""Judges a server's report of tokens by what was sent and received: a report that cannot be is not believed.

Rules:
- A prompt has no more tokens for an engine than its request has bytes, and those that a chat template adds. A provider
  may add instructions, and a request may name contents that it does not hold (a URL, a file): LONGEST tokens at most.
  Where a provider reads further contents (a search, a stored turn), or reads the prompt several times, REFERRED.
- An answer of an engine has no more tokens than bytes, or than were asked for: reasoning may be hidden. Without a limit
  of the request, and at a provider, whose report is its bill, UNLIMITED_OUTPUT for each answer at most.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from backends.interface import Usage

log = logging.getLogger("firsttoken")

TEMPLATE = 4096  # tokens
LONGEST, REFERRED, UNLIMITED_OUTPUT = 2_000_000, 20_000_000, 1_000_000  # tokens; no model of November 2026 has more
_REFERS = re.compile(
    rb'"(?:image_url|input_image|input_file|input_audio|file|file_id|source|url|video_url|audio_url|container|thread'
    rb'|previous_response_id|conversation|mcp_servers|server_url|context_management|documents|prompt_embeds)"'
    rb'|"prompt":\{|"type":"(?!function|text|object|string|custom)[a-z_]*(?:search|code|fetch|mcp|computer|memory|tool_)'
)
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_tokens_to_sample")
_MOST_CHOICES = 128


def impossible(
    usage: Usage, sent: bytes, body: Mapping[str, Any], cap: int | None, received: int, *, local: bool
) -> str:
    """The reason for which the report cannot be; empty: it can. `sent`, `body`: of the request; `cap`: the route's on
    its output; `received`: bytes of the reply, with its head; `local`: by an engine."""
    prompt, completion = usage.prompt or 0, usage.completion or 0
    if prompt > len(sent) + TEMPLATE and prompt > _most_elsewhere(usage, sent, local):
        return f"{prompt} prompt tokens of a request of {len(sent)} bytes"
    if completion > received and completion > _most_output(usage, body, cap, local):
        return f"{completion} output tokens in a reply of {received} bytes"
    return ""


def _most_elsewhere(usage: Usage, sent: bytes, local: bool) -> int:
    """Tokens of a prompt that its request does not hold."""
    refers = _REFERS.search(sent) is not None
    if local:
        return LONGEST if refers else 0
    return REFERRED if refers or usage.compacted else LONGEST


def _most_output(usage: Usage, body: Mapping[str, Any], cap: int | None, local: bool) -> int:
    asked = [limit for name in _LIMITS if type(limit := body.get(name)) is int and limit > 0]
    asked += [] if cap is None else [cap]
    n, prompt = body.get("n"), body.get("prompt")
    choices = min(n, _MOST_CHOICES) if type(n) is int and n > 0 else 1
    choices *= len(prompt) if isinstance(prompt, list) and prompt else 1
    return (max(asked) if local and asked and not usage.compacted else UNLIMITED_OUTPUT) * choices


LOGGED_EVERY, MOST_LOGGED = 60.0, 1000  # s; endpoints


class DisbelievedReports:
    """Logs them: of each endpoint once a minute."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, float] = OrderedDict()

    def note(self, endpoint: str, report: str, now: float) -> None:
        if now - self._logged.get(endpoint, now - LOGGED_EVERY) < LOGGED_EVERY:
            return
        self._logged[endpoint] = now
        self._logged.move_to_end(endpoint)
        if len(self._logged) > MOST_LOGGED:
            self._logged.popitem(last=False)
        log.warning("endpoint %s reports %s, which cannot be; the gateway's own count stands", endpoint, report)
