"""
Who has how much of a queue that is full, remembered from one deposit to the next.

What the connection that writes remembers of queues, so that a deposit need not look them up.

Messages that are to go, as they are read in SQL.

How much waits for whom, in SQL; runs inside a transaction of the caller.

Who inserts or deletes messages counts them here, once for each queue however many they are.

Whom recipients have acknowledged, in SQL; each function runs inside a transaction of the caller.

What became of all that was accepted, in SQL; each function runs inside a transaction of the caller.

In a transaction of :func:`~mediatord.store.sqlite.group_commit.commit_batch` what its operations count is written once,
before it is committed; elsewhere at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection
from typing import Any, Literal

from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.fair_share import KnownSenders, SenderGroup, SenderUsage
from mediatord.store.interfaces.messages import MessageLedger, RemovalReason, RemovedMessage, StoreLedger
from mediatord.store.message_operations import LEDGER_ENTRIES, LedgerEntry
from mediatord.store.sqlite.bulk_sql import (
    ROWS_PER_STATEMENT,
    VALUES_PER_STATEMENT,
    execute_in,
    format_values,
    insert_rows,
    select_rows_in,
    split_chunks,
)
from mediatord.store.sqlite.locks import WriteTicketLock


class EvictionState:
    """
    What each has of a queue, as long as nothing but deposits into it is done to the queue.

    :ivar behind: of some messages, up to which place in the order of arrival there are none.
    """

    __slots__ = ("behind", "usage")

    def __init__(self, usage: SenderUsage) -> None:
        self.usage = usage
        self.behind: dict[SenderGroup, int] = {}

    def change(self, origin: int, messages: int, size: int) -> None:
        """So much more, or less, is from there."""
        self.usage.change(origin, messages, size)


# Queues in each of two generations; with DIDs of two thousand characters, their own and that of the account, that is
# 32 MiB of text at most. Beside that there is only what is remembered of few queues, below.
QUEUE_CACHE_GENERATION = 4_096
# Queues of which it is known who has how much: a queue of a thousand messages may have twice as many parties.
STANDINGS = 32
# Queues of which it stays known whom their recipients have acknowledged: ten thousand bytes each at most.
SENDERS = 64

_QUEUE_COLUMNS = """
    r.did, r.id, r.account_id, a.did, coalesce(q.messages, 0), coalesce(q.bytes, 0), r.registered IS NOT NULL,
    a.fresh
"""
_QUEUE_SOURCE = """
    FROM recipient r CROSS JOIN account a ON a.id = r.account_id
    LEFT JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
