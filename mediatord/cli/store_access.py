"""
What is told of queues and of what waits in them; never a payload.

How far a removal is, in a file beside its plan: after a kill, only what was being done then is looked for.

Accounts as the store's own place has them: read and removed beside a daemon that may be running.

Which DIDs the daemon has for its self-test (`GET /ready`).

Queues in the file of the backend `sqlite`.

Accounts in the file of the backend `sqlite`.

What an operator removes, in the event log: the books have to balance, so what cannot be logged is not removed.

The daemon's own file is not touched. The lines are those of a short process with a name of its own, `NODE-operator`,
in a segment that is written before anything is removed, in a directory that nobody reads, and moved beside the closed
ones once it is known what was still there. A process that is killed between leaves that directory; the next removal
enters what of its plan was done, and looks what is gone of the few that were being removed then.

What waits for whom, as the store's own place says it: read and taken out beside a daemon that may be running.

A store is not opened as the daemon opens it, which would take what a running one has pushed for pending again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from sqlite3 import Connection
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from twisted.internet.task import Clock

from mediatord import __version__
from mediatord.app.core_services import get_log_key_path
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.observability.event_log import EventLogWriter, LogOrigin, SegmentLimits
from mediatord.observability.event_recorder import MessageEventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, read_pseudonym_keys
from mediatord.observability.segments import RetentionLimits, seal_segment
from mediatord.private_file import PrivateFileError
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.protocol.probe_requests import resembles_probe_did
from mediatord.store.interfaces.messages import RemovedMessage
from mediatord.store.sqlite import account_queries, decentrl_queries, message_writes
from mediatord.store.sqlite.bulk_sql import hash_did, split_chunks
from mediatord.store.sqlite.database_file import APPLICATION_ID, connect, read_schema_steps
from mediatord.store.sqlite.locks import LOCK_TIMEOUT_SECONDS, begin_immediate, retry_while_locked

if TYPE_CHECKING:
    from mediatord.probe.cycle import ProbeIdentities


if TYPE_CHECKING:
    pass

QueueProtocol = Literal["didcomm", "decentrl"]
QUEUE_PROTOCOLS: tuple[QueueProtocol, ...] = ("didcomm", "decentrl")


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """
    What waits for a recipient.

    :param account: that the recipient belongs to; itself in the Decentrl half.
    :param oldest_at: when the first of it arrived, seconds; None if it has gone meanwhile.
    """

    half: QueueProtocol
    did: str
    account: str
    messages: int
    bytes: int
    oldest_at: float | None


@dataclass(frozen=True, slots=True)
class QueueListTotals:
    """All queues: how many they are, and what is in them."""

    queues: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """
    One message or pending event.

    :param expires_at: None when it waits until it is acknowledged.
    :param due_at: before this time nobody sees it; None when it was not delayed, or is due.
    :param pushes: how often it was handed over; 0 of an event, of which nobody counts that.
    """

    half: QueueProtocol
    id: str
    did: str
    account: str
    size: int
    received_at: float
    expires_at: float | None = None
    status: str = "pending"
    pushes: int = 0
    due_at: float | None = None

    def removed(self) -> RemovedMessage:
        """As what has left its queue."""
        return RemovedMessage(self.id, self.did, self.account, self.size, self.received_at, self.pushes)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """
    Which of the messages for a recipient.

    :param half: only of this one.
    :param before: only what arrived before this time, seconds.
    :param ids: only these; empty for any.
    """

    did: str
    half: QueueProtocol | None = None
    before: float | None = None
    ids: tuple[str, ...] = ()

    @property
    def halves(self) -> tuple[QueueProtocol, ...]:
        return QUEUE_PROTOCOLS if self.half is None else (self.half,)

    def has(self, entry: QueuedMessage) -> bool:
        """Whether a message for the recipient is meant."""
        return (self.before is None or entry.received_at < self.before) and (not self.ids or entry.id in self.ids)


class QueueAccess(Protocol):
    """A place where messages wait. All of it fails with StartupError when the place cannot be used."""

    def queues(self, halves: Sequence[QueueProtocol], top: int) -> tuple[list[QueueInfo], QueueListTotals]:
        """The `top` longest queues, longest first, and all of them added up."""

    def recipients(self) -> list[str]:
        """The DIDs that something waits for, some of them twice."""

    def registered(self) -> list[str]:
        """All DIDs that something can wait for, some of them twice."""

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""

    def entries(self, scope: MessageFilter) -> list[QueuedMessage]:
        """What waits for a recipient, each half in order of arrival."""

    def missing(self, entries: Sequence[QueuedMessage]) -> list[QueuedMessage]:
        """Those that are not there any more."""

    def remove(self, entries: Sequence[QueuedMessage], progress: PurgeProgress) -> None:
        """
        Take these out, some at a time, as the daemon would: durably, and counted off.

        :param course: told each time which of them are next, and then which of those were still there.
        """


_STARTED, _DONE = "next", "removed"
_EntryKey = tuple[str, str]


class PurgeProgress:
    """
    :param path: of the file.
    :ivar removed: what is gone for certain.
    :ivar doubtful: what is being removed just now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.removed: list[QueuedMessage] = []
        self.uncertain: Sequence[QueuedMessage] = ()

    def begin(self, entries: Sequence[QueuedMessage]) -> None:
        """These are next. :raise StartupError: that cannot be written, so they are to stay."""
        self._add(_STARTED, entries)
        self.uncertain = entries

    def end(self, removed: Sequence[QueuedMessage]) -> None:
        """Of those, these were still there, and have been removed. :raise StartupError: that cannot be written."""
        self.removed += removed
        self.uncertain = ()
        self._add(_DONE, removed)

    def _add(self, what: str, entries: Sequence[QueuedMessage]) -> None:
        line = json.dumps([what, [_make_entry_key(one) for one in entries]]) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise StartupError(f"the event log cannot be written, so no more is removed: {error.strerror}") from None


