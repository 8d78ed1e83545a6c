"""Which counters of the daemon a line stands for (the event `counters`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mediatord.observability.event_schema import EVENTS

CONNECTIONS = "connections"
# Entries of the store's own books (the event `ledger`) by the line for them.
ENTRIES = {
    "msg.accept": "accepted",
    "msg.ack": "acknowledged",
    "msg.expire": "expired",
    "msg.evict": "evicted",
    "msg.remove": "removed",
}
NAMES = EVENTS["counters"].fields
_ALWAYS: dict[str, tuple[tuple[str, int], ...]] = {
    "msg.ack": (("delivered", 1),),
    "msg.expire": (("expired", 1),),
    "msg.evict": (("evicted", 1),),
    "conn.open": ((CONNECTIONS, 1),),
    "conn.close": ((CONNECTIONS, -1),),
}
_FORWARDED = (("forwarded", 1),)
_QUEUED = (("forwarded", 1), ("stored", 1))
_FELL_BACK = (("stored", 1),)


def counted(event: str, fields: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Names of counters and by how much this line raises them."""
    if event == "req.done":
        return ((_outcome(fields), 1),)
    if event == "msg.accept":
        return _QUEUED if fields.get("method") == "queue" else _FORWARDED
    if event == "msg.push" and fields.get("ok") is False:
        return _FELL_BACK
    return _ALWAYS.get(event, ())


def _outcome(fields: Mapping[str, Any]) -> str:
    if fields["status"] >= 500:
        return "requests_failed"
    return "requests_rejected" if "code" in fields else "requests_accepted"
