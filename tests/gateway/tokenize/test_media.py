"""Tokens of images, audio and files, by the rule of the model's family."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Operation
from gateway.api.inference_request import parse
from gateway.tokenize.media import MOST_TOKENS, family_of, image_size, medium_ids


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0" + bytes(64)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(64)


def jpeg(width: int, height: int, before: bytes = b"") -> bytes:
    """With a JFIF segment, and `before`: further segments ahead of the frame header."""
    frame = b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", height, width) + bytes(64)
    return b"\xff\xd8\xff\xe0\x00\x10JFIF\0\x01\x02\0\0\x01\0\x01\0\0" + before + frame


def exif(size: int) -> bytes:
    """A segment with a thumbnail, which has a frame header of its own."""
    thumbnail = jpeg(160, 120)
    return b"\xff\xe1" + struct.pack(">H", size) + thumbnail + bytes(size - 2 - len(thumbnail))


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + kind + bytes(4) + body + bytes(64)


def lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14))


def extended(width: int, height: int) -> bytes:
    return webp(b"VP8X", bytes(4) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3])


def lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", bytes(6) + struct.pack("<HH", width, height))


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def image(width: int, height: int, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64(png(width, height))}", **more}}


def counted(part: dict[str, Any], model: str) -> int:
    return len(medium_ids(part, family_of(model))) // 4


# --------------------------------------------------------------------------- images


@pytest.mark.parametrize("header", [png, gif, jpeg, lossless, extended, lossy])
def test_the_size_of_a_picture_is_read_from_its_header(header: Any) -> None:
    """PNG, GIF, JPEG, and the three kinds of WebP."""
    assert image_size(base64(header(1234, 567))) == (1234, 567)


def test_the_size_of_a_jpeg_is_that_of_the_picture_and_not_of_its_thumbnail() -> None:
    """The frame header comes behind the camera's notes."""
    assert image_size(base64(jpeg(4032, 3024, exif(60_000)))) == (4032, 3024)


@given(st.binary(max_size=80) | st.builds(lambda head, rest: head[:40] + rest, st.just(jpeg(9, 9)), st.binary()))
def test_no_bytes_break_the_reading_of_a_header(data: bytes) -> None:
    """Junk has no size, or one above 0."""
    for text in (base64(data), data.decode("latin-1")):
        size = image_size(text)
        assert size is None or min(size) > 0


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        ("gpt-4o", (1024, 1024), "high", 765),  # OpenAI's own examples, up to the measured ones
        ("gpt-4o", (2048, 4096), "auto", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4o-mini", (1024, 1024), "low", 2833),
        ("gpt-4.1-2025-04-14", (1024, 1024), "", 765),
        ("gpt-4.1-mini", (1024, 1024), "", 1659),
        ("gpt-4.1-nano", (1024, 1024), "low", 630),
        ("gpt-5-mini", (1800, 2400), "", 2353),
        ("o4-mini", (1024, 1024), "", 1762),
        ("gpt-5", (1024, 1024), "", 630),
        ("o3", (1024, 1024), "", 675),
        ("gpt-5.5", (256, 256), "", 77),
        ("gpt-5.5", (512, 512), "", 308),
        ("gpt-5.5", (768, 768), "", 692),
        ("gpt-5.5", (1920, 1080), "", 2448),
        ("gpt-5.5", (2560, 1440), "", 4320),
        ("claude-opus-4-1", (200, 200), "", 64),
        ("claude-sonnet-4-5", (1024, 1024), "", 1369),
        ("claude-sonnet-4-5", (4032, 3024), "", 1568),
        ("anthropic/claude-opus-4-7", (1920, 1080), "", 2691),
        ("claude-opus-4-8", (8000, 8000), "", 4784),
        ("gemini-2.5-flash", (384, 300), "", 258),
        ("gemini-2.5-flash", (960, 540), "", 6 * 258),
        ("gemini-3-pro", (4000, 3000), "", 1120),
        ("google/gemma-3-27b-it", (900, 900), "", 256),
        ("Qwen/Qwen2.5-VL-7B-Instruct", (1288, 728), "", 46 * 26 + 2),
        ("qwen3-vl-8b", (1280, 736), "", 40 * 23 + 2),
        ("llama-4-scout", (1024, 1024), "", 765),
    ],
)
def test_an_image_counts_by_the_rule_of_its_family(model: str, size: tuple[int, int], detail: str, tokens: int) -> None:
    """Published examples, and measured counts where there are none."""
    more = {"detail": detail} if detail else {}
    assert counted(image(*size, **more), model) == tokens


@pytest.mark.parametrize(("size", "tokens"), [((2560, 1440), 2931), ((3840, 2160), 2931), ((4032, 3024), 2942)])
def test_a_picture_above_the_cap_is_scaled_down_to_it(size: tuple[int, int], tokens: int) -> None:
    """Within a percent of what was measured."""
    assert counted(image(*size, detail="high"), "gpt-6-astra") == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:image/png;base64," + base64(png(512, 512))},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64(png(512, 512))}},
        {"type": "image_url", "image_url": {"url": "data:image/webp;base64," + base64(lossy(512, 512))}},
    ],
)
def test_pictures_count_alike_in_all_dialects(part: dict[str, Any]) -> None:
    """Responses, Messages and chat."""
    assert counted(part, "gpt-4o") == 255


