"""The common base of the configuration's sections, and their small values."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, WithJsonSchema

from backends.simulated.profiles import PROFILES
from gateway.cluster.redis_url import parse_redis_url
from gateway.config.config_errors import did_you_mean
from policies.routes.route import Strict
from policies.routes.units import Duration

_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_NAME = re.compile(r"[!-~]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_FIELD = re.compile(r"[\t -~]*")
_LEAST_SECRET = 16  # characters
_TRANSPORT = frozenset({"host", "content-length", "transfer-encoding", "connection"})


class Section(Strict):
    """A base model; the text under a field is its description in the JSON Schema."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)


def written(text: str) -> Any:
    """A default in its YAML form."""
    return Field(text, validate_default=True)


def _pool_name(value: str) -> str:
    if not _POOL.fullmatch(value):
        raise ValueError("the name of a pool takes letters, digits and . _ : - only")
    return value


def _namespace(value: str) -> str:
    if not _POOL.fullmatch(value):
        raise ValueError("a namespace takes letters, digits and . _ : - only: it begins every key")
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("a name goes into a header: visible ASCII without spaces only")
    return value


def _digest(value: str) -> str:
    # The text is not repeated: the key itself may stand there.
    if not _DIGEST.fullmatch(value.lower()):
        raise ValueError('not a SHA-256 digest, 64 hex digits: printf %s "$KEY" | sha256sum')
    return value.lower()


def _header_name(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError("not the name of a header")
    if value.lower() in _TRANSPORT:
        raise ValueError("the connection sets this header itself; leave it out")
    return value.lower()


def _header_value(value: SecretStr) -> SecretStr:
    if not _FIELD.fullmatch(value.get_secret_value()):
        raise ValueError("the value of a header is one line of visible ASCII")
    return value


def _redis(value: SecretStr) -> SecretStr:
    parse_redis_url(value.get_secret_value())  # the error does not repeat the text, which may contain a password
    return value


def _cache_secret(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < _LEAST_SECRET:
        raise ValueError(f"a secret takes at least {_LEAST_SECRET} characters: openssl rand -hex 32")
    return value


def _access_log(value: str) -> str:
    if value not in ("stdout", "stderr", "off") and not re.search(r"[/.]", value):
        raise ValueError(f"'{value}' is not stdout, stderr, off or a path such as ./access.jsonl")
    return value


def _profile(value: str | None) -> str | None:
    if value is not None and value not in PROFILES:
        raise ValueError(f"no profile '{value}'{did_you_mean(value, PROFILES)}")
    return value


def _text(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


Positive = Annotated[Duration, Field(gt=0)]
PoolName = Annotated[str, AfterValidator(_pool_name)]
Name = Annotated[str, AfterValidator(_name)]
Namespace = Annotated[str, AfterValidator(_namespace)]
Sha256 = Annotated[str, AfterValidator(_digest), _text(r"^[0-9a-fA-F]{64}$")]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[SecretStr, AfterValidator(_header_value)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis), _text(r"^(rediss?(\+sentinel|\+cluster)?|unix)://")]
CacheSecret = Annotated[SecretStr, AfterValidator(_cache_secret)]
ProfileName = Annotated[str | None, AfterValidator(_profile)]
AccessLog = Annotated[str, AfterValidator(_access_log), _text(r"^(stdout|stderr|off|.*[/.].*)$")]
