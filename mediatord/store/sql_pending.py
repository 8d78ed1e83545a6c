"""
Events on their way, in SQL; each function runs inside a transaction of the caller.

Deliveries are what there is most of, so those that stand next to each other in a batch share a statement that looks
up contracts and counters, one that inserts the events and one that counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from mediatord.errors import ContractNotFound, OverQuota
from mediatord.interfaces import Removed
from mediatord.interfaces.decentrl import Caps, Found, PendingEvent, Slice
from mediatord.store.books import Entry
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.sql_ledger import enter
from mediatord.store.sql_parties import change_holding, find_party
from mediatord.store.sql_rows import (
    ROWS_AT_A_TIME,
    change_in,
    gather,
    gather_in,
    gather_texts,
    insert_rows,
    key_of,
    limits,
    nothing,
    numbered_values,
    pieces,
)

# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_WAYS = """
    FROM (SELECT column1 AS number, column2 AS recipient, column3 AS sender FROM (VALUES {})) w
    CROSS JOIN party r ON r.did = w.recipient CROSS JOIN party s ON s.did = w.sender
    LEFT JOIN holding h ON h.party_id = r.id
    WHERE (SELECT max(expires_at) FROM contract WHERE peer_id = s.id AND owner_id = r.id) > ?
"""
_WAY = "w.number, r.id, coalesce(h.pending, 0), coalesce(h.pending_bytes, 0)"
_INSERT = """
    INSERT OR ROLLBACK INTO pending_event (id, recipient_id, sender_key, sender_did, received_at, size, payload)
"""
_COUNT = "INSERT INTO holding (party_id, pending, pending_bytes)"
_COUNTED = """
    ON CONFLICT DO UPDATE SET
        pending = pending + excluded.pending, pending_bytes = pending_bytes + excluded.pending_bytes
"""

_Pair = tuple[str, str]


@dataclass(eq=False, slots=True)
class _Mailbox:
    """What waits for a recipient, and how much more than before that is."""

    id: int
    events: int
    bytes: int
    more_events: int = 0
    more_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Delivering:
    """A delivery as an operation of a batch."""

    event: PendingEvent
    size: int
    caps: Caps
    now: float

    def __call__(self, connection: Connection) -> Outcome:
        """By itself."""
        return self.together(connection, [self])[0]

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the deliveries after it."""
        deliveries = [work for work in works if isinstance(work, Delivering)]
        pairs = [(one.event.recipient_did, one.event.sender_did) for one in deliveries]
        # What a batch waits for is short, so one time will do for all: that of the last.
        ways = find_ways(connection, list(dict.fromkeys(pairs)), max([one.now for one in deliveries]))
        rows: list[tuple[Any, ...]] = []
        outcomes = [one.deliver(ways.get(pair), rows) for one, pair in zip(deliveries, pairs, strict=True)]
        insert_rows(connection, _INSERT, rows)
        enter(connection, "decentrl", "accepted", len(rows))
        boxes = {box.id: box for box in ways.values() if box.more_events}
        insert_rows(
            connection, _COUNT, [(id, box.more_events, box.more_bytes) for id, box in boxes.items()], _COUNTED
        )
        return outcomes

    def deliver(self, box: _Mailbox | None, rows: list[tuple[Any, ...]]) -> Outcome:
        """
        Add the row to be inserted if nothing is against it.

        :param box: None when the recipient has no contract with the sender.
        """
        if box is None:
            return Outcome(error=ContractNotFound())
        caps, event, size = self.caps, self.event, self.size
        if box.events >= caps.pending or (size and box.bytes + size > caps.pending_bytes):
            return Outcome(error=OverQuota())
        box.events += 1
        box.more_events += 1
        box.bytes += size
        box.more_bytes += size
        sender, time = event.sender_did, repr(float(event.received_at))
        rows.append((event.id, box.id, key_of(sender), sender, time, size, event.payload))
        return Outcome()


def find_ways(connection: Connection, pairs: Sequence[_Pair], now: float) -> dict[_Pair, _Mailbox]:
    """The mailboxes of recipients that have a contract with the sender at a time, by recipient and sender."""
    ways: dict[_Pair, _Mailbox] = {}
    boxes: dict[int, _Mailbox] = {}
    for some in pieces(pairs, ROWS_AT_A_TIME):
        source = _WAYS.format(numbered_values(len(some), 2))
        for number, *box in gather(connection, _WAY, source, [*(did for pair in some for did in pair), now]):
            ways[some[number]] = boxes.setdefault(box[0], _Mailbox(*box))
    return ways


def pending_events(connection: Connection, recipient: str, sender: str | None, part: Slice) -> Found[PendingEvent]:
    party = find_party(connection, recipient)
    if party is None or not party.pending:
        return nothing()
    where, total = "recipient_id = ?", party.pending
    parameters: list[Any] = [party.id]
    if sender is not None:
        where, parameters = f"{where} AND sender_key = ?", [party.id, key_of(sender)]
        count = f"SELECT count(*) FROM pending_event WHERE {where}"
        ((total,),) = connection.execute(count, parameters).fetchall()
    rows = gather(
        connection,
        "seq, id, sender_did, received_at, size",
        f"""
        FROM (
            SELECT seq, id, sender_did, received_at, size FROM pending_event
            WHERE {where} ORDER BY seq LIMIT ? OFFSET ?
        )
        """,
        [*parameters, *limits(part)],
    )
    payloads = gather_texts(connection, "pending_event", "payload", {row[0]: row[4] for row in rows})
    found = [
        PendingEvent(id, recipient, sender_did, payloads[seq], float(received_at))
        for seq, id, sender_did, received_at, _ in rows
    ]
    return Found(tuple(found), total)


def acknowledge(
    connection: Connection, recipient: str, ids: Sequence[str], entry: Entry = "acknowledged"
) -> list[Removed]:
    """
    Those that were there, in order of arrival.

    :param entry: what they are to the ledger.
    """
    party = find_party(connection, recipient)
    if party is None or not party.pending:
        return []
    mine = "FROM pending_event WHERE +recipient_id = ? AND id IN ({})"
    rows = sorted(gather_in(connection, "seq, id, size, received_at", mine, list(dict.fromkeys(ids)), party.id))
    if rows:
        change_in(connection, "DELETE FROM pending_event WHERE seq IN ({})", [row[0] for row in rows])
        enter(connection, "decentrl", entry, len(rows))
        size = sum([row[2] for row in rows])
        change_holding(connection, party.id, pending=-len(rows), pending_bytes=-size)
    return [Removed(id, recipient, recipient, size, float(received_at), 0) for _, id, size, received_at in rows]