def find_purged(
    path: Path, plan: Sequence[QueuedMessage], missing: Callable[[Sequence[QueuedMessage]], Sequence[QueuedMessage]]
) -> list[QueuedMessage]:
    """
    What was removed of a plan.

    :param path: of the file; there is none if nothing was begun.
    :param missing: asked what is not there any more of what was being removed when the process was killed.
    """
    removed: set[_EntryKey] = set()
    uncertain: set[_EntryKey] = set()
    for what, keys in _read_progress(path):
        if what == _STARTED:
            uncertain = keys
        else:
            removed |= keys
            uncertain = set()
    gone = missing([one for one in plan if _make_entry_key(one) in uncertain]) if uncertain else []
    return [*(one for one in plan if _make_entry_key(one) in removed), *gone]


def _read_progress(path: Path) -> list[tuple[str, set[_EntryKey]]]:
    """But for a last one that is torn: what it was to announce was not done."""
    if not path.exists():
        return []
    whole = path.read_text("utf-8").split("\n")[:-1]
    return [(what, {(half, id_) for half, id_ in keys}) for what, keys in map(json.loads, whole)]


def _make_entry_key(entry: QueuedMessage) -> _EntryKey:
    return entry.half, entry.id


@dataclass(frozen=True, slots=True)
class AccountSummary:
    """
    :param seen_at: last authenticated contact, to a day.
    :param used: whether a message was ever accepted for it, or there was contact after its first day.
    :param recipients: names of recipient DIDs that it has registered.
    :param messages: that wait for it, with their bytes.
    """

    did: str
    created_at: float
    seen_at: float
    used: bool
    recipients: int
    messages: int
    bytes: int


class AccountAccess(QueueAccess, Protocol):
    """Accounts of a store, and what waits for them."""

    def accounts(self, top: int) -> tuple[list[AccountSummary], int]:
        """The newest, and how many there are in all."""

    def account_dids(self) -> list[str]:
        """Those of all accounts."""

    def account(self, did: str) -> AccountSummary | None:
        """The one with this DID."""

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""

    def remove_account(self, did: str) -> bool:
        """Remove an account for which nothing waits; whether that was done."""


