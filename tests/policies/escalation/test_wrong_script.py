"""An answer in another script than its prompt."""

from __future__ import annotations

import pytest

from policies.escalation.wrong_script import LONG, is_wrong_script

ENGLISH, RUSSIAN = "What is the capital of France, and why?", "Объясни, пожалуйста, почему небо голубое."
CHINESE_ANSWER = "法国的首都是巴黎，它是法国最大的城市，也是政治和文化中心。"
ENGLISH_ANSWER = "The sky is blue because of the scattering of light in the air."


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (ENGLISH, CHINESE_ANSWER),
        (ENGLISH, "Столица Франции - это город Париж, он стоит на Сене."),
        ("Wie heißt die Hauptstadt, und warum ist das so?", CHINESE_ANSWER),
        (RUSSIAN, ENGLISH_ANSWER),
        ("请解释一下为什么天空是蓝色的", ENGLISH_ANSWER),
        ("空はなぜ青いのか教えてください", ENGLISH_ANSWER),
        ("하늘은 왜 파란색인지 설명해 주세요", ENGLISH_ANSWER),
        ("하늘은 왜 파란색인지 설명해 주세요", CHINESE_ANSWER),
        ("لماذا السماء زرقاء في النهار", ENGLISH_ANSWER),
        ("आकाश नीला क्यों दिखता है", ENGLISH_ANSWER),
    ],
)
def test_another_script_is_found(prompt: str, answer: str) -> None:
    assert is_wrong_script(prompt, "", answer)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (ENGLISH, ENGLISH_ANSWER),
        (RUSSIAN, "Небо голубое, потому что воздух рассеивает свет."),
        ("Why is the sky blue?", "Le ciel est bleu parce que l'air diffuse la lumière."),
        ("Translate to Chinese: what is the capital of France?", CHINESE_ANSWER),
        ("How do you say the sky is blue in Russian?", "Небо голубое, вот так это будет."),
        ("Переведи на английский: почему небо голубое?", ENGLISH_ANSWER),
        ("Напиши функцию, которая складывает два числа", "def add(first, second): return first + second"),
        (RUSSIAN, "```python\ndef add(first, second):\n    return first + second"),
        (RUSSIAN, '{"answer": "rayleigh scattering of the light"}'),
        (RUSSIAN, "<svg xmlns='http://www.w3.org/2000/svg'>"),
        (RUSSIAN, "Rayleigh"),
        (RUSSIAN, "Это Rayleigh scattering: рассеяние света в воздухе (short wavelength)."),
        ("空はなぜ青いのか教えてください", CHINESE_ANSWER),
        ("privet kak dela segodnya drug moy", "Привет! У меня всё хорошо, а как у тебя дела?"),
        ("bhai aaj mausam kaisa hai batao", "आज मौसम बहुत अच्छा है और धूप निकली है"),
        ("Что значит 'the answer is blowing in the wind'?", "The answer is carried by the wind, that is nowhere."),
        ("2 + 2 = ?", CHINESE_ANSWER),
        ("", CHINESE_ANSWER),
        (ENGLISH, ""),
    ],
)
def test_doubt_finds_nothing(prompt: str, answer: str) -> None:
    """A translation, code, a name, a mixture, too few letters, a language typed in Latin letters."""
    assert not is_wrong_script(prompt, "", answer)


def test_instructions_may_ask_for_a_language() -> None:
    assert not is_wrong_script(RUSSIAN, "Always answer in English.", ENGLISH_ANSWER)
    assert is_wrong_script(RUSSIAN, "You are a helpful assistant.", ENGLISH_ANSWER)


@pytest.mark.parametrize("long", ["prompt", "instructions"])
def test_a_long_prompt_is_not_searched(long: str) -> None:
    """One request of 32 MB would keep all others waiting for seconds."""
    more = " zq" * (LONG // 3)
    prompt, instructions = (ENGLISH + more, "") if long == "prompt" else (ENGLISH, more)
    assert is_wrong_script(ENGLISH, "", CHINESE_ANSWER)
    assert not is_wrong_script(prompt, instructions, CHINESE_ANSWER)
