"""Deployments of an imported file, joined into pools: servers of one model, or keys of one API, are one pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backends.catalog import KINDS
from gateway.cli.importing.imported_values import same_server
from gateway.cli.importing.litellm_providers import needs_key
from gateway.config.config_errors import Path


@dataclass(frozen=True, slots=True)
class Deployment:
    """One server of a model. `settings`: of its pool, without URL and key. `moves`: imported keys, and the key of the
    pool that each has become."""

    group: str
    settings: dict[str, Any]
    url: str | None = None
    api_key: str | None = None
    order: float | None = None
    output_tokens: int | None = None
    moves: tuple[tuple[Path, str], ...] = ()
    share: float = 1.0  # of the requests of its group, by its weight
    weights: tuple[float, ...] = ()  # LiteLLM's weight, rpm and tpm; 0: none is given
    retries: int | None = None


@dataclass(slots=True)
class PoolDraft:
    """A pool that is being put together."""

    settings: dict[str, Any]
    urls: list[str | None]
    keys: list[str | None]
    deployments: list[Deployment] = field(default_factory=list)

    @classmethod
    def of(cls, one: Deployment) -> PoolDraft:
        return cls(one.settings, [one.url], [one.api_key], [one])

    def takes(self, one: Deployment, several_apis: bool) -> bool:
        """Adds the deployment, if it is one more server or key of this pool. The same again changes nothing."""
        if one.settings != self.settings or one.share != self.deployments[0].share:
            return False
        several = several_apis or KINDS[self.settings["backend"]].local
        if not (self._same(one) or (several and self._one_more_server(one)) or self._one_more_key(one)):
            return False
        self.deployments.append(one)
        return True

    def _same(self, one: Deployment) -> bool:
        return one.url in self.urls and one.api_key in self.keys

    def _one_more_server(self, one: Deployment) -> bool:
        known = [url for url in self.urls if url is not None]
        if one.url is None or self.keys != [one.api_key] or len(known) < len(self.urls):
            return False
        if any(same_server(one.url, url) for url in known):
            return False
        self.urls.append(one.url)
        return True

    def _one_more_key(self, one: Deployment) -> bool:
        if self.urls != [one.url] or one.api_key is None or None in self.keys:
            return False
        if not needs_key(self.settings["backend"]):
            return False
        self.keys.append(one.api_key)
        return True

    @property
    def share(self) -> float:
        """Of the requests of its group: servers have shares alike."""
        return sum(one.share for one in self.deployments)

    @property
    def section(self) -> dict[str, Any]:
        """As written under `pools`."""
        found: dict[str, Any] = {key: self.settings[key] for key in ("backend", "model") if key in self.settings}
        urls, keys = [url for url in self.urls if url is not None], [key for key in self.keys if key is not None]
        if urls:
            single = len(urls) == 1 and needs_key(found["backend"])
            found |= {"base_url": urls[0]} if single else {"endpoints": urls}
        if keys:
            found |= {"api_key": keys[0]} if len(keys) == 1 else {"api_keys": keys}
        return found | self.settings

    def target(self, key: str) -> str:
        """The name of an imported key in the section."""
        section = self.section
        if key == "url":
            return "base_url" if "base_url" in section else "endpoints"
        return "api_keys" if key == "api_key" and "api_keys" in section else key


def joined(deployments: Iterable[Deployment], several_apis: bool = False) -> list[PoolDraft]:
    """Pools of deployments, as they stand in the file. `several_apis`: servers whose load is not seen are one pool too,
    which then prefers the quickest of them."""
    drafts: list[PoolDraft] = []
    for one in deployments:
        if not any(draft.takes(one, several_apis) for draft in drafts):
            drafts.append(PoolDraft.of(one))
    return drafts
