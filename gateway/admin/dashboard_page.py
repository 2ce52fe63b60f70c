"""GET /dashboard: one page, put together from its parts, that asks nobody but the port that it came from.

Its policy names the very script and style by their digests: whatever text reaches the page from requests, nothing but
these runs, and nothing is sent elsewhere.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

PARTS = {"/*style*/": "dashboard.css", "/*script*/": "dashboard.js"}


async def dashboard(http: web.Request) -> web.StreamResponse:
    page, policy = assembled()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
        "server": "firsttoken",
    }
    return web.Response(text=page, content_type="text/html", charset="utf-8", headers=headers)


@cache
def assembled() -> tuple[str, str]:
    """The page, and its content security policy."""
    here = files("gateway.admin")
    page = (here / "dashboard.html").read_text("utf-8")
    parts = {mark: (here / name).read_text("utf-8") for mark, name in PARTS.items()}
    for mark, text in parts.items():
        page = page.replace(mark, text)
    style, script = (f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in parts.values())
    return page, (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
