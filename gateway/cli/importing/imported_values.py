"""Values of an imported file as they may be written: variables in place of secrets, names that are valid here.

A literal secret is neither written nor printed: `${NAME}` takes its place, and the operator sets the variable.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from backends.http.connection_pool import BackendAddress
from backends.scrubbing import is_secret
from gateway.config.field_types import HEADER_NAME, OWN_PARAMETER, TRANSPORT_HEADER

_ENVIRON = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
_DOLLAR = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\})?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SENSITIVE = re.compile(r"(?i)auth|key|token|secret|cookie|passw|credential")
_OPERATIONS = ("/chat/completions", "/completions", "/embeddings", "/responses", "/messages")
PLACEHOLDERS = frozenset(  # that users write where a server takes any key
    "none null empty na n/a x xx xxx xxxx sk-xxx sk-xxxx dummy dummy-key fake fake-key test token any anything"
    " not-needed not-required no-key-required sk-no-key-required sk-dummy sk-fake ollama vllm lm-studio lmstudio"
    " local key api-key nokey no-key placeholder unused ignored sk-1234 sk-none sk-local sk-empty".split()
)


def referenced(node: Any) -> Iterator[str]:
    """Names of the environment variables to which texts of an imported file refer."""
    if isinstance(node, str):
        match = _ENVIRON.fullmatch(node.strip()) or _REFERENCE.fullmatch(node.strip())
        yield from [match[1]] if match else filter(None, _DOLLAR.findall(node))
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from referenced(each)


class Variables:
    """Environment variables of the written file, in order of use. `literals`: variables in place of a literal.

    `taken`: names of other variables, not given to a literal: another's value would go to the server of the literal.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = frozenset(taken)
        self.names: list[str] = []
        self.literals: list[str] = []
        self._of_literal: dict[str, str] = {}  # variable, by replaced literal

    def reference(self, name: str) -> str:
        if name not in self.names:
            self.names.append(name)
        return f"${{{name}}}"

    def in_place_of_literal(self, value: Any, *words: str) -> str:
        """A variable named by `words`; equal literals share one."""
        name = re.sub(r"[^A-Z0-9]+", "_", "_".join(words).upper()).strip("_")
        base = name = name if name[:1].isalpha() else f"V_{name}"
        if (known := self._of_literal.get(str(value))) is not None:
            return self.reference(known)
        number = 2
        while name in self.names or name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._of_literal[str(value)] = name
        self.literals.append(name)
        return self.reference(name)

    def of(self, value: Any) -> str | None:
        """Reference `${NAME}` of a value `os.environ/NAME`, `${NAME}` or `$NAME`; None: `value` is no reference."""
        name = self.name_of(value)
        return self.reference(name) if name else None

    @staticmethod
    def name_of(value: Any) -> str | None:
        """Name of the variable that the value refers to; None: it is no reference."""
        if not isinstance(value, str):
            return None
        match = _ENVIRON.fullmatch(value.strip()) or _REFERENCE.fullmatch(value.strip())
        return match[1] if match else None

    def literal(self, value: Any) -> str:
        """Text as it is written: a dollar sign is doubled, unless it begins a `${NAME}`."""

        def written(match: re.Match[str]) -> str:
            return self.reference(match[1]) if match[1] else "$$"

        return _DOLLAR.sub(written, str(value))

    def secret(self, value: Any, *words: str) -> str:
        """A reference, in any case."""
        return self.of(value) or self.in_place_of_literal(value, *words)

    def text(self, name: str, value: Any, *words: str) -> str:
        """A value that is a secret only by its look, or by the name of its key."""
        if (reference := self.of(value)) is not None:
            return reference
        text = str(value)
        if _SENSITIVE.search(name) or any(is_secret(word) for word in text.split() if not word.startswith("http")):
            return self.in_place_of_literal(value, *words, name)
        return self.literal(text)


def is_placeholder(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in PLACEHOLDERS


def is_header(name: str) -> bool:
    """A header that a pool may set."""
    return re.fullmatch(HEADER_NAME, name) is not None and not re.fullmatch(TRANSPORT_HEADER, name)


def is_header_value(text: str) -> bool:
    return re.fullmatch(r"[\t -~]*", text) is not None


def is_host(text: str) -> bool:
    """A host name or an IPv4 address."""
    return _HOST.fullmatch(text) is not None


def is_parameter(name: str) -> bool:
    """A member of requests that a pool may drop."""
    return re.fullmatch(r"[!-~]+", name) is not None and not re.fullmatch(OWN_PARAMETER, name)


def server_url(value: Any) -> str | None:
    """The base URL of a server, as it is written here; None: none that can be."""
    text = str(value).strip().rstrip("/")
    for operation in _OPERATIONS:
        text = text.removesuffix(operation)
    try:
        BackendAddress.parse(text)
    except ValueError:
        return None
    return text


def same_server(url: str, other: str) -> bool:
    if "$" in url or "$" in other:
        return url == other
    one, two = BackendAddress.parse(url), BackendAddress.parse(other)
    return (one.host.lower(), one.port) == (two.host.lower(), two.port)


def pool_name(text: str, taken: Container[str]) -> str:
    """A valid pool name that is not taken."""
    base = re.sub(r"[^A-Za-z0-9._:-]+", "-", text).strip("-._:") or "pool"
    return _free(base, taken)


def route_name(text: str, taken: Container[str]) -> str:
    """The name itself, or, with blanks or other scripts in it, a similar one: headers name routes."""
    base = re.sub(r"[^!-~]+", "-", text).strip("-") or "route"
    return base if base == text else _free(base, taken)


def _free(base: str, taken: Container[str]) -> str:
    number, name = 2, base
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def number(value: Any) -> float | None:
    """A positive number; None: it is none."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if 0 < found < 1e15 else None


def whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def seconds(value: Any) -> str | None:
    """A duration as text, such as `30s`."""
    found = number(value)
    return None if found is None or found < 0.001 or found > 1e6 else f"{found:g}s"
