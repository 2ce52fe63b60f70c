"""Tokens and identity of images, audio and files in a prompt, by the published rule of the model's family.

A medium is known by its whole content: hashing 1 MiB of base64 takes 2 ms, once for each new message. The size of an
image is read from its header (PNG, JPEG, GIF, WebP), never by decoding the picture. A medium that is only named, by a
URL or an id, counts as an image of 1024 x 1024, as 30 s of audio or as three pages.

Rules and sources (all read in November 2026):
- OpenAI (platform.openai.com/docs/guides/images-vision): tiles of 512 pixels after scaling into 2048 x 2048 and to a
  short side of 768; or patches of 32 pixels up to a cap, times a factor. From GPT-5.2 on the factor 1.2 and the caps
  are measured (Hugging Face: JOHNISKING/image-token-cost). Audio: 10 tokens a second.
- Anthropic (platform.claude.com/docs/en/build-with-claude/vision): patches of 28 pixels, about w * h / 750, scaled
  down to 1568 pixels and 1568 tokens; from Opus 4.7 and generation 5 on, to 2576 pixels and 4784 tokens.
- Gemini (ai.google.dev/gemini-api/docs/tokens and /image-understanding): 258 tokens a tile; from Gemini 3 on 1120 an
  image. Audio: 32 tokens a second. A page: 258, from Gemini 3 on 560.
- Qwen-VL (the preprocessors of Qwen2-VL and Qwen2.5-VL: 28 pixels; of Qwen3-VL: 32): a token a patch, and one on either
  side. Audio: 25 tokens a second.
- Gemma 3: 256 tokens an image (its technical report).
- PDF: 3,000 tokens a page at Anthropic (its PDF guide: 1,500 to 3,000 of text, and the page as an image); 1,300 at
  OpenAI, which sends text and image too and publishes no figure.
Other models count as OpenAI's tiles: learned corrections of each pool's counts (`usage`) do the rest.
"""

from __future__ import annotations

import re
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, sqrt
from typing import Any

from gateway.tokenize.tokenizers import ID_BYTES

NOT_TEXT = 0x8000_0000  # ids from here on belong to no vocabulary: they stand for media and message openings
MOST_TOKENS = 200_000  # of one medium
UNKNOWN_SIZE = 1024, 1024
UNKNOWN_SECONDS = 30.0
UNKNOWN_PAGES = 3
HEADER = 128 * 1024  # characters of base64 in which a JPEG's frame header is looked for: thumbnails come before it
BYTES_PER_SECOND = 16_000  # of compressed audio: 128 kbit/s
TEXT_BYTES = 4  # of a text file per token

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """The rule of a family of models. `image` takes width, height and the caller's `detail`."""

    image: Callable[[int, int, str], float]
    audio: float = 10.0  # tokens per second
    page: float = 1300.0  # tokens of a page of a PDF


# --------------------------------------------------------------------------- images


def _tiles(base: int, tile: int) -> Callable[[int, int, str], float]:
    def tokens(width: int, height: int, detail: str) -> float:
        if detail == "low":
            return base
        scale = min(1.0, 2048 / max(width, height))
        scale *= min(1.0, 768 / (min(width, height) * scale))
        return base + tile * _grid(width * scale, height * scale, 512)

    return tokens


def _patches(factor: float, cap: int, original: int = 0) -> Callable[[int, int, str], float]:
    """`original`: the cap without the detail `high`."""

    def tokens(width: int, height: int, detail: str) -> float:
        if detail == "low":
            scale = min(1.0, 512 / max(width, height))
            width, height = int(width * scale) or 1, int(height * scale) or 1
        most = cap if detail == "high" or not original else original
        return ceil(factor * _covered(width, height, most))

    return tokens


