"""Images and files of messages. A server that does not accept a message's media is skipped: media are never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from backends.fitting.target import Target
from backends.interface import Operation
from backends.member_paths import ABSENT, Json, Path, altered, opened, values_at
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse
from backends.translation.tool_arguments import split_data_url

_PARTS: Mapping[Operation, tuple[Path, ...]] = {
    Operation.CHAT: (("messages", "content"),),
    Operation.MESSAGES: (("messages", "content"), ("messages", "content", "content")),
    Operation.RESPONSES: (("input", "content"), ("input", "output")),
}
_LESS_DETAIL = ("high", "auto")  # replacements for a detail unknown to the server


def fit_media(body: Json, target: Target, told: Omissions) -> Json:
    _refuse_too_many(body, target, told)
    for path in _PARTS[target.operation]:
        body = altered(body, path, partial(_fit_content, target=target, told=told))
    return body


def _refuse_too_many(body: Json, target: Target, told: Omissions) -> None:
    most = target.facts.most_images
    if most is None:
        return
    parts = (
        part for path in _PARTS[target.operation] for content in values_at(body, path) for part in _objects(content)
    )
    if sum(_is_image(part) for part in parts) > most:
        refuse("messages.content.image", told, f"the model takes {most} images at most")


def _objects(content: Any) -> list[Mapping[str, Any]]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image_url", "input_image", "image")


def _fit_content(content: Any, target: Target, told: Omissions) -> Any:
    if not isinstance(content, list):
        return content
    found = [_fit_part(part, target, told) for part in content]
    if all(new is old for new, old in zip(found, content, strict=True)):
        return content
    return [part for part in found if part is not ABSENT]


def _fit_part(part: Any, target: Target, told: Omissions) -> Any:
    fit = _FITS.get(part.get("type", "")) if isinstance(part, Mapping) else None
    return part if fit is None else fit(part, target, told)


def _refused(kind: str, reason: str, told: Omissions) -> Any:
    refuse(f"messages.content.{kind}", told, reason)
    return ABSENT


def _fit_url(kind: str, url: Any, target: Target, told: Omissions) -> Any:
    """ABSENT where the route drops such images; None: it is taken."""
    split = split_data_url(url) if isinstance(url, str) else None
    if split is None:
        return None if target.facts.image_urls else _refused(kind, "the server takes images by their bytes alone", told)
    return _fit_type(kind, split[0], target, told)


def _fit_type(kind: str, media_type: Any, target: Target, told: Omissions) -> Any:
    media = target.facts.media
    if media is None or media_type in media:
        return None
    return _refused(kind, f"the server takes {', '.join(sorted(media)) or 'no images'}", told)


def _image_url(part: Json, target: Target, told: Omissions) -> Any:
    image = opened(part.get("image_url"))
    if not isinstance(image, Mapping):
        return part
    if _fit_url("image_url", image.get("url"), target, told) is ABSENT:
        return ABSENT
    found = _detailed(image, "messages.content.image_url.detail", target, told)
    return part if found is image else {**part, "image_url": found}


def _input_image(part: Json, target: Target, told: Omissions) -> Any:
    if part.get("image_url") and _fit_url("input_image", part["image_url"], target, told) is ABSENT:
        return ABSENT
    return part


def _image(part: Json, target: Target, told: Omissions) -> Any:
    source = opened(part.get("source")) or {}
    if source.get("type") == "url":
        return part if _fit_url("image", source.get("url"), target, told) is None else ABSENT
    if source.get("type") == "base64":
        return part if _fit_type("image", source.get("media_type"), target, told) is None else ABSENT
    return part


def _document(part: Json, target: Target, told: Omissions) -> Any:
    """Of Messages. A document of text is a text where the server takes no files."""
    source = opened(part.get("source")) or {}
    if target.facts.files:
        return part
    if source.get("type") == "text":
        return {"type": "text", "text": opened(source.get("data"))}
    return _refused("document", "the server takes no files", told)


def _file(part: Json, target: Target, told: Omissions) -> Any:
    return part if _takes_files(target) else _refused("file", "the server takes no files", told)


def _takes_files(target: Target) -> bool:
    facts = target.facts
    if target.operation is Operation.RESPONSES and facts.files_responses is not None:
        return facts.files_responses
    return facts.files


def _detailed(image: Mapping[str, Any], path: str, target: Target, told: Omissions) -> Mapping[str, Any]:
    details, detail = target.facts.details, image.get("detail")
    if detail is None or details is None or detail in details:
        return image
    told.leave_out(path)
    less = next((each for each in _LESS_DETAIL if each in details), None)
    rest = {name: value for name, value in image.items() if name != "detail"}
    return rest if less is None else {**rest, "detail": less}


_FITS: Mapping[str, Callable[[Json, Target, Omissions], Any]] = {
    "image_url": _image_url,
    "input_image": _input_image,
    "image": _image,
    "document": _document,
    "file": _file,
    "input_file": _file,
}
