"""Adds the URLs of the repository that a wheel is built in: of a fork's wheel those of the fork.

GitHub Actions sets both variables. Without them a wheel has no URLs.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Repository": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


class RepositoryUrls(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        if server and repository:
            metadata["urls"] = {name: f"{server}/{repository}{path}" for name, path in PAGES.items()}
