"""Tags of requests, by which operators tell teams and jobs apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from gateway.core.hooks import NO_DOOR, Ask, Door
from gateway.core.part import Part
from gateway.observe.part_notes import TAGS
from gateway.runtime import Runtime

HEADERS = ("x-firsttoken-tags", "x-litellm-tags")  # separated by commas
MOST = 64  # tags of a request that are looked at


class Tags(Part):
    def at_door(self, runtime: Runtime) -> Door:
        return Door(parsed=note) if runtime.config.telemetry.tags else NO_DOOR


def note(ask: Ask) -> None:
    TAGS.put(ask.timeline.record, listed_tags(ask.runtime.config.telemetry.tags, ask.http.headers, ask.request.body))


def listed_tags(listed: Sequence[str], headers: Mapping[str, str], body: Mapping[str, Any]) -> Sequence[str]:
    """Of the `listed` tags, those of the headers and of the member `metadata.tags`; no other text of a caller becomes
    a label or a log line."""
    given = {*islice(_named(headers), MOST), *islice(_of_metadata(body.get("metadata")), MOST)}
    return tuple(tag for tag in listed if tag in given)


def _named(headers: Mapping[str, str]) -> Iterable[str]:
    return (tag.strip() for name in HEADERS if name in headers for tag in headers[name].split(","))


def _of_metadata(metadata: Any) -> Iterable[str]:
    tags = metadata.get("tags") if isinstance(metadata, Mapping) else None
    if isinstance(tags, msgspec.Raw):
        tags = msgspec.json.decode(tags)  # strict JSON: the body was validated
    return (tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()