"""
_QUEUES_BY_DID = f"{_QUEUE_SOURCE} WHERE r.did_digest IN ({{}}) AND r.registered IS NOT NULL"
_QUEUES_BY_ID = f"{_QUEUE_SOURCE} WHERE r.id IN ({{}})"


class CachedQueue:
    """
    What waits for a recipient DID of an account.

    :ivar messages: so many wait, and so many `size` bytes; kept by whoever changes it.
    :ivar registered: whether the account still has the DID.
    :ivar fresh: whether the account is not known to be used (:meth:`~mediatord.store.interfaces.accounts.IAccountStore.record_contact`).
    :ivar standing: who has how much of it, if that was asked lately; likewise.
    :ivar senders: whom its recipient has acknowledged, if that was asked lately; likewise.
    """

    __slots__ = (
        "account",
        "account_id",
        "did",
        "fresh",
        "messages",
        "recipient_id",
        "registered",
        "senders",
        "size",
        "standing",
    )

    def __init__(
        self,
        did: str,
        recipient_id: int,
        account_id: int,
        account: str,
        messages: int,
        size: int,
        registered: int = True,
        fresh: int = False,
    ) -> None:
        self.did = did
        self.recipient_id = recipient_id
        self.account_id = account_id
        self.account = account
        self.messages = messages
        self.size = size
        self.registered = bool(registered)
        self.fresh = bool(fresh)
        self.standing: EvictionState | None = None
        self.senders: KnownSenders | None = None

    def count_sender(self, messages: int, size: int, origin: int | None) -> None:
        """So many came from there, or went; None if nobody knows from where."""
        if origin is None:
            self.standing = None
        elif self.standing is not None:
            self.standing.change(origin, messages, size)


class QueueCache:
    """
    A bounded memory of queues. What was not asked for while as many others were is forgotten.

    It is as good as the transaction in which it was read: whoever changes a queue changes it here, a roll-back and a
    commit of somebody else clear it (:class:`StoreConnection`).
    """

    def __init__(self, generation: int = QUEUE_CACHE_GENERATION) -> None:
        self._generation = generation
        self._young: dict[str, CachedQueue] = {}
        self._old: dict[str, CachedQueue] = {}
        self._numbers: dict[int, CachedQueue] = {}
        self._standing: OrderedDict[int, CachedQueue] = OrderedDict()
        self._senders: OrderedDict[int, CachedQueue] = OrderedDict()

    def clear(self) -> None:
        """Forget them all."""
        self._young, self._old, self._numbers = {}, {}, {}
        self._standing.clear()
        self._senders.clear()

    def keep_eviction_state(self, queue: CachedQueue, standing: EvictionState) -> None:
        """Who has how much of it; of few queues that is remembered."""
        queue.standing = standing
        self._standing[queue.recipient_id] = queue
        self._standing.move_to_end(queue.recipient_id)
        if len(self._standing) > STANDINGS:
            _, oldest = self._standing.popitem(last=False)
            oldest.standing = None

    def retain_known_senders(self, queue: CachedQueue) -> None:
        """Whom its recipient has acknowledged is asked for; it stays until :meth:`forget_senders` at least."""
        self._senders[queue.recipient_id] = queue
        self._senders.move_to_end(queue.recipient_id)

    def trim_known_senders(self) -> None:
        """But for those of few queues that were asked for last; all that has changed of them is written."""
        while len(self._senders) > SENDERS:
            _, oldest = self._senders.popitem(last=False)
            oldest.senders = None

    def find(self, connection: Connection, dids: Sequence[str]) -> dict[str, CachedQueue]:
        """
        Those of the DIDs that somebody has registered; what is not known is looked up in one statement.

        :param dids: in their canonical form; by another form of it a DID is found too, but is looked up every time.
        """
        found = {}
        missing = []
        for did in dids:
            queue = self._young.get(did) or self._aged(did)
            if queue is None:
                missing.append(did)
            else:
                found[did] = queue
        if missing:
            digests = {did: compute_did_digest(did) for did in missing}
            rows = select_rows_in(connection, _QUEUE_COLUMNS, _QUEUES_BY_DID, list(digests.values()))
            queues = {
                compute_did_digest(row[0]): self._numbers.get(row[1]) or self._keep(CachedQueue(*row)) for row in rows
            }
            found |= {did: queues[digest] for did, digest in digests.items() if digest in queues}
        return found

    def find_by_ids(self, connection: Connection, recipient_ids: Iterable[int]) -> dict[int, CachedQueue]:
        """The same by the numbers of recipients, registered or left over."""
        wanted = set(recipient_ids)
        found = {number: self._numbers[number] for number in wanted if number in self._numbers}
        for queue in found.values():
            self._aged(queue.did)
        if len(found) < len(wanted):
            for row in select_rows_in(connection, _QUEUE_COLUMNS, _QUEUES_BY_ID, list(wanted - found.keys())):
                queue = CachedQueue(*row)
                found[queue.recipient_id] = self._keep(queue) if queue.registered else queue
        return found

    def _aged(self, did: str) -> CachedQueue | None:
        queue = self._old.pop(did, None)
        if queue is not None:
            self._young[did] = queue
        return queue

    def _keep(self, queue: CachedQueue) -> CachedQueue:
        if len(self._young) >= self._generation:
            for old in self._old.values():
                self._numbers.pop(old.recipient_id, None)
            self._young, self._old = {}, self._young
        self._young[queue.did] = self._numbers[queue.recipient_id] = queue
        return queue


class StoreConnection(Connection):
    """
    A connection that remembers queues from one transaction to the next.

    :ivar known: good within a transaction of :func:`~mediatord.store.sqlite.group_commit.commit_batch` only.
    :ivar entries: in such a transaction, what it has yet to write in the ledger; None outside.
    :ivar queue: where transactions that write wait for those of other processes; None where there are none.
    """

    known: QueueCache | None = None
    entries: Counter[tuple[str, str]] | None = None
    queue: WriteTicketLock | None = None
    _version = 0
    _trusted = False
    _checked = False

    def begun(self) -> None:
        """A transaction that may write has begun."""
        self._trusted, self._checked, self.entries = True, False, Counter()

    def ended(self, *, committed: bool) -> None:
        """It is over."""
        self._trusted, self.entries = False, None
        if not committed:
            self.known = None
        elif self.known is not None:
            self.known.trim_known_senders()

    def forget(self) -> None:
        """Who has which DID may be changed by this transaction."""
        if self.known is not None:
            self.known.clear()

    def queues(self) -> QueueCache:
        """What is known in this transaction; `PRAGMA data_version` differs once somebody else has committed."""
        if not self._trusted:
            return QueueCache()
        if not self._checked:
            ((version,),) = self.execute("PRAGMA data_version").fetchall()
            if version != self._version or self.known is None:
                self._version, self.known = version, QueueCache()
            self._checked = True
        assert self.known is not None
        return self.known


def get_queue_cache(connection: Connection) -> QueueCache:
    """What the connection knows; nothing where nobody says when transactions begin and end."""
    return connection.queues() if isinstance(connection, StoreConnection) else QueueCache()


def clear_queue_cache(connection: Connection) -> None:
    """Who has which DID is changed by this transaction."""
    if isinstance(connection, StoreConnection):
        connection.forget()


def begin_accounting(connection: Connection) -> None:
    """A transaction that may write has begun: until it is over, queues may be remembered."""
    if isinstance(connection, StoreConnection):
        connection.begun()


def end_accounting(connection: Connection, *, committed: bool) -> None:
    """It is over."""
    if isinstance(connection, StoreConnection):
        connection.ended(committed=committed)


# A time in two numbers, because JSON would round it.
MESSAGE_ROW_COLUMNS = """
    seq, id, recipient_id, size, CAST(received_at AS INTEGER), received_at - CAST(received_at AS INTEGER), pushes
