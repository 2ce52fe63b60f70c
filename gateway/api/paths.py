"""Paths of the data port beside those of `Operation`: a model named by a path, and Azure OpenAI's paths.

- `/v1/models/{id}`: the id is percent-decoded, and may have slashes.
- `/openai/deployments/{deployment}/chat/completions`, `.../completions`, `.../embeddings`: the deployment is the model.
- `/openai/v1/...` (Azure's v1 API), `/openai/responses` and `/openai/models` (Azure's clients: no deployment there).
- `/v1/responses/{id}`, `.../input_items`, `.../cancel`: a stored response.
- The paths of `/v1` without it, `/chat/completions` and so on: OpenAI's clients append these to a base URL, which their
  users write without `/v1`. With it twice, `/v1/v1/messages`: Anthropic's clients append `/v1/messages` to a base URL,
  which their users write with `/v1`.

Source: openai-python 3.54 (lib/azure.py), November 2026.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from backends.interface import Operation

MODELS = "/v1/models"
MODEL = "/v1/models/{id}"

_STORED = re.compile(r"/v1/responses/([^/]+)(/input_items|/cancel|)")
_ONE_MODEL = MODELS + "/"
_OPERATIONS = frozenset(each.value for each in Operation)
_VERSIONED = [path for path in (MODELS, *_OPERATIONS) if path.startswith("/v1/")]
_UNVERSIONED = frozenset(path.removeprefix("/v1") for path in _VERSIONED)
_AZURE = re.compile(r"/openai(?:/deployments/([^/].*?)(/chat/completions|/completions|/embeddings)|(/v1/.+))")
_RENAMED = {
    "/openai/models": MODELS,
    "/openai/responses": Operation.RESPONSES.value,
}


def canonical(path: str) -> tuple[str, str]:
    """The gateway's own name for a path, and the model or response that the path names. An unknown path stays as it
    is."""
    path = _versioned(_RENAMED.get(path, path))
    if path.startswith(("/openai/models/", "/openai/responses/")):
        path = "/v1" + path.removeprefix("/openai")
    elif (azure := _AZURE.fullmatch(path)) is not None:
        if azure[1]:
            return "/v1" + azure[2], unquote(azure[1])
        path = azure[3]
    if path not in _OPERATIONS and (stored := _STORED.fullmatch(path)) is not None:
        return f"/v1/responses/{{id}}{stored[2]}", unquote(stored[1])
    if path.startswith(_ONE_MODEL) and len(path) > len(_ONE_MODEL):
        return MODEL, unquote(path.removeprefix(_ONE_MODEL))
    return path, ""


def _versioned(path: str) -> str:
    """The path with `/v1` once, where a base URL without it, or with one too many, has made the path."""
    if path.startswith("/v1/v1/"):
        return path.removeprefix("/v1")
    return "/v1" + path if path in _UNVERSIONED or path.startswith(("/models/", "/responses/")) else path
