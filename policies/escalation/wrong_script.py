"""Tells whether an answer is written in another script than its prompt: Latin, Cyrillic, Han and so on.

Rules:
- A script is not a language: an answer in French to a prompt in English is not found.
- Both texts need enough letters, nearly all of one script each. Chinese and Japanese count as one script.
- Code, and a prompt that speaks of a language, of a translation or of code, may have an answer in any script.
- A prompt that is LONG, with its instructions, nearly always speaks of one of these: it is not searched.
- A prompt in Latin letters counts where common words of a European language are in it: Hindi, Russian and Chinese are
  typed in Latin letters too, and answered in their own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter

LEAST_ASKED, LEAST_ANSWERED = 8, 16  # letters
OWN, OTHER = 0.9, 0.8  # least shares of the letters of one script: of the prompt, and of the answer
LONG = 64 * 1024  # characters: a search of more would keep all other requests waiting
_LONGEST = 4000  # characters read of a text

# First code points of Unicode blocks (Blocks-16.0), and their script; empty: another one, or no letters.
_BLOCKS: tuple[tuple[int, str], ...] = (
    (0x0041, "Latin"),
    (0x0250, ""),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "Armenian"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic"),
    (0x0700, ""),
    (0x0750, "Arabic"),
    (0x0780, ""),
    (0x08A0, "Arabic"),
    (0x0900, "Devanagari"),
    (0x0980, "Bengali"),
    (0x0A00, "Gurmukhi"),
    (0x0A80, "Gujarati"),
    (0x0B00, ""),
    (0x0B80, "Tamil"),
    (0x0C00, "Telugu"),
    (0x0C80, "Kannada"),
    (0x0D00, "Malayalam"),
    (0x0D80, ""),
    (0x0E00, "Thai"),
    (0x0E80, ""),
    (0x10A0, "Georgian"),
    (0x1100, "Hangul"),
    (0x1200, ""),
    (0x1E00, "Latin"),
    (0x1F00, "Greek"),
    (0x2000, ""),
    (0x3040, "Han"),
    (0x3130, "Hangul"),
    (0x3190, ""),
    (0x3400, "Han"),
    (0xA000, ""),
    (0xAC00, "Hangul"),
    (0xD7B0, ""),
    (0xF900, "Han"),
    (0xFB00, ""),
    (0x20000, "Han"),
    (0x32000, ""),
)
_FIRST = tuple(first for first, _ in _BLOCKS)
_FENCE = "```"
_CODE = ("#!", "{", "[", "<")  # at the beginning of an answer
_FREE = re.compile(  # stems of words by which a prompt asks for a language, a translation, a transcription or code
    r"translat|language|english|german|french|spanish|russian|chinese|mandarin|japanese|korean|arabic|hindi|greek|hebrew"
    r"|ukrainian|bulgarian|serbian|persian|farsi|thai\b|urdu|bengali|tamil|kanji|pinyin|hiragana|katakana|cyrillic"
    r"|unicode|alphabet|transliter|romaji|original text|quote|lyrics|hanzi|hangul"
    r"|übersetz|sprache|englisch|deutsch|russisch|chinesisch|japanisch|koreanisch|arabisch|griechisch|hebräisch"
    r"|tradu|langue|anglais|russe|chinois|japonais|coréen|arabe|grec|hébreu|idioma|inglés|ruso|chino|japonés|coreano"
    r"|árabe|griego|hebreo|lingua|inglese|russo|cinese|giapponese|coreano|arabo|greco|ebraico|inglês|chinês|japonês"
    r"|перев[её]д|перевод|язык|англ|немецк|француз|испанск|китайск|японск|корейск|арабск|латиниц|транслит"
    r"|код|скрипт|функци|програм|команд|запрос|алгоритм|python|javascript|sql|regex|html|json|yaml|bash|latex|формул"
    r"|翻译|翻譯|英文|英语|英語|中文|日语|日文|日本語|韩语|韓国語|俄语|语言|語言|言語|訳|代码|代碼|程序|脚本|函数|コード|プログラム|関数"
    r"|번역|영어|한국어|일본어|중국어|언어|코드|함수|프로그램"
    r"|ترجم|الإنجليزية|العربية|اللغة|كود|برنامج|अनुवाद|अंग्रेज़ी|हिंदी|भाषा|कोड|แปล|ภาษา|โค้ด|תרגם|אנגלית|עברית|קוד"
)
_COMMON = re.compile(  # function words of English, German, French, Spanish, Portuguese, Italian, Dutch
    r"\b(?:the|is|are|what|how|why|and|of|to|with|for|can|you|please|this|that|der|die|das|und|ist|wie|was|nicht|ein|eine"
    r"|ich|mit|für|le|les|des|est|que|pour|une|avec|dans|quel|el|los|las|por|para|con|una|como|qué|cómo|não|uma|você|il"
    r"|che|di|per|sono|perché|het|een|van|niet|wat|hoe)\b"
)
LEAST_COMMON = 2  # such words


def is_wrong_script(prompt: str, instructions: str, answer: str) -> bool:
    """Tell whether an answer is in another script. `prompt`: the user's last words; `instructions`: of the system,
    which may ask for a language too."""
    if _FENCE in answer or answer.lstrip().startswith(_CODE):
        return False
    asked, used = _script(prompt, LEAST_ASKED, OWN), _script(answer, LEAST_ANSWERED, OTHER)
    if not asked or not used or asked == used or len(prompt) + len(instructions) > LONG:
        return False
    if asked == "Latin" and len(_COMMON.findall(prompt.lower())) < LEAST_COMMON:
        return False
    return not (_FREE.search(prompt.lower()) or _FREE.search(instructions.lower()))


def _script(text: str, least: int, share: float) -> str:
    """The script of nearly all letters; empty: of several, or too few."""
    found = Counter(_BLOCKS[bisect_right(_FIRST, ord(char)) - 1][1] for char in text[:_LONGEST] if char.isalpha())
    letters = found.total()
    script, most = found.most_common(1)[0] if found else ("", 0)
    return script if letters >= least and most >= share * letters else ""