"""
# In the table it is behind the payload, in the index it is not.
ORIGIN_COLUMN = """
    (
        SELECT origin FROM message o INDEXED BY message_of_recipient
        WHERE o.recipient_id = message.recipient_id AND o.seq = message.seq
    )
"""


class MessageRow:
    """A message that is to go: its row without the payload, and its queue."""

    __slots__ = ("id", "origin", "pushes", "queue", "received_at", "seq", "size")

    def __init__(
        self, queue: CachedQueue, seq: int, id: str, size: int, received_at: float, pushes: int, origin: int = 0
    ) -> None:
        self.queue = queue
        self.seq = seq
        self.id = id
        self.size = size
        self.received_at = received_at
        self.pushes = pushes
        self.origin = origin

    def removed(self, reason: RemovalReason | None = None) -> RemovedMessage:
        queue = self.queue
        return RemovedMessage(self.id, queue.did, queue.account, self.size, self.received_at, self.pushes, reason)


def parse_message_row(queue: CachedQueue, row: Sequence[Any]) -> MessageRow:
    """From the :data:`MESSAGE_ROW_COLUMNS`, with its origin behind them or not."""
    seq, id_, _, size, seconds, fraction, pushes, *origin = row
    return MessageRow(queue, seq, id_, size, seconds + fraction, pushes, *origin)


_INSERT_COUNTS = "INSERT OR ROLLBACK INTO queue (account_id, recipient_id, messages, bytes)"
_ADD_COUNTS = "ON CONFLICT DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes"
# A subquery, because SQLite would look for the pairs of a `VALUES` in all of the table.
_DELETE_EMPTY_QUEUES = """
    WITH one (account, recipient) AS (VALUES {})
    DELETE FROM queue WHERE (account_id, recipient_id) IN (SELECT account, recipient FROM one) AND messages = 0
"""
_DELETE_LEFTOVER_RECIPIENTS = """
    DELETE FROM recipient
    WHERE id IN ({}) AND registered IS NULL AND NOT EXISTS (
        SELECT 1 FROM queue q WHERE q.account_id = recipient.account_id AND q.recipient_id = recipient.id
    )
"""


class QueueCounters:
    """What came and went during a run of operations. A queue knows at once; the table is told by :meth:`write`."""

    def __init__(self) -> None:
        self._changes: dict[int, list[int]] = {}
        self._queues: dict[int, CachedQueue] = {}
        self._begun: list[CachedQueue] = []

    def add(self, queue: CachedQueue, messages: int, size: int, origin: int | None = None) -> None:
        """
        So many messages of so many bytes came, or went if that is less than nothing.

        :param origin: of all of them, if it is known; if not, who has how much of the queue is known no longer.
        """
        if queue.standing is not None:
            queue.count_sender(messages, size, origin)
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
        add_queue_counts(connection, rows)
        if self._begun:
            self._mark_used(connection)
        _drop_empty_queues(connection, [queue for queue in touched if queue.messages <= 0])

    def _mark_used(self, connection: Connection) -> None:
        """Their accounts have had a message."""
        begun, self._begun = self._begun, []
        numbers = list({queue.account_id for queue in begun})
        execute_in(connection, "UPDATE account SET fresh = 0 WHERE id IN ({}) AND fresh = 1", numbers)
        for queue in begun:
            queue.fresh = False


def add_queue_counts(connection: Connection, changes: Sequence[tuple[int, int, int, int]]) -> None:
    """Tell the table of numbers of accounts and recipients, and of how many messages and bytes came or went."""
    insert_rows(connection, _INSERT_COUNTS, changes, _ADD_COUNTS)


def _drop_empty_queues(connection: Connection, queues: Sequence[CachedQueue]) -> None:
    for some in split_chunks(queues, VALUES_PER_STATEMENT // 2):
        values = [number for queue in some for number in (queue.account_id, queue.recipient_id)]
        connection.execute(_DELETE_EMPTY_QUEUES.format(format_values(len(some), 2)), values)
    left = [queue.recipient_id for queue in queues if not queue.registered]
    if left:
        execute_in(connection, _DELETE_LEFTOVER_RECIPIENTS, left)


_UPDATE_SENDERS = """
    UPDATE recipient SET senders = new.column2 FROM (SELECT column1, column2 FROM (VALUES {})) new
    WHERE recipient.id = new.column1
