"""HTTP requests of the commands to a running gateway, and the error of one that does not answer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gateway.config.config_errors import ConfigError

PATIENCE = 10.0  # s to wait for an answer


class Gone(Exception):
    """The address does not answer, or does not answer like a gateway."""


class ErrorReply(Gone):
    """A reply with an error status. `message`: the gateway's, or else the status."""

    def __init__(self, error: HTTPError) -> None:
        super().__init__(f"HTTP {error.code}")
        self.status = error.code
        try:
            self.message = str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):  # not a gateway's
            self.message = str(self)


def ask(
    url: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
    patience: float = PATIENCE,
    most: int | None = None,
) -> Any:
    """GET, or POST with a body. `most`: bytes to read. Raises Gone."""
    try:
        with urlopen(Request(f"{url.rstrip('/')}{path}", body, dict(headers)), timeout=patience) as reply:
            return json.loads(reply.read(most))
    except HTTPError as error:
        raise ErrorReply(error) from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise Gone(error.reason if isinstance(error, URLError) else error) from None


def ask_admin(admin: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> Any:
    """Raises ConfigError."""
    try:
        return ask(admin, path, body, headers)
    except ErrorReply as reply:
        raise ConfigError([f"{admin}: {reply.message}"]) from None
    except Gone as gone:
        raise ConfigError([not_the_admin_port(admin, gone)]) from None


def not_the_admin_port(admin: str, gone: Gone) -> str:
    return f"{admin}: this is not the admin port of a running gateway: {gone}"


def key_in(variable: str | None) -> str:
    """The key in an environment variable: arguments are visible to every user of the machine. Empty without a variable.

    Raises ConfigError where the variable is not set.
    """
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "")):
        raise ConfigError([f"firsttoken: the environment variable {variable}, which --key-env names, is not set"])
    return key


def authorization(key: str) -> dict[str, str]:
    """The header of a request; none without a key."""
    return {"authorization": f"Bearer {key}"} if key else {}
