"""Whom recipients have acknowledged, in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable
from sqlite3 import Connection

from mediatord.store.known_queues import Queue, known_queues
from mediatord.store.known_senders import KnownSenders
from mediatord.store.sql_rows import ROWS_AT_A_TIME, gather_in, pieces, rows_clause

_WRITE = """
    UPDATE recipient SET senders = new.column2 FROM (SELECT column1, column2 FROM (VALUES {})) new
    WHERE recipient.id = new.column1
"""


def read_senders(connection: Connection, queues: Iterable[Queue]) -> None:
    """Have these queues remember whom their recipients have acknowledged, in one statement."""
    known = known_queues(connection)
    missing = {}
    for queue in queues:
        known.keep_senders(queue)
        if queue.senders is None:
            missing[queue.recipient_id] = queue
    for number, text in gather_in(connection, "id, senders", "FROM recipient WHERE id IN ({})", list(missing)):
        missing[number].senders = KnownSenders(text)


def write_senders(connection: Connection, queues: Iterable[Queue]) -> None:
    """Those of these queues have changed."""
    rows = [(queue.recipient_id, queue.senders.text()) for queue in queues if queue.senders is not None]
    for some in pieces(rows, ROWS_AT_A_TIME):
        statement = _WRITE.format(rows_clause(len(some), 2))
        connection.execute(statement, [value for row in some for value in row])