def _covered(width: float, height: float, most: int) -> int:
    """Patches of 32 pixels, of a picture that is scaled down to at most so many."""
    if (patches := _grid(width, height, 32)) <= most:
        return patches
    shrink = sqrt(most * 32 * 32 / (width * height))
    columns, rows = width * shrink / 32, height * shrink / 32
    fit = min(max(int(columns), 1) / columns, max(int(rows), 1) / rows)
    return min(max(round(columns * fit), 1) * max(ceil(rows * fit - 1e-9), 1), most)


def _anthropic(edge: int, cap: int) -> Callable[[int, int, str], float]:
    def tokens(width: int, height: int, detail: str) -> float:
        scale = min(1.0, edge / max(width, height))
        return min(_grid(width * scale, height * scale, 28), cap)

    return tokens


def _gemini_tiles(width: int, height: int, detail: str) -> float:
    if width <= 384 and height <= 384:
        return 258
    unit = min(max(min(width, height) / 1.5, 256), 768)
    return 258 * _grid(width, height, int(unit))


def _qwen(patch: int, least: int, most: int) -> Callable[[int, int, str], float]:
    """`least`, `most`: pixels, to which a picture is scaled."""

    def tokens(width: int, height: int, detail: str) -> float:
        pixels = max(width * height, 1)
        scale = sqrt(min(max(pixels, least), most) / pixels)
        return max(round(width * scale / patch), 1) * max(round(height * scale / patch), 1) + 2

    return tokens


def _grid(width: float, height: float, unit: int) -> int:
    return ceil(width / unit) * ceil(height / unit)


# --------------------------------------------------------------------------- families

TILES = MediaFamily(_tiles(85, 170))
_NAMED: tuple[tuple[str, MediaFamily], ...] = (  # the first pattern found in the model's name counts
    (r"gpt-4o-mini", MediaFamily(_tiles(2833, 5667))),
    (r"(gpt-5|gpt-4\.1)[\w.-]*-nano", MediaFamily(_patches(2.46, 1536))),
    (r"(gpt-5|gpt-4\.1)[\w.-]*-mini", MediaFamily(_patches(1.62, 1536))),
    (r"o4-mini", MediaFamily(_patches(1.72, 1536))),
    (r"gpt-5\.[5-9]|gpt-[6-9]", MediaFamily(_patches(1.2, 2500, original=10_000))),
    (r"gpt-5\.[2-4]", MediaFamily(_patches(1.2, 2500))),
    (r"gpt-5", MediaFamily(_tiles(70, 140))),
    (r"\bo[13]\b", MediaFamily(_tiles(75, 150))),
    (
        r"claude-(opus|sonnet|haiku|fable)-(4-[7-9]|[5-9])|claude-[5-9]",
        MediaFamily(_anthropic(2576, 4784), page=3000.0),
    ),
    (r"claude", MediaFamily(_anthropic(1568, 1568), page=3000.0)),
    (r"gemini-([3-9])", MediaFamily(lambda width, height, detail: 1120.0, audio=32.0, page=560.0)),
    (r"gemini", MediaFamily(_gemini_tiles, audio=32.0, page=258.0)),
    (r"gemma", MediaFamily(lambda width, height, detail: 256.0)),
    (r"qwen-?(3\.?\d*)", MediaFamily(_qwen(32, 65_536, 16_777_216), audio=25.0)),
    (r"qwen|qvq", MediaFamily(_qwen(28, 3136, 12_845_056), audio=25.0)),
)


def family_of(model: str) -> MediaFamily:
    """The family of a model, by its name."""
    name = model.lower()
    return next((family for pattern, family in _NAMED if re.search(pattern, name)), TILES)


# --------------------------------------------------------------------------- parts of a message


