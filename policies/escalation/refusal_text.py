"""Recognises an answer that begins by refusing, in words.

A table of openings by language, each anchored at the beginning of the answer: an apology or none, the inability, and a
verb of help. Rules:
- A wrong finding costs a second answer, and a refusal that is missed is the answer as it came: doubt finds none.
- An apology alone is no refusal ("I'm sorry to hear that"), nor is an inability of another kind ("I can't find an
  error in your code", "I can't help but notice").
- A refusal further down is not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LONGEST = 400  # characters read of an answer
_OPENING = re.compile(r"[\s*_\"'“”«»>#¡—-]*")  # marks before the first word

_EN_CANNOT = (
    r"(?:i(?: (?:really|simply|just))? (?:can(?:'t|not| not)|could(?:n't| not)|won't|will not|am (?:not able|unable) to"
    r"|won't be able to|will not be able to|must (?:respectfully )?(?:decline|refuse) to)|i'm (?:not able|unable) to)"
)
_EN_HELP = (
    r"(?:(?:assist|help)(?: (?:you|out))?(?: (?:with|in)\b| you to\b|[.!,])|comply\b|fulfil?l? (?:this|that|your)\b"
    r"|do (?:that|this)[.!,]|(?:continue|engage|participate|discuss|support)(?: (?:with|in|to))? (?:this|that|such|your"
    r" request)\b|(?:answer|respond to|process) (?:this|that|your) (?:question|request|query)\b"
    r"|(?:provide|give|offer|share|create|generate|write|produce)(?: you)?(?: with)?"
    r" (?:any |that|this|such|instructions|assistance|guidance|help\b|support\b|content (?:that|of)|explicit|sexual))"
)
_EN_SORRY = (
    r"(?:(?:i'm|i am)(?: (?:very|so|really|deeply|truly))? sorry|sorry|i apologi[sz]e|(?:my )?apologies|unfortunately"
    r"|regrettably)(?: for (?:the|any) \w+)?[,.:;!—-]*(?: (?:but|however),?)? "
)
_AI = r"as an? (?:ai|artificial intelligence)\b[^.!?\n]{0,60}?,? "

# Openings by language, with ' for an apostrophe and lower case.
_OPENINGS: Mapping[str, tuple[str, ...]] = {
    "English": (
        rf"(?:{_AI})?(?:{_EN_SORRY})?(?:{_AI})?{_EN_CANNOT} {_EN_HELP}",
        rf"(?:{_EN_SORRY})?i (?:must|have to|need to) (?:respectfully )?decline\b",
        rf"(?:{_EN_SORRY})?(?:i'm|i am) not comfortable (?:with (?:this|that|providing|writing|creating)"
        r"|(?:helping|assisting|providing|writing|creating|discussing)\b)",
        rf"(?:{_EN_SORRY})?(?:that|this)(?:'s| is) (?:not something (?:that )?i (?:can|am able to|'m able to)"
        r"|something (?:that )?i (?:can't|cannot|am unable to|won't)) (?:help|assist|do|provide|discuss)\b",
    ),
    "German": (
        r"(?:(?:es )?tut mir (?:sehr )?leid|entschuldigung|leider)[,.!]?(?: aber)? (?:ich kann|dabei kann ich"
        r"|das kann ich|kann ich)\b[^.!?\n]{0,60}?\bnicht (?:helfen|weiterhelfen|behilflich|beantworten|unterstützen"
        r"|erfüllen|nachkommen)",
        r"ich kann (?:dir|ihnen) (?:dabei|damit|bei dieser anfrage)(?: leider)? nicht (?:helfen|weiterhelfen)",
        r"als (?:ki|künstliche intelligenz)\b[^.!?\n]{0,50}? kann ich\b[^.!?\n]{0,60}?\bnicht (?:helfen|weiterhelfen"
        r"|beantworten|unterstützen|erfüllen|nachkommen)",
    ),
    "French": (
        r"(?:(?:je suis )?(?:vraiment )?désolée?|je m'excuse|malheureusement)[,.!]?(?: mais)? je ne (?:peux|puis|suis"
        r" pas en mesure de)(?: pas)?(?: vous| t'| te)? ?(?:aider|assister|répondre à (?:cette|votre)|fournir (?:cette"
        r"|ce|d'aide)|satisfaire)",
        r"je ne (?:peux|suis) pas (?:en mesure de )?(?:vous |t'|te )?(?:aider (?:avec|à|dans)|répondre à cette demande"
        r"|satisfaire (?:à )?cette)",
        r"en tant qu(?:'ia|'intelligence artificielle|e modèle de langage)\b[^.!?\n]{0,40}?, je ne (?:peux|suis) pas"
        r" (?:en mesure de )?(?:vous |t')?(?:aider|répondre à cette|fournir)",
    ),
    "Spanish": (
        r"(?:lo siento(?: mucho)?|disculpa|perdón|lamentablemente)[,.!]?(?: pero)? no puedo (?:ayudar|asistir|cumplir"
        r"|proporcionar (?:esa|ese|este|esta|ayuda)|responder a (?:esa|esta)|hacer eso)",
        r"no puedo (?:ayudarte|ayudarle|asistirte|ayudar) con (?:eso|esa|esto|esta)",
        r"como (?:modelo de lenguaje|ia|inteligencia artificial)\b[^.!?\n]{0,40}?, no puedo (?:ayudar|asistir|cumplir"
        r"|proporcionar)",
    ),
    "Portuguese": (
        r"(?:sinto muito|desculpe|lamento|infelizmente)[,.!]?(?: mas)? não posso (?:ajudar|atender|fornecer (?:esse"
        r"|essa|este|esta|ajuda)|responder a (?:essa|esta)|fazer isso)",
        r"não posso (?:ajudar|ajudá-lo|ajudá-la|te ajudar) com (?:isso|essa|esse|esta|este)",
    ),
    "Italian": (
        r"(?:mi dispiace|spiacente|purtroppo)[,.!]?(?: ma)? non posso (?:aiutar|assister|fornire (?:questo|questa|quest"
        r"|assistenza)|rispondere a (?:questa|questo)|soddisfare)",
        r"non posso (?:aiutarti|aiutarla|assisterti) con (?:questo|questa|quest)",
    ),
    "Russian": (
        r"(?:извини(?:те)?|прости(?:те)?|к сожалению|мне (?:очень )?жаль|прошу прощения)[,.!]?(?: но)? я не (?:могу"
        r"|смогу|в состоянии)(?: вам| тебе| с этим)* (?:помочь|помогать|выполнить (?:этот|эту|ваш|ваше|это)"
        r"|ответить на (?:этот|ваш)|обсуждать (?:это|эту|этот)|предоставить (?:эту|такую|такие))",
        r"я не могу (?:вам |тебе )?(?:с этим помочь|помочь (?:вам )?с (?:этим|этой|таким))",
        r"как (?:языковая модель|ии|искусственный интеллект)\b[^.!?\n]{0,40}?,? я не могу (?:помочь|выполнить"
        r"|обсуждать)",
    ),
    "Chinese": (
        r"(?:非常|很|十分)?(?:抱歉|对不起|不好意思)[，,。！! ]*(?:但是?|不过)?(?:作为[^，。]{0,20}，)?我?(?:暂时)?"
        r"(?:无法|不能|没法|没有办法|没办法)(?:为您|为你|给您|给你|向您|就此|对此)?(?:协助|帮助您|帮助你|帮助|提供(?:此|这|该|相关|任何|帮助"
        r"|协助)|回答(?:这|您|你|该|此)|满足(?:您|你|这|该|此)|完成(?:这|您|你|该|此)|处理(?:这|您|你|该|此)|讨论(?:这|该|此))",
        r"(?:作为(?:一个|一名)?(?:ai|人工智能)[^，。]{0,20}，)?我(?:无法|不能)(?:协助|为您提供(?:此|这|该|相关|任何|帮助)|满足(?:您|你|这|该|此)"
        r"|回答(?:这个|这类|该|此类))",
    ),
    "Japanese": (
        r"(?:大変|誠に)?(?:申し訳(?:ありません|ございません|ないですが|ありませんが|ございませんが)|すみません|ごめんなさい)[^。\n]{0,4}[、。,]?"
        r"[^。\n]{0,40}(?:お手伝い|お答え|お応え|ご要望に|ご協力|支援|回答)[^。\n]{0,12}(?:でき(?:ません|かねます)|いたしかねます)",
    ),
    "Korean": (
        r"(?:정말 )?(?:죄송(?:합니다|하지만|해요|하지만요)|미안하지만)[^.\n]{0,4}[,.]?[^.\n]{0,40}(?:도와드릴"
        r"|도움을 드릴|도움을 줄|답변(?:해 |을 )?드릴|응답할|응해 드릴) 수(?:가)? 없",
    ),
}
_REFUSES = tuple(re.compile(opening) for openings in _OPENINGS.values() for opening in openings)


def begins_with_refusal(answer: str) -> bool:
    """Tell whether an answer, of which `answer` is the beginning, refuses in its first words."""
    begun = _OPENING.match(answer)
    text = answer[0 if begun is None else begun.end() :][:_LONGEST]
    text = " ".join(text.lower().replace("’", "'").replace("*", "").split())
    return any(opening.match(text) for opening in _REFUSES)
