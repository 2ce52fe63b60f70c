"""Names of everything that the gateway keeps or sends in Redis: the one place that makes them.

Rules:
- Each name begins with `state.namespace`, so that two fleets on one Redis share nothing.
- A slot is the hash tag of a cluster: names with one slot are on one node, and a script may use them together.
- Before 0.2.0 the callers' keys, their use and the number of processes had names without the namespace. These are
  spelled as those of the namespace DEFAULT_NAMESPACE, whose fleet takes them over; to any other fleet they are another
  fleet's.
"""

from __future__ import annotations

from urllib.parse import quote

DEFAULT_NAMESPACE = "firsttoken"


def redis_name(namespace: str, *parts: str, slot: str = "") -> str:
    """`NAMESPACE:PART:PART`, or `NAMESPACE:{SLOT}:PART`. `slot`: any text; what it has beside letters, digits and
    `_.-~` is percent-encoded."""
    tag = [f"{{{quote(slot, safe='')}}}"] if slot else []
    return ":".join([namespace, *tag, *parts])