"""


def load_known_senders(connection: Connection, queues: Iterable[CachedQueue]) -> None:
    """Have these queues remember whom their recipients have acknowledged, in one statement."""
    known = get_queue_cache(connection)
    missing = {}
    for queue in queues:
        known.retain_known_senders(queue)
        if queue.senders is None:
            missing[queue.recipient_id] = queue
    for number, text in select_rows_in(connection, "id, senders", "FROM recipient WHERE id IN ({})", list(missing)):
        missing[number].senders = KnownSenders(text)


def save_known_senders(connection: Connection, queues: Iterable[CachedQueue]) -> None:
    """Those of these queues have changed."""
    rows = [(queue.recipient_id, queue.senders.text()) for queue in queues if queue.senders is not None]
    for some in split_chunks(rows, ROWS_PER_STATEMENT):
        statement = _UPDATE_SENDERS.format(format_values(len(some), 2))
        connection.execute(statement, [value for row in some for value in row])


LedgerHalf = Literal["didcomm", "decentrl"]

# Rows that are counted one by one: a million take a tenth of a second.
MAX_COUNTED_ROWS = 5_000_000

_INSERT_LEDGER = f"INSERT OR ROLLBACK INTO ledger (half, {', '.join(LEDGER_ENTRIES)})"
_ADD_TO_LEDGER = (
    f"ON CONFLICT DO UPDATE SET {', '.join(f'{entry} = {entry} + excluded.{entry}' for entry in LEDGER_ENTRIES)}"
)
_SELECT_LEDGER = f"SELECT {', '.join(LEDGER_ENTRIES)} FROM ledger WHERE half = ?"
# By name, because they are the narrowest; and no further than is counted.
_COUNT_ROWS = "SELECT count(*) FROM (SELECT 1 FROM {} LIMIT ?)"
_COUNTED_TABLES: Mapping[LedgerHalf, str] = {
    "didcomm": "message INDEXED BY message_of_recipient",
    "decentrl": "pending_event INDEXED BY pending_event_of_recipient",
}


def add_ledger_entry(connection: Connection, half: LedgerHalf, entry: LedgerEntry, number: int) -> None:
    """So many more of a half; where they are inserted or deleted, and not before."""
    if not number:
        return
    collected = connection.entries if isinstance(connection, StoreConnection) else None
    if collected is None:
        _write_ledger(connection, {(half, entry): number})
    else:
        collected[half, entry] += number


def flush_ledger(connection: Connection) -> None:
    """Write what this transaction has collected."""
    if isinstance(connection, StoreConnection) and connection.entries:
        collected = dict(connection.entries)
        connection.entries.clear()
        _write_ledger(connection, collected)


def read_ledger(connection: Connection, most: int = MAX_COUNTED_ROWS) -> StoreLedger:
    """
    What became of all, and what waits.

    :param most: rows that are counted.
    """
    return StoreLedger(*[_read_half(connection, half, most) for half in _COUNTED_TABLES])


def _read_half(connection: Connection, half: LedgerHalf, most: int) -> MessageLedger:
    (numbers,) = connection.execute(_SELECT_LEDGER, (half,)).fetchall()
    ((waiting,),) = connection.execute(_COUNT_ROWS.format(_COUNTED_TABLES[half]), (most + 1,)).fetchall()
    became = dict(zip(LEDGER_ENTRIES, numbers, strict=True))
    return MessageLedger(**became, waiting=waiting if waiting <= most else None)


def _write_ledger(connection: Connection, numbers: Mapping[tuple[str, str], int]) -> None:
    halves = dict.fromkeys([half for half, _ in numbers])
    rows = [(half, *[numbers.get((half, entry), 0) for entry in LEDGER_ENTRIES]) for half in halves]
    insert_rows(connection, _INSERT_LEDGER, rows, _ADD_TO_LEDGER)