@pytest.mark.parametrize(("model", "tokens"), [("gpt-4o", 765), ("claude-sonnet-4-5", 1369)])
def test_a_picture_behind_a_url_counts_as_one_of_usual_size(model: str, tokens: int) -> None:
    """It is not fetched."""
    assert counted({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, model) == tokens


def test_a_size_that_no_picture_has_is_bounded() -> None:
    """A header of 24 bytes may claim 4 gigapixels."""
    for model in ("gemini-2.5-pro", "qwen2.5-vl", "gpt-4o", "gpt-5.5", "claude-opus-5"):
        assert 0 < counted(image(2**31, 2**31), model) <= MOST_TOKENS
        assert 0 < counted(image(2**31, 1), model) <= MOST_TOKENS


# --------------------------------------------------------------------------- identity


def test_a_medium_is_known_by_its_whole_content() -> None:
    """Two pictures that differ in the middle alone are two prefixes."""
    data = bytearray(png(512, 512) + bytes(100_000))
    parts = []
    for at in (50_000, 50_001):
        data[at] ^= 1
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64(data)}})
    family = family_of("gpt-4o")
    assert medium_ids(parts[0], family) == medium_ids(dict(parts[0]), family)
    assert medium_ids(parts[0], family) != medium_ids(parts[1], family)


# --------------------------------------------------------------------------- audio and files


def wav(seconds: float, rate: int = 48_000) -> bytes:
    header = (
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0" + struct.pack("<IIHH", rate // 2, rate, 2, 16) + b"data\0\0\0\0"
    )
    return header + bytes(int(seconds * rate))


@pytest.mark.parametrize(
    ("model", "tokens"), [("gpt-4o-audio-preview", 50), ("gemini-2.5-pro", 160), ("qwen3-omni", 125)]
)
def test_audio_counts_by_its_seconds(model: str, tokens: int) -> None:
    """Five seconds, by the byte rate in the header of a WAV file."""
    part = {"type": "input_audio", "input_audio": {"data": base64(wav(5)), "format": "wav"}}
    assert counted(part, model) == pytest.approx(tokens, abs=1)


def test_compressed_audio_counts_as_128_kbit_a_second() -> None:
    """Five seconds of MP3."""
    part = {"type": "input_audio", "input_audio": {"data": base64(b"\xff\xfb\x90\0" + bytes(80_000)), "format": "mp3"}}
    assert counted(part, "gpt-4o-audio-preview") == pytest.approx(50, abs=1)


def pdf(pages: int) -> bytes:
    tree = b"<< /Type /Pages /Count %d >>\n" % pages
    return b"%PDF-1.7\n" + tree + b"<< /Type /Page /Parent 1 0 R >>\n" * pages


@pytest.mark.parametrize(("model", "each"), [("claude-sonnet-4-5", 3000), ("gemini-2.5-pro", 258), ("gpt-4o", 1300)])
@pytest.mark.parametrize("data", [pdf(4), b"%PDF-1.7\n<< /Type/ObjStm >> /Count 4 "])
def test_a_pdf_counts_by_its_pages(model: str, each: int, data: bytes) -> None:
    """By the page objects; where these are compressed, by the count of the page tree."""
    chat = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64," + base64(data)}}
    messages = {"type": "document", "source": {"type": "base64", "data": base64(data)}}
    assert counted(chat, model) == counted(messages, model) == 4 * each


def test_other_files_count_as_text() -> None:
    """A token for four bytes."""
    part = {"type": "file", "file": {"file_data": "data:text/plain;base64," + base64(b"word " * 800)}}
    assert counted(part, "gpt-4o") == 1000
    assert counted({"type": "file", "file": {"file_id": "file-abc"}}, "gpt-4o") == 3 * 1300


PICTURE, PAGES = base64(png(512, 512)), base64(pdf(2))
CONTENTS: dict[Operation, list[dict[str, Any]]] = {
    Operation.CHAT: [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PAGES}"}},
    ],
    Operation.MESSAGES: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PAGES}},
    ],
    Operation.RESPONSES: [
        {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
        {"type": "input_file", "file_data": f"data:application/pdf;base64,{PAGES}"},
    ],
}


@pytest.mark.parametrize("operation", CONTENTS)
def test_requests_of_all_dialects_count_their_media(operation: Operation) -> None:
    """A picture and two pages."""
    said = [{"role": "user", "content": CONTENTS[operation]}]
    body = {"model": "m", "max_tokens": 5, "input" if operation is Operation.RESPONSES else "messages": said}
    prompt = parse(operation, json.dumps(body).encode(), {}, 0.0, "r").prompt
    assert prompt.media
    assert sum(len(piece.span) // 4 for piece in prompt.pieces(0, family_of("gpt-4o"))) == 255 + 2 * 1300