def medium_ids(part: Mapping[str, Any], family: MediaFamily, most: int = MOST_TOKENS) -> bytes:
    """As many ids as the medium counts, made of the digest of its content: another picture is another prefix.

    `most`: of all media of the prompt that are still to come: bounds the memory for headers that lie.
    """
    source, kind = _source(part)
    tokens = max(min(round(_tokens(part, source, kind, family)), MOST_TOKENS, most), 1)
    words = array("I", sha256(source.encode(errors="surrogatepass")).digest())
    ids = array("I", [word | NOT_TEXT for word in words]).tobytes()
    return (ids * (tokens // len(words) + 1))[: tokens * ID_BYTES]


def _source(part: Mapping[str, Any]) -> tuple[str, str]:
    """The URL or the data of a medium, and what it is: image, audio, file, video, or unknown."""
    kind = next(
        (known for known in ("image", "audio", "video", "file", "document") if known in str(part.get("type"))), ""
    )
    members = [
        member for value in part.values() for member in (value.values() if isinstance(value, dict) else (value,))
    ]
    return max((value for value in members if isinstance(value, str)), key=len, default=""), kind


def _tokens(part: Mapping[str, Any], source: str, kind: str, family: MediaFamily) -> float:
    head, data = _split(source)
    if kind == "audio":
        return family.audio * _seconds(data, len(source) if _is_data(source) else 0)
    if kind in ("file", "document") and not head.startswith("data:image"):
        return _file_tokens(head, data, family)
    width, height = image_size(data) or UNKNOWN_SIZE
    return family.image(width, height, _detail(part))


def _split(source: str) -> tuple[str, str]:
    """The header of a data URL, and its data; a source without a header is data throughout."""
    if source.startswith("data:"):
        head, _, data = source.partition(",")
        return head, data
    return "", source


def _is_data(source: str) -> bool:
    return not source.startswith(("http:", "https:", "file-", "gs:"))


def _detail(part: Mapping[str, Any]) -> str:
    inner = [value.get("detail") for value in part.values() if isinstance(value, dict)]
    return next((detail for detail in (part.get("detail"), *inner) if isinstance(detail, str)), "")


# --------------------------------------------------------------------------- headers of formats


def image_size(data: str) -> Size | None:
    """Width and height in the header of a picture in base64; None: no such header."""
    head = _decoded(data[:64])
    size: Size | None = None
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        size = int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    elif head.startswith((b"GIF87a", b"GIF89a")):
        size = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        size = _webp_size(head)
    elif head.startswith(b"\xff\xd8"):
        size = _jpeg_size(_decoded(data[:HEADER]))
    return size if size is not None and min(size) > 0 else None


def _decoded(data: str) -> bytes:
    """The bytes of whole groups of base64; empty where the text is none."""
    try:
        return a2b_base64(data[: len(data) // 4 * 4])
    except ValueError:
        return b""


def _webp_size(head: bytes) -> Size | None:
    """RFC 9649: lossy, lossless and extended files."""
    if head[12:16] == b"VP8 ":
        return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return None


def _jpeg_size(data: bytes) -> Size | None:
    """The frame header (ITU T.81, B.2.2), behind any other segments."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _seconds(data: str, size: int) -> float:
    """Duration of audio in base64, of `size` characters: by the byte rate of a WAV header, or as 128 kbit/s."""
    if not size:
        return UNKNOWN_SECONDS
    head = _decoded(data[:64])
    rate = int.from_bytes(head[28:32], "little") if head[:4] == b"RIFF" and head[8:12] == b"WAVE" else 0
    return len(data) * 3 / 4 / (rate or BYTES_PER_SECOND)


_PAGE = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
_PAGES = re.compile(rb"/Count\s+(\d{1,5})\b")
_PAGE_BYTES = 50_000  # of a PDF with the page count in compressed objects


def _file_tokens(head: str, data: str, family: MediaFamily) -> float:
    if not _is_data(data):
        return family.page * UNKNOWN_PAGES
    content = _decoded(data)
    if not content.startswith(b"%PDF"):
        return (len(content) or len(data)) / TEXT_BYTES
    pages = len(_PAGE.findall(content)) or max(map(int, _PAGES.findall(content)), default=0)
    return family.page * (pages or ceil(len(content) / _PAGE_BYTES))
