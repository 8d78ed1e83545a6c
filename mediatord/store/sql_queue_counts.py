"""
How much waits for whom, in SQL; runs inside a transaction of the caller.

Who inserts or deletes messages counts them here, once for each queue however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.store.known_queues import Queue
from mediatord.store.sql_rows import VALUES_AT_A_TIME, change_in, insert_rows, pieces, rows_clause

_CHANGE = "INSERT OR ROLLBACK INTO queue (account_id, recipient_id, messages, bytes)"
_ADD = "ON CONFLICT DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes"
# A subquery, because SQLite would look for the pairs of a `VALUES` in all of the table.
_EMPTIED = """
    WITH one (account, recipient) AS (VALUES {})
    DELETE FROM queue WHERE (account_id, recipient_id) IN (SELECT account, recipient FROM one) AND messages = 0
"""
_LEFT = """
    DELETE FROM recipient
    WHERE id IN ({}) AND registered IS NULL AND NOT EXISTS (
        SELECT 1 FROM queue q WHERE q.account_id = recipient.account_id AND q.recipient_id = recipient.id
    )
"""


class Counts:
    """What came and went during a run of operations. A queue knows at once; the table is told by :meth:`write`."""

    def __init__(self) -> None:
        self._changes: dict[int, list[int]] = {}
        self._queues: dict[int, Queue] = {}
        self._begun: list[Queue] = []

    def add(self, queue: Queue, messages: int, size: int, origin: int | None = None) -> None:
        """
        So many messages of so many bytes came, or went if that is less than nothing.

        :param origin: of all of them, if it is known; if not, who has how much of the queue is known no longer.
        """
        if queue.standing is not None:
            queue.stand(messages, size, origin)
        queue.messages += messages
        queue.size += size
        change = self._changes.get(queue.recipient_id)
        if change is None:
            self._queues[queue.recipient_id] = queue
            if queue.fresh:
                self._begun.append(queue)
            self._changes[queue.recipient_id] = [messages, size]
        else:
            change[0] += messages
            change[1] += size

    def write(self, connection: Connection) -> None:
        """Tell the table; queues that are empty leave it, and so do recipients of which nothing else is left."""
        rows = [
            (self._queues[number].account_id, number, messages, size)
            for number, (messages, size) in self._changes.items()
            if messages or size
        ]
        touched = list(self._queues.values())
        self._changes, self._queues = {}, {}
        count_in(connection, rows)
        if self._begun:
            self._mark_used(connection)
        _drop_empty(connection, [queue for queue in touched if queue.messages <= 0])

    def _mark_used(self, connection: Connection) -> None:
        """Their accounts have had a message."""
        begun, self._begun = self._begun, []
        numbers = list({queue.account_id for queue in begun})
        change_in(connection, "UPDATE account SET fresh = 0 WHERE id IN ({}) AND fresh = 1", numbers)
        for queue in begun:
            queue.fresh = False


def count_in(connection: Connection, changes: Sequence[tuple[int, int, int, int]]) -> None:
    """Tell the table of numbers of accounts and recipients, and of how many messages and bytes came or went."""
    insert_rows(connection, _CHANGE, changes, _ADD)


def _drop_empty(connection: Connection, queues: Sequence[Queue]) -> None:
    for some in pieces(queues, VALUES_AT_A_TIME // 2):
        values = [number for queue in some for number in (queue.account_id, queue.recipient_id)]
        connection.execute(_EMPTIED.format(rows_clause(len(some), 2)), values)
    left = [queue.recipient_id for queue in queues if not queue.registered]
    if left:
        change_in(connection, _LEFT, left)
