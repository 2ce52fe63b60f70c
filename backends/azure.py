"""Azure OpenAI: OpenAI's dialect behind deployments.

Source: Azure OpenAI REST API reference, inference, version 2024-10-21 (read 2026-11). The URL is the resource's,
without a path: https://NAME.openai.azure.com. `model` is the name of the deployment. The newer API without versions, at
/openai/v1, is OpenAI's own dialect: a pool of the kind `openai` with that `base_url`.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from backends.interface import BackendConfig, BackendRequest
from backends.openai import OpenAI

API_VERSION = "2024-10-21"  # latest stable version; `query: {api-version: ...}` overrides


class AzureOpenAI(OpenAI):
    """The deployment is in the path. Fields that the API version does not know are refused."""

    key_header = "api-key"
    listing_path = "/openai/models"  # the models of the resource, by other names than its deployments

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(replace(config, query={"api-version": API_VERSION, **config.query}))

    def path(self, forward: BackendRequest) -> str:
        deployment = quote(forward.model, safe="").strip(".") or "-"  # a caller's name (passthrough) leaves no folder
        return f"/openai/deployments/{deployment}{forward.operation.value.removeprefix('/v1')}"
