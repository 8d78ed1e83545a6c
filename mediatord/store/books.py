"""What becomes of messages, by the names that the ledger has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mediatord.interfaces import Reason

Entry = Literal["accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn"]
ENTRIES: tuple[Entry, ...] = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn")

# Who takes a message for another reason says so.
ENTRY_OF: Mapping[Reason | None, Entry] = {
    None: "acknowledged",
    "ttl": "expired",
    "fifo_count": "evicted",
    "fifo_bytes": "evicted",
}