def open_account_access(config: Config) -> AccountAccess:
    """
    The accounts in the store of this configuration.

    :raise StartupError: nobody can look into it from outside.
    """
    storage = config.storage
    if storage.backend == "memory":
        raise StartupError("storage.backend: nobody but the daemon itself knows what is in its memory")
    if storage.backend == "sqlite":
        return SQLiteAccountAccess(storage.sqlite.path)
    try:
        from mediatord.cli.mongodb_access import MongoAccountAccess
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise StartupError('storage.backend mongodb needs pip install "mediatord[mongodb]"') from None
    return MongoAccountAccess(storage.mongodb.uri)


class ProbeAccounts:
    """Tells them from DIDs that somebody else has made to look like them. Reads the keys only if there are any."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def has(self, did: str) -> bool:
        """
        Whether it is one of them.

        :raise PrivateFileError: it may be, but the keys cannot be read without asking anybody for a passphrase.
        """
        return resembles_probe_did(did) and self._kin.is_probe_did(did)

    def may_include(self, did: str) -> bool:
        """The same, and by its form alone where the keys cannot be read."""
        try:
            return self.has(did)
        except PrivateFileError:
            return True

    @cached_property
    def _kin(self) -> ProbeIdentities:
        # Imports what the daemon needs to talk to itself.
        from mediatord.identity.encrypted_file import make_passphrase_source
        from mediatord.identity.key_file import load_keys
        from mediatord.identity.mediator_identity import MediatorIdentity
        from mediatord.probe.cycle import ProbeIdentities

        given = self._config.identity
        keys = load_keys(given.keys, make_passphrase_source(given.passphrase_file))
        return ProbeIdentities(MediatorIdentity(keys, self._config.public_url, given.former_dids).root_secret)


# In one transaction: the daemon cannot write meanwhile.
_BATCH_MESSAGES = 50

_SELECT_MESSAGE_QUEUES = """
    SELECT r.did, a.did, q.messages, q.bytes,
        (SELECT m.received_at FROM message m WHERE m.recipient_id = q.recipient_id ORDER BY m.seq LIMIT 1)
    FROM queue q JOIN recipient r ON r.id = q.recipient_id JOIN account a ON a.id = q.account_id
    ORDER BY q.messages DESC, r.did LIMIT ?
"""
_SELECT_EVENT_QUEUES = """
    SELECT p.did, p.did, h.pending, h.pending_bytes,
        (SELECT e.received_at FROM pending_event e WHERE e.recipient_id = h.party_id ORDER BY e.seq LIMIT 1)
    FROM holding h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
    ORDER BY h.pending DESC, p.did LIMIT ?
"""
_SELECT_QUEUES = {"didcomm": _SELECT_MESSAGE_QUEUES, "decentrl": _SELECT_EVENT_QUEUES}
_SELECT_TOTALS = {
    "didcomm": "SELECT count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM queue",
    "decentrl": """
        SELECT count(*), coalesce(sum(pending), 0), coalesce(sum(pending_bytes), 0) FROM holding WHERE pending > 0
    """,
}
_SELECT_RECIPIENTS = """
    SELECT r.did FROM queue q JOIN recipient r ON r.id = q.recipient_id
    UNION ALL SELECT p.did FROM holding h JOIN party p ON p.id = h.party_id WHERE h.pending > 0
"""
_SELECT_REGISTERED = "SELECT did FROM recipient UNION SELECT did FROM account UNION SELECT did FROM party"
# Of those of recipients each half has an index of its own.
# Of recipients, those that are registered and those that are left over have an index of their digests each.
_SELECT_MATCHING_DID = """
    SELECT did FROM party WHERE did = :did
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
    UNION ALL SELECT did FROM recipient WHERE did_digest = :digest AND registered IS NULL
    UNION ALL SELECT did FROM account WHERE did_key = :account
    UNION ALL SELECT did FROM party WHERE did = :canonical
"""
_SELECT_MESSAGES = """
    SELECT m.id, a.did, m.size, m.received_at, m.expires_at, m.delivered, m.pushes, m.due_at
    FROM (
        SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NOT NULL
        UNION ALL SELECT id FROM recipient WHERE did_digest = :digest AND registered IS NULL
    ) r JOIN message m ON m.recipient_id = r.id JOIN account a ON a.id = m.account_id
    ORDER BY m.seq
