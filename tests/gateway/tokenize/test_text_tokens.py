"""Estimates of text that nobody has counted, by what the key's own texts have taught."""

from __future__ import annotations

import base64
import inspect
import random
import textwrap
from collections.abc import Iterable
from statistics import quantiles

import pytest

from benchmarks.prompts import Writer
from gateway.tokenize.text_tokens import MODELS, TextKind, TextModels, TextShape
from gateway.tokenize.tokenizers import encoder, segments

O200K = encoder("o200k_base")
CODE = inspect.getsource(inspect) + inspect.getsource(textwrap)
CJK = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。闰余成岁，律吕调阳。\n"
MODERN = "我们需要在下周之前完成这个项目的测试和文档，请大家按照计划安排好自己的时间。如果有问题，可以随时联系。\n"
BASE64 = base64.b64encode(random.Random(1).randbytes(60_000)).decode()


def estimate(models: TextModels, text: str, key: str = "web") -> float:
    return sum(models.estimate(key, "o200k_base", TextShape(each.encode()))[0] for each in segments(text))


def teach(models: TextModels, texts: Iterable[str], key: str = "web") -> None:
    for text in texts:
        for each in segments(text):
            models.learn(key, "o200k_base", TextShape(each.encode()), O200K.count(each))


def error(models: TextModels, text: str, key: str = "web") -> float:
    return abs(estimate(models, text, key) / O200K.count(text) - 1.0)


def ninetieth(found: list[float]) -> float:
    return quantiles(found, n=10)[-1]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("It was the best of times, it was the worst of times.", TextKind.TEXT),
        (CODE[:3000], TextKind.TEXT),
        (BASE64[:3000], TextKind.DENSE),
        (CJK, TextKind.SCRIPT),
        ("Это был лучший из всех времён", TextKind.SCRIPT),
    ],
)
def test_a_text_has_the_kind_of_its_bytes(text: str, kind: TextKind) -> None:
    assert TextShape(text.encode()).kind is kind


@pytest.mark.parametrize("text", [CODE[:40_000], Writer(1).text(40_000), MODERN * 100, BASE64], ids=len)
def test_the_first_text_of_a_key_is_estimated_to_a_fifth(text: str) -> None:
    """The fitted weights alone: nothing was counted."""
    assert error(TextModels(), text) < 0.2


def test_nine_of_ten_benchmark_prompts_are_within_four_percent() -> None:
    """Prompts of 8 KB of a key, each counted after its estimate."""
    models, writer, found = TextModels(), Writer("estimates"), []
    for _ in range(60):
        text = writer.text(8_000)
        found.append(error(models, text))
        teach(models, [text])
    assert ninetieth(found) < 0.04


def test_a_text_of_100_kb_is_known_better_than_its_segments() -> None:
    """Errors of segments cancel."""
    models, writer = TextModels(), Writer("long")
    teach(models, [writer.text(50_000)])
    assert error(models, writer.text(100_000)) < 0.02


def test_a_key_that_alternates_scripts_and_base64_is_estimated_by_each_kind() -> None:
    """CJK, prose and base64 in turn: none spoils the estimates of the next."""
    models, writer, found = TextModels(), Writer("mixed"), []
    pick = random.Random(2)
    for turn in range(90):
        at = pick.randrange(len(BASE64) - 8_000)
        text = (CJK * 60, writer.text(8_000), BASE64[at : at + 8_000])[turn % 3]
        found.append(error(models, text))
        teach(models, [text])
    assert ninetieth(found[9:]) < 0.05


def test_one_keys_texts_change_no_other_keys_estimates() -> None:
    """Not even by a kind of text that looks alike."""
    models, text = TextModels(), Writer("honest").text(8_000)
    teach(models, [text])
    before = estimate(models, text)
    teach(models, ["q w x z " * 900] * 50, key="attacker")
    assert estimate(models, text) == before
    assert estimate(models, text, "attacker") != before


def test_the_margin_covers_the_error_of_nearly_every_segment() -> None:
    """And is wide before anything is known."""
    models, writer, within = TextModels(), Writer("margins"), []
    untaught = models.estimate("web", "o200k_base", TextShape(writer.text(2_000).encode()))
    assert untaught[1] >= 0.5 * untaught[0]
    for _ in range(100):
        text = writer.text(2_000)
        tokens, margin = models.estimate("web", "o200k_base", TextShape(text.encode()))
        within.append(abs(tokens - O200K.count(text)) <= margin)
        teach(models, [text])
    assert sum(within) >= 97
    assert margin < 0.15 * tokens


def test_a_text_that_no_estimate_has_foreseen_widens_the_margin() -> None:
    """The next one like it is counted where the count decides."""
    models, writer = TextModels(), Writer("surprise")
    teach(models, [writer.text(40_000)])
    pick = random.Random(3)
    odd = " ".join("".join(pick.choices("bcdfghjklmnpqrstvwxz", k=5)) for _ in range(300))
    narrow = models.estimate("web", "o200k_base", TextShape(odd.encode()))
    assert O200K.count(odd) > sum(narrow)
    teach(models, [odd])
    wide = models.estimate("web", "o200k_base", TextShape(odd.encode()))
    assert wide[1] / wide[0] > narrow[1] / narrow[0]


@pytest.mark.parametrize("text", ["\0" * 4000, "\n" * 4000, "😀" * 1000, "A1" * 2000, "x" * 4000])
def test_a_token_has_at_least_one_byte(text: str) -> None:
    """Whatever was learned."""
    models = TextModels()
    teach(models, ["a b c d e f " * 300] * 20)
    tokens, margin = models.estimate("web", "o200k_base", TextShape(text.encode()))
    assert 1 <= tokens <= len(text.encode())
    assert 0 < margin <= tokens


def test_keys_without_number_are_forgotten_oldest_first() -> None:
    """Memory is bounded."""
    models, text = TextModels(), Writer("many").text(1_000)
    teach(models, [text * 2] * 5, key="first")
    taught = estimate(models, text, "first")
    for number in range(2 * MODELS):
        teach(models, [text], key=str(number))
    assert estimate(models, text, "first") == estimate(TextModels(), text) != taught
