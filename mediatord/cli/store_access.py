"""
Queues and accounts for the command line: asked from the daemon over its control socket, or read from a store that no
daemon uses, with the same operations.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from math import inf
from secrets import token_hex
from sqlite3 import DatabaseError
from time import monotonic
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from mediatord import __version__
from mediatord.app.reload import build_segment_limits
from mediatord.cluster.membership import STANDALONE_NODE_NAME
from mediatord.config.settings import Config
from mediatord.control.client import ControlClient, NoDaemon
from mediatord.control.queue_and_account_operations import ControlError, ControlOperations
from mediatord.errors import MediatorError, StartupError, StoreUnavailable
from mediatord.observability.event_log import EventLogWriter, LogOrigin
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, is_full_did, read_pseudonym_keys
from mediatord.protocol.canonical_did import canonicalize_did, is_decentrl_did
from mediatord.protocol.didcomm_v1.keys import InvalidKey, parse_key
from mediatord.protocol.probe_markers import resembles_probe_did
from mediatord.runtime.secret_files import SecretFileError
from mediatord.store.factory import build_store
from mediatord.store.interfaces.administration import (
    MAX_PURGE_BATCH,
    MAX_ROWS,
    QUEUE_PROTOCOLS,
    AccountSummary,
    QueuedMessage,
    QueueInfo,
    QueueListTotals,
    QueueProtocol,
)
from mediatord.store.interfaces.cluster_and_quotas import ClusterJoinError, ClusterNode
from mediatord.store.interfaces.messages import QueueLimits, is_valid_unicode
from mediatord.store.interfaces.store import IStore, StoreUnusable
from mediatord.store.sqlite.connection import LOCK_TIMEOUT_SECONDS, split_chunks
from mediatord.store.sqlite.database_file import DatabaseFileLock, DatabaseUnusable, StoreInUse, open_database
from mediatord.store.sqlite.memory_store import InlineExecutor
from mediatord.store.sqlite.sqlite_store import SQLiteStore

if TYPE_CHECKING:
    from mediatord.probe.identities_and_recognition import ProbeIdentities

_NODE_SUFFIX = "-operator"
_MAX_NODE_NAME = 63
# For which a MongoDB database stays locked if this process is killed.
_LEASE_SECONDS = 30.0


class StoreAccess:
    """
    The operations of the control socket with their pages put together, and DIDs by all that operators call them.

    :param call: runs an operation with arguments; raises StartupError with a line for the operator.
    """

    def __init__(self, call: Callable[..., Any], config: Config) -> None:
        self._call = call
        self._config = config

    def list_queues(self, protocol: QueueProtocol | None, top: int) -> tuple[list[QueueInfo], QueueListTotals]:
        """The longest queues, longest first, and the sums of all."""
        found = self._list_pages("list_queues", top, protocol=protocol)
        return [QueueInfo(**one) for one in found], QueueListTotals(**self._call("sum_queues", protocol=protocol))

    def list_dids(self) -> Iterator[str]:
        """DIDs of all accounts, recipients and Decentrl identities; some occur several times."""
        return self._follow_cursor("list_dids", "dids")

    def list_entries(self, did: str, protocol: QueueProtocol | None = None) -> list[QueuedMessage]:
        """The queue of a DID, by protocol in order of arrival. :param protocol: of this protocol only."""
        return [
            QueuedMessage(**one)
            for protocol in (QUEUE_PROTOCOLS if protocol is None else (protocol,))
            for one in self._follow_cursor("list_entries", "entries", did=did, protocol=protocol)
        ]

    def has_live_session(self, did: str) -> bool:
        """Whether messages for a DID are pushed to a WebSocket; never without a daemon."""
        is_live: bool = self._call("has_live_session", did=did)
        return is_live

    def purge(
        self, entries: Sequence[QueuedMessage], progress: Callable[[int], None] = lambda _: None
    ) -> list[QueuedMessage]:
        """
        Remove entries, a few at a time, and log them; returns those that were still there.

        :param progress: called with the number of entries that were removed, or were gone.
        :raise StartupError: not all were removed; the text says how many were.
        """
        removed: list[QueuedMessage] = []
        handled = 0
        queues: defaultdict[tuple[QueueProtocol, str], list[QueuedMessage]] = defaultdict(list)
        for entry in entries:
            queues[entry.protocol, entry.did].append(entry)
        for (protocol, did), queued in queues.items():
            for batch in split_chunks(queued, MAX_PURGE_BATCH):
                try:
                    gone = set(self._call("purge", did=did, protocol=protocol, ids=[one.id for one in batch]))
                except StartupError as error:
                    if removed:
                        raise StartupError(f"failed after removing {len(removed)} messages: {error}") from None
                    raise
                removed += [one for one in batch if one.id in gone]
                handled += len(batch)
                progress(handled)
        return removed

    def list_accounts(self, top: int) -> tuple[list[AccountSummary], int]:
        """The newest accounts, and the number of all."""
        found = [AccountSummary(**one) for one in self._list_pages("list_accounts", top)]
        return found, self._call("count_accounts")

    def list_recipients(self, account: str) -> list[str]:
        """Names that an account has registered, in order of registration."""
        return list(self._list_pages("list_recipients", inf, account=account))

    def count_devices(self, account: str) -> dict[str, int]:
        """Devices of an account that push services can wake, by service."""
        return dict(self._call("count_devices", account=account))

    def remove_account(self, account: str) -> list[QueuedMessage]:
        """
        Remove first what is registered, so that nothing more comes; then what is queued, which it returns; then the
        account.

        :raise StartupError: something is queued all the same, or removals cannot be logged.
        """
        if self._call("list_queued_dids", account=account):
            self._call("purge", did="", protocol="didcomm", ids=[])  # fails if they cannot
        self._call("unregister_recipients", account=account)
        dids = self._call("list_queued_dids", account=account)
        entries = [one for did in dids for one in self.list_entries(did, "didcomm") if one.account == account]
        removed = self.purge(entries)
        if not self._call("remove_account", account=account):
            raise StartupError("the account changed in the meantime; run the command again")
        return removed

    def find_did(self, given: str) -> str:
        """The stored DID that this is a form, short form or pseudonym of. :raise StartupError: there is none."""
        found: str | None = None
        if is_valid_unicode(given):
            found = self._call("find_did", did=_parse_base58_key(given)) or self._find_by_pseudonym(given)
        if found is None:
            raise StartupError(f"{given} is not a registered DID")
        return found

    def find_account(self, given: str) -> AccountSummary:
        """The account with a DID, given likewise. :raise StartupError: there is none."""
        found = self._call("find_account", did=canonicalize_did(_parse_base58_key(given)))
        if found is None and (did := self._find_by_pseudonym(given)) is not None:
            found = self._call("find_account", did=did)
        if found is None:
            raise StartupError(f"{given} has no account")
        return AccountSummary(**found)

    def find_device_owner(self, given: str) -> str:
        """The DID of an account or a Decentrl identity, given likewise. :raise StartupError: there is none."""
        did = self.find_did(given)
        return did if is_decentrl_did(did) else self.find_account(did).did

    def wake_account(self, owner: str) -> list[dict[str, Any]]:
        """
        Wake the devices of an owner now; as the fields of :class:`~mediatord.push.manual_wakeup.ManualWakeup`.

        :raise StartupError: no push service is configured.
        """
        found: list[dict[str, Any]] = self._call("wake_account", account=owner)
        return found

    def find_pseudonyms(self, pseudonym: str) -> Iterator[tuple[int, str]]:
        """DIDs that the event log has in this short form or under this pseudonym, after the epochs of the keys."""
        keys = read_pseudonym_keys(self._config.log_key_path)
        pseudonymizers = [Pseudonymizer(mode, key) for key in keys for mode in ("plain", "keyed")]
        return ((one.epoch, did) for did in self.list_dids() for one in pseudonymizers if one.did(did) == pseudonym)

    def list_pseudonyms(self, did: str) -> list[tuple[int, str]]:
        """The names of a DID in the event log, after the epochs of their keys; it need not be registered."""
        stored = self._call("find_did", did=did) if is_valid_unicode(did) else None
        keys, mode = read_pseudonym_keys(self._config.log_key_path), self._config.log.dids
        return [(key.epoch, Pseudonymizer(mode, key).did(stored or canonicalize_did(did))) for key in keys]

    def _find_by_pseudonym(self, given: str) -> str | None:
        if is_full_did(given):
            return None
        return next((did for _, did in self.find_pseudonyms(given)), None)

    def is_probe(self, did: str) -> bool:
        """
        Whether a DID is one of the daemon's probes, not one made to look like them. Reads the keys if needed.

        :raise SecretFileError: it may be, but the keys cannot be read without a passphrase.
        """
        return resembles_probe_did(did) and self._probe_identities.is_probe_did(did)

    def may_be_probe(self, did: str) -> bool:
        """The same, and by its form alone where the keys cannot be read."""
        try:
            return self.is_probe(did)
        except SecretFileError:
            return True

    @cached_property
    def _probe_identities(self) -> ProbeIdentities:
        # Imports what the daemon's probe needs.
        from mediatord.identity.encrypted_file import make_passphrase_source
        from mediatord.identity.key_file import load_keys
        from mediatord.identity.mediator_identity import MediatorIdentity
        from mediatord.probe.identities_and_recognition import ProbeIdentities

        given = self._config.identity
        keys = load_keys(given.keys, make_passphrase_source(given.passphrase_file))
        return ProbeIdentities(MediatorIdentity(keys, self._config.public_url, given.former_dids).root_secret)

    def _list_pages(self, operation: str, most: float, **arguments: Any) -> Iterator[Any]:
        offset = 0
        while offset < most:
            limit = int(min(MAX_ROWS, most - offset))
            page = self._call(operation, offset=offset, limit=limit, **arguments)
            yield from page
            if len(page) < limit:
                return
            offset += limit

    def _follow_cursor(self, operation: str, rows: str, **arguments: Any) -> Iterator[Any]:
        after: str | None = ""
        while after is not None:
            page = self._call(operation, after=after, limit=MAX_ROWS, **arguments)
            yield from page[rows]
            after = page["after"]


@contextmanager
def open_store_access(config: Config) -> Iterator[StoreAccess]:
    """
    Queues and accounts of the daemon that runs with this configuration, or of its store if none runs.

    :raise StartupError: neither can be used.
    """
    client = connect_daemon(config)
    if client is not None:
        with closing(client):
            yield StoreAccess(client.call, config)
        return
    if config.storage.backend == "memory":
        raise StartupError(
            f"storage.backend memory: only a running daemon can read this store; {_explain_no_socket(config)}"
        )
    with closing(PurgeEventLog(config)) as log:
        with _open_sqlite(config) if config.storage.backend == "sqlite" else _open_mongodb(config) as (store, wait):
            operations = ControlOperations(store, log.open_recorder)

            def call(operation: str, **arguments: Any) -> Any:
                try:
                    return wait(lambda: Deferred.fromCoroutine(operations.run(operation, arguments)))
                except ControlError as error:
                    raise StartupError(str(error)) from None
                except StoreUnavailable:
                    raise StartupError("the store does not respond") from None

            yield StoreAccess(call, config)
    log.check_complete()


@contextmanager
def open_daemon_access(config: Config) -> Iterator[StoreAccess]:
    """
    What only the daemon that runs with this configuration can do.

    :raise StartupError: none runs, or its socket cannot be used.
    """
    client = connect_daemon(config)
    if client is None:
        raise StartupError(f"this needs a running daemon; {_explain_no_socket(config)}")
    with closing(client):
        yield StoreAccess(client.call, config)


def connect_daemon(config: Config) -> ControlClient | None:
    """
    A connection to the daemon; None if none listens.

    :raise StartupError: the socket cannot be used.
    """
    if config.control_socket is None:
        return None
    try:
        return ControlClient(config.control_socket)
    except NoDaemon:
        return None


# Runs what returns a Deferred, and returns its result or raises its failure.
_Wait = Callable[[Callable[[], Deferred[Any]]], Any]


@contextmanager
def _open_sqlite(config: Config) -> Iterator[tuple[IStore, _Wait]]:
    """The store, which works without a reactor; the exclusive lock keeps daemons away meanwhile."""
    path = config.storage.sqlite.path
    if not path.exists():
        raise StartupError(f"{path} does not exist; the daemon creates it when it first starts")
    lock = DatabaseFileLock(path)
    try:
        lock.take()
    except StoreInUse:
        raise StartupError(f"a daemon uses {path}; {_explain_no_socket(config)}") from None
    except ValueError as error:
        raise StartupError(str(error)) from None
    clock = _HostClock()
    store = SQLiteStore(
        InlineExecutor(clock, lambda: open_database(path, clock.seconds(), create=False), LOCK_TIMEOUT_SECONDS),
        clock,
        QueueLimits(),
    )
    try:
        _get_result(store.open)
        yield store, _get_result
    except (DatabaseUnusable, DatabaseError) as error:
        raise StartupError(f"cannot use {path}: {error}") from None
    finally:
        _get_result(store.close)
        lock.release()


def _explain_no_socket(config: Config) -> str:
    """Why no daemon was asked, and what to do about it."""
    if config.control_socket is None:
        return "control_socket is null: set it to a path that the daemon can write, and restart the daemon"
    return (
        f"no daemon listens on {config.control_socket}: if one runs with this configuration, see its log, set "
        "control_socket to a path that it can write, and restart it"
    )


def _get_result(work: Callable[[], Deferred[Any]]) -> Any:
    results: list[Any] = []
    failures: list[Any] = []
    work().addCallbacks(results.append, failures.append)
    if failures:
        failures[0].raiseException()
    return results[0]


class _HostClock(Clock):
    """The time of the host; what is to be called later never is."""

    def seconds(self) -> float:
        """The time, in seconds since 1970."""
        return datetime.now(UTC).timestamp()


@contextmanager
def _open_mongodb(config: Config) -> Iterator[tuple[IStore, _Wait]]:
    """The store, in a reactor that runs in a thread meanwhile; its exclusive lease keeps daemons away."""
    from twisted.internet import reactor as global_reactor  # noqa: TID251  this is the program
    from twisted.internet.threads import blockingCallFromThread

    reactor: Any = global_reactor

    def run(work: Callable[[], Deferred[Any]]) -> Any:
        return blockingCallFromThread(reactor, work)

    try:
        store = build_store("mongodb", reactor, QueueLimits(), uri=config.storage.mongodb.uri)
    except ValueError as error:
        raise StartupError(str(error)) from None
    thread = threading.Thread(target=reactor.run, kwargs={"installSignalHandlers": False}, daemon=True)
    thread.start()
    node = ClusterNode(STANDALONE_NODE_NAME, token_hex(6), "mediatord command line", b"")
    renewed = -inf

    def wait(work: Callable[[], Deferred[Any]]) -> Any:
        nonlocal renewed
        if monotonic() - renewed > _LEASE_SECONDS / 3:
            run(lambda: store.cluster.join(node, _LEASE_SECONDS))
            renewed = monotonic()
        return run(work)

    try:
        try:
            run(store.open)
            wait(store.ping)
            yield store, wait
            run(lambda: store.cluster.drop(node.boot, until=inf))
        finally:
            run(store.close)
    except ClusterJoinError:
        raise StartupError(
            f"a daemon uses the database; run the command on its host. If it runs here: {_explain_no_socket(config)}"
        ) from None
    except StoreUnusable as error:
        raise StartupError(f"cannot use MongoDB: {error}") from None
    except MediatorError:
        raise StartupError("cannot use MongoDB: it does not respond") from None
    finally:
        reactor.callFromThread(reactor.stop)
        thread.join()


class PurgeEventLog:
    """
    Logs removals from a store that no daemon uses, in segments of a node of its own, `NODE-operator`.

    The log is opened by the first removal.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._log: tuple[EventLogWriter, EventRecorder] | None = None

    def open_recorder(self) -> EventRecorder | None:
        """
        The recorder of removals; None while the log takes no lines.

        :raise StartupError: no daemon has written there.
        :raise SecretFileError: the keys of its pseudonyms cannot be read.
        """
        events, recorder = self._log = self._log or self._open()
        events.flush()
        return recorder if events.running and not events.pending else None

    def close(self) -> None:
        """Close the segment."""
        if self._log is not None and self._log[0].running:
            self._log[0].emit("proc.stop", version=__version__, reason="purge")
            self._log[0].stopService()
            self._give_to_owner()

    def check_complete(self) -> None:
        """:raise StartupError: lines were lost."""
        if self._log is not None and (dropped := self._log[0].dropped):
            raise StartupError(f"lost {dropped} lines of the event log, because it could not be written")

    def _open(self) -> tuple[EventLogWriter, EventRecorder]:
        config, directory = self._config, self._config.log.directory
        pseudonymizer = Pseudonymizer(config.log.dids, read_pseudonym_keys(config.log_key_path)[-1])
        if not directory.is_dir():
            raise StartupError(f"nothing was removed: the log directory {directory} does not exist")
        node = config.node_name[: _MAX_NODE_NAME - len(_NODE_SUFFIX)].rstrip("-._") + _NODE_SUFFIX
        origin, clock = LogOrigin(node, __version__, pseudonymizer.epoch), _HostClock()
        metrics = Metrics(CollectorRegistry(), version=__version__)
        events = EventLogWriter(directory, clock, origin, limits=build_segment_limits(config), level=config.log.level)
        events.metrics = metrics
        with suppress(OSError):
            events.startService()
            events.emit("proc.start", version=__version__, reason="purge")
            self._give_to_owner()
        return events, EventRecorder(clock, events, metrics, pseudonymizer)

    def _give_to_owner(self) -> None:
        """Give files that root has made to the owner of the directory."""
        directory = self._config.log.directory
        if os.geteuid() == 0:
            owner = directory.stat()
            for path in directory.iterdir():
                if path.stat().st_uid == 0 != owner.st_uid:
                    os.chown(path, owner.st_uid, owner.st_gid)


def _parse_base58_key(given: str) -> str:
    """The did:key of a key of DIDComm v1 in base58; anything else as it is."""
    if given.startswith("did:"):
        return given
    with suppress(InvalidKey):
        return parse_key(given)
    return given