"""
_SELECT_EVENTS = """
    SELECT e.id, e.size, e.received_at FROM party p JOIN pending_event e ON e.recipient_id = p.id
    WHERE p.did = ? ORDER BY e.seq
"""
_SELECT_EXISTING = {
    "didcomm": "SELECT 1 FROM message WHERE id = ?",
    "decentrl": "SELECT 1 FROM pending_event WHERE id = ?",
}


class SQLiteQueueAccess:
    """:param path: of the database."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def queues(self, halves: Sequence[QueueProtocol], top: int) -> tuple[list[QueueInfo], QueueListTotals]:
        """The longest queues, and all of them added up."""
        found: list[QueueInfo] = []
        sums = [0, 0, 0]
        with self._reading() as connection:
            for half in halves:
                found += [_read_queue(half, row) for row in connection.execute(_SELECT_QUEUES[half], (top,))]
                totals = connection.execute(_SELECT_TOTALS[half]).fetchone()
                sums = [one + more for one, more in zip(sums, totals, strict=True)]
        return sorted(found, key=lambda queue: -queue.messages)[:top], QueueListTotals(*sums)

    def recipients(self) -> list[str]:
        """The DIDs that something waits for."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute(_SELECT_RECIPIENTS)]

    def registered(self) -> list[str]:
        """Accounts, recipients and Decentrl identities."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute(_SELECT_REGISTERED)]

    def kept(self, did: str) -> str | None:
        """The one of those that this is a form of, or a DID URL of, as it is kept."""
        canonical = canonicalize_did(did)
        asked = {
            "did": did,
            "digest": compute_did_digest(did),
            "account": hash_did(canonical),
            "canonical": canonical,
        }
        with self._reading() as connection:
            found = connection.execute(_SELECT_MATCHING_DID, asked).fetchone()
        return None if found is None else str(found[0])

    def entries(self, scope: MessageFilter) -> list[QueuedMessage]:
        """What waits for a recipient."""
        found: list[QueuedMessage] = []
        with self._reading() as connection:
            if "didcomm" in scope.halves:
                found += [
                    _read_message(scope.did, row)
                    for row in connection.execute(_SELECT_MESSAGES, {"digest": compute_did_digest(scope.did)})
                ]
            if "decentrl" in scope.halves:
                found += [_read_event(scope.did, row) for row in connection.execute(_SELECT_EVENTS, (scope.did,))]
        return [entry for entry in found if scope.has(entry)]

    def missing(self, entries: Sequence[QueuedMessage]) -> list[QueuedMessage]:
        """Those that are not there any more."""
        with self._reading() as connection:
            return [
                one for one in entries if not connection.execute(_SELECT_EXISTING[one.half], (one.id,)).fetchone()
            ]

    def remove(self, entries: Sequence[QueuedMessage], progress: PurgeProgress) -> None:
        """By the daemon's own statements, a few at a time; in between it has as much time as each took."""
        with self._complaining(), closing(connect(self._path)) as connection:
            self._check(connection)
            connection.execute("PRAGMA busy_timeout = 0")  # it is waited for in another way
            for batch in split_chunks(list(entries), _BATCH_MESSAGES):
                progress.begin(batch)
                begin_immediate(connection, LOCK_TIMEOUT_SECONDS)
                begun = monotonic()
                gone = _delete_entries(connection, batch)
                retry_while_locked(lambda: connection.execute("COMMIT"), LOCK_TIMEOUT_SECONDS)
                took = monotonic() - begun
                progress.end([one for one in batch if (one.half, one.id) in gone])
                sleep(took)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._complaining():
            address = f"{self._path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
                connection.execute("BEGIN")  # so that all of it is of the same moment
                self._check(connection)
                yield connection

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        """:raise StartupError: for whatever SQLite says."""
        if not self._path.exists():
            raise StartupError(f"{self._path} is not there: no daemon has kept anything yet")
        try:
            yield
        except sqlite3.Error as error:
            raise StartupError(f"{self._path} cannot be used: {error}") from None

    def _check(self, connection: sqlite3.Connection) -> None:
        """:raise StartupError: it is not ours, or of another version."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise StartupError(f"{self._path} is not a database of mediatord")
        if version != len(read_schema_steps()):
            raise StartupError(
                f"{self._path} has version {version} of the schema, and this is for {len(read_schema_steps())}: "
                "the daemon brings it up to date when it starts"
            )


def _delete_entries(
    connection: sqlite3.Connection, entries: Sequence[QueuedMessage]
) -> set[tuple[QueueProtocol, str]]:
    """Which were still there."""
    messages = message_writes.purge_messages(connection, [one.id for one in entries if one.half == "didcomm"])
    gone: set[tuple[QueueProtocol, str]] = {("didcomm", one.id) for one in messages}
    for did in {one.did for one in entries if one.half == "decentrl"}:
        ids = [one.id for one in entries if one.half == "decentrl" and one.did == did]
        gone |= {("decentrl", one.id) for one in decentrl_queries.acknowledge_events(connection, did, ids, "removed")}
    return gone


def _read_queue(half: QueueProtocol, row: Sequence[Any]) -> QueueInfo:
    did, account, messages, size, oldest_at = row
    return QueueInfo(half, did, account, messages, size, None if oldest_at is None else float(oldest_at))


def _read_message(did: str, row: Sequence[Any]) -> QueuedMessage:
    id_, account, size, received_at, expires_at, delivered, pushes, due_at = row
    status = "delivered" if delivered else "pending"
    # One below zero is of a message that was handed out when it was due.
    due = due_at if due_at is not None and due_at > 0 else None
    return QueuedMessage("didcomm", id_, did, account, size, received_at, expires_at, status, pushes, due)


def _read_event(did: str, row: Sequence[Any]) -> QueuedMessage:
    id_, size, received_at = row
    return QueuedMessage("decentrl", id_, did, did, size, float(received_at))


ResultT = TypeVar("ResultT")

_SELECT_ACCOUNTS = """
    SELECT a.did, a.created_at, a.seen_at, a.fresh, a.recipients, coalesce(sum(q.messages), 0),
        coalesce(sum(q.bytes), 0)
    FROM ({}) a LEFT JOIN queue q ON q.account_id = a.id GROUP BY a.id ORDER BY a.created_at DESC, a.id DESC
