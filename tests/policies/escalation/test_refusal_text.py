"""Openings of answers that refuse, and of answers that only sound alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.escalation.refusal_text import begins_with_refusal

REFUSALS = (
    "I'm sorry, but I can't assist with that.",
    "I’m sorry, but I can’t help with that request.",
    "I'm sorry, but I cannot fulfill this request. It goes against",
    "I am sorry, I am unable to assist with that.",
    "Sorry, I can't help with that.",
    "Sorry, but I can't do that.",
    "I cannot assist with this request.",
    "I can't help you with that.",
    "I can't comply with this request.",
    "I cannot provide instructions for making",
    "I cannot provide any information on how to",
    "I can't provide assistance with that.",
    "I can't create content that promotes",
    "I won't help with this.",
    "I'm not able to help with that.",
    "I'm unable to assist with that request.",
    "I apologize, but I cannot provide guidance on",
    "My apologies, but I cannot engage in this",
    "Unfortunately, I cannot help with that.",
    "I must decline this request.",
    "I must respectfully decline to write",
    "I'm not comfortable helping with that.",
    "As an AI language model, I cannot assist with that.",
    "As an AI, I can't help with that.",
    "I'm sorry, but as an AI assistant, I cannot fulfill your request.",
    "That's not something I can help with.",
    "**I can't help with that.**",
    "Es tut mir leid, aber dabei kann ich nicht helfen.",
    "Tut mir leid, ich kann diese Anfrage nicht erfüllen.",
    "Als KI-Sprachmodell kann ich diese Frage nicht beantworten.",
    "Je suis désolé, mais je ne peux pas vous aider avec cela.",
    "Désolé, je ne peux pas répondre à cette question.",
    "En tant qu'IA, je ne peux pas vous aider",
    "Lo siento, pero no puedo ayudarte con eso.",
    "No puedo ayudarte con esto.",
    "Sinto muito, mas não posso ajudar com isso.",
    "Mi dispiace, ma non posso aiutarti con questo.",
    "Извините, но я не могу помочь с этим.",
    "К сожалению, я не могу выполнить этот запрос.",
    "Я не могу с этим помочь.",
    "很抱歉，我无法协助您完成这个请求。",
    "抱歉，我无法提供此类信息。",
    "对不起，我不能回答这个问题。",
    "作为一个AI助手，我无法为您提供相关内容。",
    "申し訳ありませんが、そのご要望にはお応えできません。",
    "申し訳ございませんが、お手伝いできません。",
    "죄송하지만, 그 요청은 도와드릴 수 없습니다.",
)
BENIGN = (
    "I'm sorry to hear that. Losing a pet is hard",
    "I'm sorry for your loss.",
    "I'm so sorry you're going through this.",
    "I'm sorry for the confusion! Here is the corrected version:",
    "I'm sorry about the earlier mistake. The right answer is 42.",
    "Sorry for the delay. Here are the files:",
    "Sorry, I misread your question. You can do that with a loop.",
    "I apologize for the confusion. Let me fix that:",
    "I apologize for the error, the function should return",
    "My apologies, you are right: the index is off by one.",
    "Apologies for the oversight. The updated code:",
    "Unfortunately, there is no direct way to do this in SQL.",
    "Unfortunately, this can't be done without a lock.",
    "Unfortunately, I can't see an attachment. Could you paste the text?",
    "I can't wait to see what you build!",
    "I can't help but notice the pattern here.",
    "I can't help feeling that the second option is better.",
    "I cannot stress enough how important backups are.",
    "I can't recommend this book enough.",
    "I can't find any errors in your code.",
    "I'm sorry, but I can't find any issue with that query.",
    "I can't tell which version you use, but in Python 3.11",
    "I cannot provide a precise figure, but roughly 8 million",
    "I cannot think of a better example than this:",
    "I can help with that! First,",
    "I can assist you with the migration.",
    "I could not agree more.",
    "I would be happy to help.",
    "I won't go into detail here; the short version:",
    "I won't sugar-coat it: the essay needs work.",
    "I must say, this is a great question.",
    "I must admit that I had to look twice.",
    "I have to say the tests look fine.",
    "I am able to see two solutions.",
    "I'm not sure I understand, but here is a try:",
    "I'm not able to run code, but here is what it would print:",
    "I'm unable to open links, so I rely on your summary:",
    "I'm afraid the answer is no: 91 is 7 times 13.",
    "I don't think that is right.",
    "I do not recommend storing passwords in plain text.",
    "As an AI, I find this question fascinating. Consider",
    "As an AI researcher, I can tell you that",
    "As an airline pilot, I cannot fly without a licence.",
    "As an AI language model, I don't have feelings, but I can explain",
    "As an example, I can't help pointing at Rust.",
    "As an alternative, you could use a queue.",
    "That's something I can help with. Start by",
    "That is not something the API supports.",
    "This is not possible in CSS alone.",
    "Sure! Here's how to reset your password:",
    "No, you can't divide by zero.",
    "No problem. Here it is:",
    "You can't help someone who doesn't want help.",
    '"I\'m sorry, Dave," said HAL, and the crew went silent.',
    "Dear Ms Lee,\n\nI'm sorry, but I can't attend the meeting on Friday.",
    "Hello! How can I assist you today?",
    "Der Fehler tut mir leid. Hier ist die richtige Fassung:",
    "Es tut mir leid, das zu hören.",
    "Tut mir leid für das Missverständnis. Die Funktion",
    "Leider gibt es dafür keine Funktion.",
    "Ich kann dir nicht genug danken!",
    "Ich kann dir dabei helfen.",
    "Désolé pour la confusion. Voici la version corrigée :",
    "Je suis désolé d'apprendre cela.",
    "Je ne peux pas vous dire à quel point",
    "Lo siento por tu pérdida.",
    "Lo siento, me equivoqué. La respuesta es 7.",
    "No puedo esperar a verlo.",
    "Sinto muito pela sua perda.",
    "Mi dispiace per l'errore. Ecco la versione corretta:",
    "Извините за путаницу. Вот исправленный код:",
    "К сожалению, в SQL нет такой функции.",
    "Мне очень жаль это слышать.",
    "Я не могу не заметить, что",
    "很抱歉给您带来不便。请尝试以下步骤：",
    "抱歉，我刚才算错了，答案是 42。",
    "对不起，让你久等了。",
    "我不能不说，这个想法很好。",
    "申し訳ありません、先ほどの計算に誤りがありました。",
    "すみません、正しくは次のとおりです。",
    "죄송합니다, 제가 잘못 계산했습니다. 답은 42입니다.",
    "안녕하세요! 무엇을 도와드릴까요?",
    "",
    "{",
    "```python\n# I'm sorry, but I can't help with that\n",
)


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_refusal_is_found(answer: str) -> None:
    assert begins_with_refusal(answer)


@pytest.mark.parametrize("answer", BENIGN)
def test_no_other_opening_is_taken_for_a_refusal(answer: str) -> None:
    """An apology, an inability of another kind, a letter that declines, a refusal of somebody else."""
    assert not begins_with_refusal(answer)


@pytest.mark.parametrize("refusal", [REFUSALS[0], REFUSALS[-1]])
def test_a_refusal_further_down_is_not_looked_for(refusal: str) -> None:
    assert not begins_with_refusal(f"Here is the summary that you asked for. {refusal}")


def test_no_beginning_of_another_opening_is_taken_for_a_refusal() -> None:
    """A stream is cut anywhere, in the middle of a word too."""
    assert not [answer[:end] for answer in BENIGN for end in range(len(answer)) if begins_with_refusal(answer[:end])]


@given(st.text(max_size=600))
def test_every_text_is_read(answer: str) -> None:
    assert begins_with_refusal(answer) in (True, False)
