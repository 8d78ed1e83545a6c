"""
Accounting of queues: a cache of their counters, changes of those in SQL, the known senders of recipients, and the
ledger. Everything here runs inside a transaction of the caller.

Code that inserts or deletes messages counts them here, once for each queue however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from sqlite3 import Connection, OperationalError
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
from mediatord.store.sqlite.locks import WriteTicketLock, begin_immediate, is_lock_error

# Queues in each of two generations. With DIDs of two thousand characters, their own and that of the account, that is
# 32 MiB of text at most.
QUEUE_CACHE_GENERATION = 4_096
# Queues whose usage by sender is cached: a queue of a thousand messages may have twice as many senders and networks.
CACHED_EVICTION_STATES = 32
# Queues whose known senders are cached: ten thousand bytes each at most.
CACHED_SENDER_SETS = 64

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


@dataclass(slots=True)
class EvictionState:
    """
    Usage of a queue by sender, valid as long as the queue is only changed by counted enqueues.

    :ivar scanned_until: by group of messages, the place in the order of arrival up to which there are none.
    """

    usage: SenderUsage
    scanned_until: dict[SenderGroup, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CachedQueue:
    """
    The queue of one recipient DID of an account, with its counters.

    :ivar messages: number of messages, of `size` bytes; updated by :meth:`QueueCounters.add`.
    :ivar registered: whether the account still has the DID.
    :ivar fresh: whether the account has not been used since its first day
        (:meth:`~mediatord.store.interfaces.store.IAccountStore.record_contact`).
    :ivar eviction_state: usage by sender, while it is cached.
    :ivar senders: known senders of the recipient, while they are cached.
    """

    did: str
    recipient_id: int
    account_id: int
    account: str
    messages: int
    size: int
    registered: int = True
    fresh: int = False
    eviction_state: EvictionState | None = None
    senders: KnownSenders | None = None


class QueueCache:
    """
    A bounded cache of queues, in two generations.

    It is as valid as the transaction in which it was read: changes of a queue are made here as well, and a roll-back
    or a commit of another connection clears it (:class:`StoreConnection`).
    """

    def __init__(self, generation: int = QUEUE_CACHE_GENERATION) -> None:
        self._generation = generation
        self._young: dict[str, CachedQueue] = {}
        self._old: dict[str, CachedQueue] = {}
        self._by_id: dict[int, CachedQueue] = {}
        self._with_eviction_state: OrderedDict[int, CachedQueue] = OrderedDict()
        self._with_senders: OrderedDict[int, CachedQueue] = OrderedDict()

    def clear(self) -> None:
        """Remove all queues."""
        self._young, self._old, self._by_id = {}, {}, {}
        self._with_eviction_state.clear()
        self._with_senders.clear()

    def keep_eviction_state(self, queue: CachedQueue, state: EvictionState) -> None:
        """Attach the usage by sender to a queue, and drop that of the least recently used one."""
        queue.eviction_state = state
        self._with_eviction_state[queue.recipient_id] = queue
        self._with_eviction_state.move_to_end(queue.recipient_id)
        if len(self._with_eviction_state) > CACHED_EVICTION_STATES:
            _, oldest = self._with_eviction_state.popitem(last=False)
            oldest.eviction_state = None

    def retain_known_senders(self, queue: CachedQueue) -> None:
        """Keep the known senders of a queue until :meth:`trim_known_senders` at least."""
        self._with_senders[queue.recipient_id] = queue
        self._with_senders.move_to_end(queue.recipient_id)

    def trim_known_senders(self) -> None:
        """Drop all but the most recently used sets of known senders; their changes have been written."""
        while len(self._with_senders) > CACHED_SENDER_SETS:
            _, oldest = self._with_senders.popitem(last=False)
            oldest.senders = None

    def find(self, connection: Connection, dids: Iterable[str]) -> dict[str, CachedQueue]:
        """
        Queues of the DIDs that are registered; those that are not cached are read in one statement.

        :param dids: in their canonical form; another form of a DID is found too, but is read every time.
        """
        found = {}
        missing = []
        for did in dids:
            queue = self._young.get(did) or self._rejuvenate(did)
            if queue is None:
                missing.append(did)
            else:
                found[did] = queue
        if missing:
            digests = {did: compute_did_digest(did) for did in missing}
            rows = select_rows_in(connection, _QUEUE_COLUMNS, _QUEUES_BY_DID, list(digests.values()))
            queues = {
                compute_did_digest(row[0]): self._by_id.get(row[1]) or self._keep(CachedQueue(*row)) for row in rows
            }
            found |= {did: queues[digest] for did, digest in digests.items() if digest in queues}
        return found

    def find_by_ids(self, connection: Connection, recipient_ids: Iterable[int]) -> dict[int, CachedQueue]:
        """Queues by the numbers of recipients, registered or left over."""
        found: dict[int, CachedQueue] = {}
        missing: dict[int, None] = {}
        for recipient_id in recipient_ids:
            queue = self._by_id.get(recipient_id)
            if queue is None:
                missing[recipient_id] = None
            elif recipient_id not in found:
                found[recipient_id] = queue
                if queue.did not in self._young:
                    self._rejuvenate(queue.did)
        if missing:
            for row in select_rows_in(connection, _QUEUE_COLUMNS, _QUEUES_BY_ID, list(missing)):
                queue = CachedQueue(*row)
                found[queue.recipient_id] = self._keep(queue) if queue.registered else queue
        return found

    def _rejuvenate(self, did: str) -> CachedQueue | None:
        queue = self._old.pop(did, None)
        if queue is not None:
            self._young[did] = queue
        return queue

    def _keep(self, queue: CachedQueue) -> CachedQueue:
        if len(self._young) >= self._generation:
            for old in self._old.values():
                self._by_id.pop(old.recipient_id, None)
            self._young, self._old = {}, self._young
        self._young[queue.did] = self._by_id[queue.recipient_id] = queue
        return queue


LedgerHalf = Literal["didcomm", "decentrl"]


class StoreConnection(Connection):
    """
    A connection with the accounting of its transactions: a cache of queues that lasts from one transaction to the
    next, and ledger entries, which are written once before each commit.

    Between :meth:`begin_batch` and :meth:`commit_batch` or :meth:`abort_batch` cache and entries are in use; in other
    transactions there is no cache, and ledger entries are written at once.

    :ivar ticket_lock: puts the transactions of several processes in order; None where there is one process.
    """

    ticket_lock: WriteTicketLock | None = None
    _cache: QueueCache | None = None
    _ledger: dict[LedgerHalf, dict[LedgerEntry, int]] | None = None
    _data_version = 0
    _is_cache_valid = False

    def begin_batch(self, patience: float) -> None:
        """
        Begin a transaction that may write.

        :param patience: seconds to wait while another process writes.
        :raise sqlite3.Error: it could not be begun.
        """
        try:
            self.execute("BEGIN IMMEDIATE")
        except OperationalError as error:
            if patience <= 0 or not is_lock_error(error):
                raise
            begin_immediate(self, patience)
        self._is_cache_valid, self._ledger = False, {}

    def commit_batch(self) -> None:
        """Write the ledger entries and commit."""
        entries, self._ledger = self._ledger, None
        if entries:
            self._write_ledger(entries)
        self.execute("COMMIT")
        if self._cache is not None:
            self._cache.trim_known_senders()

    def abort_batch(self) -> None:
        """Forget what a transaction has done that was rolled back."""
        self._ledger = self._cache = None

    def get_queue_cache(self) -> QueueCache:
        """The cache of queues; `PRAGMA data_version` differs once another connection has committed."""
        if self._ledger is None:
            return QueueCache()
        if self._cache is None or not self._is_cache_valid:
            ((version,),) = self.execute("PRAGMA data_version").fetchall()
            if version != self._data_version or self._cache is None:
                self._data_version, self._cache = version, QueueCache()
            self._is_cache_valid = True
        return self._cache

    def clear_queue_cache(self) -> None:
        """Forget all queues, because this transaction may change who has registered which DID."""
        if self._cache is not None:
            self._cache.clear()

    def add_ledger_entry(self, half: LedgerHalf, entry: LedgerEntry, number: int) -> None:
        """Count messages or pending events; called by the code that inserts or deletes them."""
        if number and self._ledger is None:
            self._write_ledger({half: {entry: number}})
        elif number and self._ledger is not None:
            entries = self._ledger.setdefault(half, {})
            entries[entry] = entries.get(entry, 0) + number

    def _write_ledger(self, changes: Mapping[LedgerHalf, Mapping[LedgerEntry, int]]) -> None:
        entries = tuple(dict.fromkeys(chain(*changes.values())))
        values: list[int | str] = []
        for half, numbers in changes.items():
            values.append(half)
            for entry in entries:
                values.append(numbers.get(entry, 0))
        self.execute(_format_ledger_update(len(changes), entries), values)


@lru_cache(maxsize=256)
def _format_ledger_update(halves: int, entries: Sequence[LedgerEntry]) -> str:
    rows = format_values(halves, len(entries) + 1)
    changes = ", ".join(f"{entry} = {entry} + excluded.{entry}" for entry in entries)
    into = f"INSERT OR ROLLBACK INTO ledger (half, {', '.join(entries)})"
    return f"{into} VALUES {rows} ON CONFLICT DO UPDATE SET {changes}"


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


@dataclass(slots=True, eq=False)
class MessageRow:
    """A message that is to be removed: its row without the payload, and its queue."""

    queue: CachedQueue
    seq: int
    id: str
    size: int
    received_at: float
    pushes: int
    origin: int = 0

    def make_removed(self, reason: RemovalReason | None = None) -> RemovedMessage:
        queue = self.queue
        return RemovedMessage(self.id, queue.did, queue.account, self.size, self.received_at, self.pushes, reason)


def parse_message_rows(cache: QueueCache, connection: Connection, rows: Sequence[list[Any]]) -> list[MessageRow]:
    """Messages from rows of the :data:`MESSAGE_ROW_COLUMNS`, with the origin behind them or not."""
    recipient_ids = []
    for row in rows:
        recipient_ids.append(row[2])
    queues = cache.find_by_ids(connection, recipient_ids)
    found = []
    for seq, id_, recipient_id, size, seconds, fraction, pushes, *origin in rows:
        found.append(MessageRow(queues[recipient_id], seq, id_, size, seconds + fraction, pushes, *origin))
    return found


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


@dataclass(slots=True)
class _QueueChange:
    queue: CachedQueue
    messages: int
    size: int


class QueueCounters:
    """Changes of queue counters by a run of operations; the cached queues change at once, the table with `write`."""

    def __init__(self) -> None:
        self._changes: dict[int, _QueueChange] = {}
        self._first_used: list[CachedQueue] = []

    def add(self, queue: CachedQueue, messages: int, size: int, origin: int | None = None) -> None:
        """
        Count messages that were inserted or, if negative, deleted.

        :param origin: of all of them; None where it is unknown, after which the usage by sender is read anew.
        """
        if queue.eviction_state is not None:
            if origin is None:
                queue.eviction_state = None
            else:
                queue.eviction_state.usage.change(origin, messages, size)
        queue.messages += messages
        queue.size += size
        change = self._changes.get(queue.recipient_id)
        if change is None:
            self._changes[queue.recipient_id] = _QueueChange(queue, messages, size)
            if queue.fresh:
                self._first_used.append(queue)
        else:
            change.messages += messages
            change.size += size

    def write(self, connection: Connection) -> None:
        """Update the table; empty queues are deleted, and so are recipients of which nothing else is left."""
        changes, self._changes = self._changes, {}
        rows: list[tuple[int, int, int, int]] = []
        empty: list[CachedQueue] = []
        for number, change in changes.items():
            queue = change.queue
            if change.messages or change.size:
                rows.append((queue.account_id, number, change.messages, change.size))
            if queue.messages <= 0:
                empty.append(queue)
        if rows:
            add_queue_counts(connection, rows)
        if self._first_used:
            self._mark_accounts_used(connection)
        if empty:
            _delete_empty_queues(connection, empty)

    def _mark_accounts_used(self, connection: Connection) -> None:
        queues, self._first_used = self._first_used, []
        account_ids = list({queue.account_id for queue in queues})
        execute_in(connection, "UPDATE account SET fresh = 0 WHERE id IN ({}) AND fresh = 1", account_ids)
        for queue in queues:
            queue.fresh = False


def add_queue_counts(connection: Connection, changes: Sequence[tuple[int, int, int, int]]) -> None:
    """Change counters in the table: numbers of account and recipient, and differences of messages and bytes."""
    insert_rows(connection, _INSERT_COUNTS, changes, _ADD_COUNTS)


def _delete_empty_queues(connection: Connection, queues: Sequence[CachedQueue]) -> None:
    for some in split_chunks(queues, VALUES_PER_STATEMENT // 2):
        values = []
        for queue in some:
            values += [queue.account_id, queue.recipient_id]
        connection.execute(_DELETE_EMPTY_QUEUES.format(format_values(len(some), 2)), values)
    left_over = [queue.recipient_id for queue in queues if not queue.registered]
    if left_over:
        execute_in(connection, _DELETE_LEFTOVER_RECIPIENTS, left_over)


_UPDATE_SENDERS = """
    UPDATE recipient SET senders = new.column2 FROM (SELECT column1, column2 FROM (VALUES {})) new
    WHERE recipient.id = new.column1
