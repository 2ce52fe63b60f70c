"""One entry of LiteLLM's `model_list` as a Deployment, or the reason for which it has none here."""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import Any

from backends.catalog import KINDS
from gateway.cli.importing import litellm_reasons as reasons
from gateway.cli.importing.imported_config import KeyAccount
from gateway.cli.importing.imported_values import (
    Variables,
    is_header,
    is_header_value,
    is_parameter,
    is_placeholder,
    number,
    seconds,
    server_url,
    whole,
)
from gateway.cli.importing.pool_drafts import PROVIDERS, SIGNED, Deployment, LiteLlmProvider, needs_key, split_model
from gateway.config.config_errors import Path

UNSERVED = (
    "image_generation image_edit audio_transcription audio_speech moderation video_generation realtime ocr".split()
)
PRICES = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cached_input",
    "cache_creation_input_token_cost": "cache_write",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
}
MOST_PER_MINUTE = 10**9
_RESOURCE = re.compile(r"https://[A-Za-z0-9-]+\.openai\.azure\.com(?=/|$)")


class LeftOutError(Exception):
    """The entry has no counterpart."""


class DeploymentReader:
    """Reads the entries of one file."""

    def __init__(self, account: KeyAccount, variables: Variables) -> None:
        self._account = account
        self._variables = variables

    def read(self, entry: Any, path: Path) -> Deployment | None:
        """None: left out, and accounted for."""
        try:
            return _EntryReader(entry, path, self._variables).read(self._account)
        except LeftOutError as reason:
            name = entry.get("model_name") if isinstance(entry, dict) else None
            self._account.dropped(path, f"{name}: {reason}" if name else str(reason))
            return None


