"""Prefix breakers: text of clients that changes with every request and stands before the prompt.

Claude Code begins its system prompt with a block of its own, in which `cch` is a hash of the request:

    x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;

Seen in versions 2.1.29 (February 2026) to 2.1.177 (June 2026). A prompt with this line misses every prefix cache from
its first block on (github.com/anthropics/claude-code/issues/68900). vLLM leaves the line out itself, of `/v1/messages`
(vllm/entrypoints/anthropic/serving.py, pull request 36829, March 2026) and of the system messages of chats
(vllm/renderers/chat_utils.py, seen in 0.32). SGLang, llama.cpp, Ollama and APIs do not (November 2026).

Rules:
- The line is removed where vLLM 0.32 removes it: where a text of a system message begins with it, up to the end of the
  line. A part that is empty then goes too.
- The rest of the request is hashed, counted and sent. Servers that read the line get it as it was written.
"""

from __future__ import annotations

import re

from backends.interface import Operation
from gateway.tokenize.system_texts import with_system_texts

BREAKER = "x-anthropic-billing-header"
IN_BODY = BREAKER.encode()  # a body without these bytes holds none
AT_HEAD = re.compile(rf"\A{BREAKER}[^\n]*\n?")
ANYWHERE = re.compile(rf"^{BREAKER}[^\n]*\n?", re.MULTILINE)


def without_breakers(operation: Operation, raw: bytes, lines: re.Pattern[str] = AT_HEAD) -> bytes:
    """The body without these lines; `raw` itself where there are none. A body that cannot be read is left to the
    parser."""
    if IN_BODY not in raw:
        return raw
    return with_system_texts(operation, raw, lambda texts: [lines.sub("", text) for text in texts])