"""


def load_known_senders(cache: QueueCache, connection: Connection, queues: Iterable[CachedQueue]) -> None:
    """Read the known senders of the recipients of these queues, in one statement."""
    missing = {}
    for queue in queues:
        cache.retain_known_senders(queue)
        if queue.senders is None:
            missing[queue.recipient_id] = queue
    for number, text in select_rows_in(connection, "id, senders", "FROM recipient WHERE id IN ({})", list(missing)):
        missing[number].senders = KnownSenders(text)


def save_known_senders(connection: Connection, queues: Iterable[CachedQueue]) -> None:
    """Write the known senders of these queues."""
    rows = [(queue.recipient_id, queue.senders.text()) for queue in queues if queue.senders is not None]
    for some in split_chunks(rows, ROWS_PER_STATEMENT):
        statement = _UPDATE_SENDERS.format(format_values(len(some), 2))
        connection.execute(statement, [value for row in some for value in row])


# Rows that are counted one by one: a million take a tenth of a second.
MAX_COUNTED_ROWS = 5_000_000

_SELECT_LEDGER = f"SELECT {', '.join(LEDGER_ENTRIES)} FROM ledger WHERE half = ?"
# By the narrowest indexes, and no further than is counted.
_COUNT_ROWS = "SELECT count(*) FROM (SELECT 1 FROM {} LIMIT ?)"
_COUNTED_TABLES: Mapping[LedgerHalf, str] = {
    "didcomm": "message INDEXED BY message_of_recipient",
    "decentrl": "pending_event INDEXED BY pending_event_of_recipient",
}


def read_ledger(connection: Connection, most: int = MAX_COUNTED_ROWS) -> StoreLedger:
    """
    Read the ledger, and count the messages and pending events that are queued.

    :param most: rows that are counted.
    """
    halves = []
    for half, table in _COUNTED_TABLES.items():
        (entries,) = connection.execute(_SELECT_LEDGER, (half,)).fetchall()
        ((queued,),) = connection.execute(_COUNT_ROWS.format(table), (most + 1,)).fetchall()
        became = dict(zip(LEDGER_ENTRIES, entries, strict=True))
        halves.append(MessageLedger(**became, waiting=queued if queued <= most else None))
    return StoreLedger(*halves)
