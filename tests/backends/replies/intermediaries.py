"""Servers in between: nginx's and Envoy's pages, AWS's and Google's load balancers, Cloudflare ("5xx errors")."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import HTML, NOT_SERVED, of

nginx, cloudflare, balancer = of("nginx"), of("cloudflare"), of("balancer")
NGINX = "<hr><center>nginx/1.27.3</center>\r\n"
CLOUDFLARE = (
    "<!DOCTYPE html><html><head><title>api.x.example | {}</title></head><body>Performance by Cloudflare</body></html>"
)
GOOGLE = (
    "<html><head><title>502 Server Error</title></head><body><h1>Error: Server Error</h1><h2>The server encountered a "
    "temporary error and could not complete your request.<p>Please try again in 30 seconds.</h2></body></html>"
)
AWS = {"server": "awselb/2.0"}

REPLIES = [
    nginx("redirect", 301, HTML.format("301 Moved Permanently", NGINX), FailureKind.PROTOCOL),
    nginx("forbidden", 403, HTML.format("403 Forbidden", NGINX), FailureKind.AUTH),
    nginx("path", 404, HTML.format("404 Not Found", NGINX), FailureKind.MISCONFIGURED, NOT_SERVED),
    nginx("method", 405, HTML.format("405 Not Allowed", NGINX), FailureKind.MISCONFIGURED, NOT_SERVED),
    nginx("body", 413, HTML.format("413 Request Entity Too Large", NGINX), FailureKind.CLIENT),
    nginx("limit", 429, HTML.format("429 Too Many Requests", NGINX), FailureKind.RATE_LIMITED),
    nginx("bad gateway", 502, HTML.format("502 Bad Gateway", NGINX), FailureKind.SERVER),
    nginx("unavailable", 503, HTML.format("503 Service Temporarily Unavailable", NGINX), FailureKind.OVERLOADED),
    nginx("timeout", 504, HTML.format("504 Gateway Time-out", NGINX), FailureKind.TIMEOUT),
    cloudflare("blocked", 403, CLOUDFLARE.format("Attention Required!"), FailureKind.AUTH),
    cloudflare("bad gateway", 502, CLOUDFLARE.format("502: Bad gateway"), FailureKind.PROVIDER),
    cloudflare(
        "unknown error", 520, CLOUDFLARE.format("520: Web server is returning an unknown error"), FailureKind.PROVIDER
    ),
    cloudflare("down", 521, b"error code: 521", FailureKind.PROVIDER, headers={"retry-after": "30"}, learned=30.0),
    cloudflare("connection", 522, CLOUDFLARE.format("522: Connection timed out"), FailureKind.PROVIDER),
    cloudflare("unreachable", 523, b"error code: 523", FailureKind.PROVIDER),
    cloudflare("timeout", 524, CLOUDFLARE.format("524: A timeout occurred"), FailureKind.TIMEOUT),
    cloudflare("handshake", 525, b"error code: 525", FailureKind.PROVIDER),
    cloudflare("certificate", 526, b"error code: 526", FailureKind.PROVIDER),
    cloudflare("origin's name", 530, b"error code: 1016", FailureKind.PROVIDER),
    balancer("AWS: bad gateway", 502, HTML.format("502 Bad Gateway", ""), FailureKind.PROVIDER, headers=AWS),
    balancer(
        "AWS: no target", 503, HTML.format("503 Service Temporarily Unavailable", ""), FailureKind.PROVIDER, headers=AWS
    ),
    balancer("AWS: timeout", 504, HTML.format("504 Gateway Time-out", ""), FailureKind.TIMEOUT, headers=AWS),
    balancer("Google", 502, GOOGLE, FailureKind.PROVIDER),
    balancer("Envoy", 503, b"no healthy upstream", FailureKind.PROVIDER),
    balancer(
        "Envoy, a reset", 503, b"upstream connect error or disconnect/reset before headers", FailureKind.OVERLOADED
    ),
]