class _EntryReader:
    def __init__(self, entry: Any, path: Path, variables: Variables) -> None:
        if not isinstance(entry, dict) or not isinstance(entry.get("litellm_params"), dict):
            raise LeftOutError("an entry has model_name and litellm_params")
        info = entry.get("model_info")
        self.entry, self.path = entry, path
        self.variables = variables
        self.params: dict[str, Any] = entry["litellm_params"]
        self.info: dict[str, Any] = info if isinstance(info, dict) else {}
        self.group = str(entry.get("model_name") or "")
        self.moves: list[tuple[Path, str]] = []
        self.settings: dict[str, Any] = {}
        self.left: dict[str, str] = {}  # reasons, by parameter

    def read(self, account: KeyAccount) -> Deployment:
        self._refuse_unserved()
        self._read_model()
        url = self._url()
        api_key = self._api_key()
        self._read_headers()
        self._read_prices()
        self._read_limits()
        output_tokens = whole(self.params.get("max_tokens"))
        self._account_for_the_rest(account, output_tokens)
        retries = self.params.get("num_retries")
        return Deployment(
            self.group,
            self.settings,
            url,
            api_key,
            self._order(),
            output_tokens,
            tuple(self.moves),
            weights=tuple(number(self.params.get(key)) or 0.0 for key in ("weight", "rpm", "tpm")),
            retries=retries if isinstance(retries, int) and not isinstance(retries, bool) and retries >= 0 else None,
        )

    def _order(self) -> float | None:
        """None: the last, where another deployment has one."""
        found = self.params.get("order", self.info.get("order"))
        return float(found) if isinstance(found, (int, float)) and isfinite(found) else None

    def _refuse_unserved(self) -> None:
        mode = self.info.get("mode")
        if mode in UNSERVED:
            raise LeftOutError(f"models of mode {mode} are not served")
        if not self.group:
            raise LeftOutError("an entry has model_name and litellm_params")

    def _moved(self, key: str, target: str, section: str = "litellm_params") -> None:
        self.moves.append(((*self.path, section, key), target))

    # -- the model and its backend

    def _read_model(self) -> None:
        text, url = str(self.params.get("model") or ""), self.params.get("api_base") or self.params.get("base_url")
        if (reference := self.variables.of(text)) is not None:
            if not url:
                raise LeftOutError("the provider is in a variable: write the pool by hand")
            self.settings |= {"backend": "compatible", "model": reference}
            self._provider = LiteLlmProvider("compatible")
        else:
            own = self.params.get("custom_llm_provider")
            name, model = split_model(text, own if isinstance(own, str) else None, bool(url))
            self._provider = self._known(name, text, url)
            if not model:
                raise LeftOutError("the model is missing")
            self.settings |= {
                "backend": self._backend(name, url),
                "model": self.variables.literal(model.removeprefix("responses/")),
            }
        self._moved("model", "model")
        if "custom_llm_provider" in self.params:
            self._moved("custom_llm_provider", "backend")

    def _known(self, name: str, text: str, url: Any) -> LiteLlmProvider:
        if text == "*":
            raise LeftOutError("the provider is guessed of each name: write passthrough: POOL for one provider")
        provider = PROVIDERS.get(name)
        if provider is None:
            raise LeftOutError("the provider is not known here: write a pool of backend compatible")
        if not provider.backend:
            raise LeftOutError(f"{name}: {SIGNED}")
        if provider == LiteLlmProvider("compatible") and not url:
            raise LeftOutError(f"{name}: api_base is missing: write a pool of backend compatible with the URL")
        return provider

    def _backend(self, name: str, url: Any) -> str:
        backend = self._provider.backend
        if name == "gemini" and url:
            raise LeftOutError("a URL of Gemini's own dialect: write a pool of backend gemini without base_url")
        if name == "azure" and "/openai/v1" in str(url):
            return "openai"
        if backend == "openai" and url:
            known = server_url(url)
            return next((kind.name for kind in KINDS.values() if kind.base_url == known and known), "compatible")
        return backend

    def _url(self) -> str | None:
        key = "api_base" if "api_base" in self.params else "base_url"
        value = self.params.get(key)
        backend = self.settings["backend"]
        if not value:
            if self._provider.base_url:
                return self._provider.base_url
            return self.variables.reference("AZURE_API_BASE") if backend == "azure" else self._vllm_url(backend)
        self._moved(key, "url")
        url = self.variables.of(value) or server_url(self._resource(str(value)) or value)
        if url is None:  # credentials, a query, or no URL
            return self.variables.in_place_of_literal(value, self.group, "base_url")
        return None if url == KINDS[backend].base_url else self.variables.literal(url)

    def _resource(self, url: str) -> str:
        """The URL of an Azure resource, of the URL of a deployment; empty: it is none."""
        match, backend = _RESOURCE.match(url.strip()), self.settings["backend"]
        if match is None or backend not in ("azure", "openai"):
            return ""
        return f"{match[0]}/openai/v1" if backend == "openai" else match[0]

    def _vllm_url(self, backend: str) -> str | None:
        return self.variables.reference("HOSTED_VLLM_API_BASE") if backend == "vllm" else None

    # -- the key and what else is sent

    def _api_key(self) -> str | None:
        """A key of the environment only for the provider that it is a key of."""
        backend, value = self.settings["backend"], self.params.get("api_key")
        own = self._provider.variable if self._provider.backend == backend else ""
        if needs_key(backend):
            own = own or f"{backend.upper()}_API_KEY"
        elif value is not None and (not value or is_placeholder(value)):
            self.left["api_key"] = "a placeholder: the server gets no key"
            return None
        if not value:
            return self.variables.reference(own) if own else None
        self._moved("api_key", "api_key")
        return self.variables.secret(value, self.group, "api_key")

    def _read_headers(self) -> None:
        headers: dict[str, str] = {}
        for key in ("extra_headers", "headers"):
            found = self.params.get(key)
            if isinstance(found, dict) and found:
                self._moved(key, "headers")
                headers |= {str(name): self.variables.text(str(name), text, self.group) for name, text in found.items()}
        if "organization" in self.params:
            self._moved("organization", "headers")
            headers["openai-organization"] = self.variables.secret(self.params["organization"], self.group, "ORG")
        headers = {name: value for name, value in headers.items() if is_header(name) and is_header_value(value)}
        if headers:
            self.settings["headers"] = headers
        version = self.params.get("api_version")
        if version is not None and self.settings["backend"] == "azure":
            self._moved("api_version", "query")
            self.settings["query"] = {"api-version": self.variables.of(version) or self.variables.literal(version)}
        dropped = self.params.get("additional_drop_params")
        if isinstance(dropped, list) and (names := [str(name) for name in dropped if is_parameter(str(name))]):
            self._moved("additional_drop_params", "drop")
            self.settings["drop"] = [self.variables.literal(name) for name in names]

    # -- prices and limits

    def _read_prices(self) -> None:
        price = {}
        for section, found in (("model_info", self.info), ("litellm_params", self.params)):
            for key, target in PRICES.items():
                if key not in found:
                    continue
                if (cost := _cost(found[key])) is None:
                    self.left[key] = "no price: a number of USD per token"
                    continue
                price[target] = cost
                self._moved(key, f"price.{target}", section)
        if price:
            self.settings["price"] = price

    def _read_limits(self) -> None:
        if (window := whole(self.info.get("max_input_tokens"))) is not None:
            answer = whole(self.info.get("max_output_tokens")) or 0  # the window here is of both
            self.settings["context_window"] = window + answer
            self._moved("max_input_tokens", "context_window", "model_info")
            if answer:
                self._moved("max_output_tokens", "context_window", "model_info")
        if (limit := whole(self.params.get("max_parallel_requests"))) is not None:
            self.settings["concurrent_requests"] = min(limit, 1_000_000)
            self._moved("max_parallel_requests", "concurrent_requests")
        for key, name in (("rpm", "requests_per_minute"), ("tpm", "tokens_per_minute")):
            limit = whole(self.params.get(key))
            if limit is not None and limit <= MOST_PER_MINUTE and not KINDS[self.settings["backend"]].local:
                self.settings[name] = limit
                self._moved(key, name)
        for key in ("stream_timeout", "timeout", "request_timeout"):
            if "first_token" not in self.settings and (silence := seconds(self.params.get(key))) is not None:
                self.settings["first_token"] = silence
                self._moved(key, "first_token")

    def _account_for_the_rest(self, account: KeyAccount, output_tokens: int | None) -> None:
        moved = {path for path, _ in self.moves}
        for key in self.params:
            path = (*self.path, "litellm_params", str(key))
            reason = self.left.get(str(key)) or reasons.reason_for(str(key), reasons.DEPLOYMENT)
            if path not in moved and reason and not (key == "max_tokens" and output_tokens):
                account.dropped(path, reason)
        for key in self.entry:
            if reason := reasons.ENTRY.get(str(key)):
                account.dropped((*self.path, str(key)), reason)
        for key in self.info:
            path = (*self.path, "model_info", str(key))
            if path not in moved:
                account.dropped(path, reasons.reason_for(str(key), reasons.MODEL_INFO) or "")
        if self.settings["backend"] != "azure":
            account.dropped((*self.path, "litellm_params", "api_version"), "versions are part of the URL")


def _cost(value: Any) -> float | None:
    """USD per million tokens, of USD per token."""
    try:
        cost = float(value) * 1e6
    except (TypeError, ValueError):
        return None
    return float(f"{cost:.6g}") if 0 <= cost < inf else None
