"""Finding messages of an account by the digests of their payloads, in SQL, a slice at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from sqlite3 import Connection
from typing import NamedTuple

from mediatord.store.sql_accounts import account_id
from mediatord.store.sql_messages import head
from mediatord.store.sql_rows import select_in

# Messages whose digests are compared before others may read; those of one recipient are compared together.
COMPARED_AT_A_TIME = 20_000

_DIGEST = re.compile("[0-9a-f]{64}")
_QUEUES = "SELECT recipient_id, messages FROM queue WHERE account_id = ? AND recipient_id > ? ORDER BY recipient_id"
_FOUND = "SELECT m.id, m.digest FROM message m WHERE m.recipient_id = ? AND m.digest_head IN ({})"


class Slice(NamedTuple):
    """
    What was found.

    :param ids: of the messages.
    :param after: the number of the last recipient that was looked at; None when it was the last of all.
    """

    ids: list[str]
    after: int | None


def digests(ids: Iterable[str]) -> list[bytes]:
    """Those that may be a SHA-256 in lower-case hexadecimal."""
    return [bytes.fromhex(id) for id in ids if len(id) == 64 and _DIGEST.fullmatch(id)]


def find(connection: Connection, account: str, wanted: Sequence[bytes], after: int) -> Slice:
    """Messages whose payload has one of these digests, of recipients with greater numbers."""
    number = account_id(connection, account)
    if number is None:
        return Slice([], None)
    heads, known = [head(digest) for digest in wanted], set(wanted)
    ids: list[str] = []
    left = COMPARED_AT_A_TIME
    for recipient, messages in _queues(connection, number, after):
        if left <= 0:
            return Slice(ids, after)
        rows = select_in(connection, _FOUND, heads, recipient)
        ids += [id for id, digest in rows if digest in known]
        after = recipient
        left -= messages
    return Slice(ids, None)


def _queues(connection: Connection, number: int, after: int) -> Iterator[tuple[int, int]]:
    yield from connection.execute(_QUEUES, (number, after))