"""
_SELECT_NEWEST_ACCOUNTS = _SELECT_ACCOUNTS.format("SELECT * FROM account ORDER BY created_at DESC, id DESC LIMIT ?")
_SELECT_ACCOUNT = _SELECT_ACCOUNTS.format("SELECT * FROM account WHERE did_key = ?")
_SELECT_QUEUED_DIDS = """
    SELECT DISTINCT r.did FROM account a JOIN queue q ON q.account_id = a.id JOIN recipient r ON r.id = q.recipient_id
    WHERE a.did_key = ?
"""
_NO_LIMIT = 1 << 31


class SQLiteAccountAccess(SQLiteQueueAccess):
    """:param path: of the database."""

    def accounts(self, top: int) -> tuple[list[AccountSummary], int]:
        """The newest, and how many there are in all."""
        with self._reading() as connection:
            (total,) = connection.execute("SELECT count(*) FROM account").fetchone()
            return [_read_account(row) for row in connection.execute(_SELECT_NEWEST_ACCOUNTS, (top,))], total

    def account_dids(self) -> list[str]:
        """Those of all accounts."""
        with self._reading() as connection:
            return [did for (did,) in connection.execute("SELECT did FROM account")]

    def account(self, did: str) -> AccountSummary | None:
        """The one with this DID."""
        with self._reading() as connection:
            row = connection.execute(_SELECT_ACCOUNT, (hash_did(did),)).fetchone()
            return None if row is None else _read_account(row)

    def names(self, did: str) -> list[str]:
        """What an account has registered, in order."""
        with self._reading() as connection:
            return account_queries.list_recipients(connection, did, 0, _NO_LIMIT)[0]

    def queued_dids(self, did: str) -> list[str]:
        """Recipient DIDs of an account for which something waits, whether they are registered or not."""
        with self._reading() as connection:
            return [one for (one,) in connection.execute(_SELECT_QUEUED_DIDS, (hash_did(did),))]

    def unregister(self, did: str) -> None:
        """Remove all that an account has registered, so that nothing more comes for it."""
        self._write(lambda connection: account_queries.unregister_recipients(connection, did))

    def remove_account(self, did: str) -> bool:
        """Remove an account for which nothing waits; whether that was done."""
        return self._write(lambda connection: account_queries.remove_account(connection, did))

    def _write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        with self._complaining(), closing(connect(self._path)) as connection:
            self._check(connection)
            connection.execute("PRAGMA busy_timeout = 0")  # it is waited for in another way
            begin_immediate(connection, LOCK_TIMEOUT_SECONDS)
            done = work(connection)
            retry_while_locked(lambda: connection.execute("COMMIT"), LOCK_TIMEOUT_SECONDS)
            return done


def _read_account(row: Sequence[Any]) -> AccountSummary:
    did, created_at, seen_at, fresh, recipients, messages, size = row
    return AccountSummary(did, created_at, seen_at, not fresh, recipients, messages, size)


_NODE_SUFFIX = "-operator"
_MAX_NODE_NAME = 63
_DRAFT_PREFIX = ".purge-"
_PLAN_FILE, _PROGRESS_FILE = "plan.jsonl", "course.jsonl"
_LOG_NOT_WRITABLE = "the event log cannot be written, so nothing is removed"
_LOG_INCOMPLETE = "{number} were removed, which the event log is yet to say, at the next queue purge: {reason}"
# One segment, and nobody else's are to be deleted for it.
_SINGLE_SEGMENT_LIMITS = SegmentLimits(size=1 << 62, retention=RetentionLimits(bytes=1 << 62, unread_bytes=1 << 62))


class PurgeLog:
    """
    The event log of this configuration, for removals.

    :raise PrivateFileError: the keys of its pseudonyms cannot be read.
    :raise StartupError: no daemon has written there.
    """

    def __init__(self, config: Config) -> None:
        self._directory = config.log.directory
        self._level = config.log.level
        self._node = config.node_name[: _MAX_NODE_NAME - len(_NODE_SUFFIX)].rstrip("-._") + _NODE_SUFFIX
        self._pseudonymizer = Pseudonymizer(config.log.dids, read_pseudonym_keys(get_log_key_path(config))[-1])
        if not self._directory.is_dir():
            raise StartupError(f"{self._directory} is not there: what is removed could not be logged")

    def remove(self, waiting: QueueAccess, entries: Sequence[QueuedMessage]) -> list[QueuedMessage]:
        """
        Remove these, and say so; those that were still there.

        :raise StartupError: the log cannot be written, and nothing was removed; or the store cannot be used.
        """
        self.settle(waiting)
        if not entries:
            return []
        draft = self._directory / f"{_DRAFT_PREFIX}{secrets.token_hex(6)}"
        progress = PurgeProgress(draft / _PROGRESS_FILE)
        plan, segment = self._plan(draft, entries)
        with plan:
            try:
                waiting.remove(entries, progress)
            except BaseException:
                # What was being done just now may be done, though nobody said so. Else the next removal finds it.
                with suppress(StartupError, OSError):
                    self._close(draft, [*progress.removed, *waiting.missing(progress.uncertain)])
                raise
            removed = progress.removed
            try:
                self._close(draft, removed, segment if len(removed) == len(entries) else None)
            except OSError as error:
                raise StartupError(
                    _LOG_INCOMPLETE.format(number=len(removed), reason=_describe_os_error(error))
                ) from None
        return removed

    def settle(self, waiting: QueueAccess) -> int:
        """Enter what a removal that was killed has left; how many messages and events that is."""
        entered = 0
        for draft in sorted(self._directory.glob(f"{_DRAFT_PREFIX}*")):
            entered += self._settle(waiting, draft)
        return entered

    def _settle(self, waiting: QueueAccess, draft: Path) -> int:
        names = (draft / _PLAN_FILE, draft / f"{_PLAN_FILE}.draft")
        name = next((one for one in names if one.exists()), names[0])
        # One that is locked is being carried out, and one that goes while it is looked at has been.
        with suppress(FileNotFoundError, BlockingIOError), name.open("rb") as plan:
            fcntl.flock(plan, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.stat()
            # What had no whole plan removed nothing; what had its lines moved has told everything.
            begun = name == names[0] and not any(self._directory.glob(f"events-*-{_derive_boot_id(draft)}-*"))
            gone = find_purged(draft / _PROGRESS_FILE, _read_plan(plan), waiting.missing) if begun else []
            self._close(draft, gone)
            return len(gone)
        return 0

    def _plan(self, draft: Path, entries: Sequence[QueuedMessage]) -> tuple[IO[str], Path]:
        """
        Have it written what is to be removed: as a plan, which is locked while it is open, and as a segment.

        :raise StartupError: that is not possible.
        """
        name = draft / f"{_PLAN_FILE}.draft"
        try:
            draft.mkdir(mode=0o700)
            plan = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{_LOG_NOT_WRITABLE}: {_describe_os_error(error)}") from None
        try:
            fcntl.flock(plan, fcntl.LOCK_EX)
            name.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries), "utf-8")
            os.fsync(plan)
            segment = self._write(draft / "planned", _derive_boot_id(draft), entries)
            # From now on it may be that something of it has been removed.
            name.rename(draft / _PLAN_FILE)
            _sync_directory(draft)
        except OSError as error:
            os.close(plan)
            shutil.rmtree(draft, ignore_errors=True)
            raise StartupError(f"{_LOG_NOT_WRITABLE}: {_describe_os_error(error)}") from None
        return os.fdopen(plan), segment

    def _close(self, draft: Path, removed: Sequence[QueuedMessage], segment: Path | None = None) -> None:
        """
        Put the lines of what was removed beside those of the daemon.

        :param segment: which has them already.
        """
        if removed:
            segment = segment or self._write(draft / f"done-{secrets.token_hex(2)}", _derive_boot_id(draft), removed)
            segment.rename(self._directory / segment.name)
            _sync_directory(self._directory)
        shutil.rmtree(draft)

    def _write(self, directory: Path, boot: str, entries: Sequence[QueuedMessage]) -> Path:
        """
        A segment with these, on disk.

        :raise OSError: it is not.
        """
        clock = Clock()
        clock.advance(datetime.now(UTC).timestamp())
        metrics = Metrics(CollectorRegistry(), version=__version__)
        origin = LogOrigin(self._node, __version__, self._pseudonymizer.epoch, boot)
        events = EventLogWriter(directory, clock, origin, limits=_SINGLE_SEGMENT_LIMITS, level=self._level)
        events.observer = metrics
        recorder = MessageEventRecorder(clock, events, metrics, self._pseudonymizer)
        events.startService()
        events.emit("proc.start", version=__version__, reason="purge")
        for entry in entries:
            recorder.record_purge(entry.removed(), entry.half)
        events.emit("proc.stop", version=__version__, reason="purge")
        events.stopService()
        if events.dropped:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        (segment,) = directory.glob("events-*.jsonl")
        self._give(segment)
        seal_segment(segment, compress=False)
        return segment

    def _give(self, path: Path) -> None:
        """To whom the daemon's own files belong."""
        if os.geteuid() == 0:
            folder = self._directory.stat()
            os.chown(path, folder.st_uid, folder.st_gid)


def _read_plan(plan: IO[bytes]) -> list[QueuedMessage]:
    return [QueuedMessage(**json.loads(line)) for line in plan]


def _describe_os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def _derive_boot_id(draft: Path) -> str:
    return draft.name.removeprefix(_DRAFT_PREFIX)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_queue_access(config: Config) -> QueueAccess:
    """
    What waits in the store of this configuration.

    :raise StartupError: nobody can look into it from outside.
    """
    storage = config.storage
    if storage.backend == "memory":
        raise StartupError("storage.backend: nobody but the daemon itself knows what is in its memory")
    if storage.backend == "sqlite":
        return SQLiteQueueAccess(storage.sqlite.path)
    try:
        from mediatord.cli.mongodb_access import MongoQueueAccess
    except ImportError as error:
        if error.name is None or error.name.startswith("mediatord"):
            raise
        raise StartupError('storage.backend mongodb needs pip install "mediatord[mongodb]"') from None
    return MongoQueueAccess(storage.mongodb.uri)
