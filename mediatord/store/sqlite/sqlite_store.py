"""
The store in an SQLite database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import MediatorError, StoreUnavailable, UnknownRecipient
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.store.caches import OWNER_CACHE_CAPACITY, OwnerCache
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import ClusterJoinError, ClusterNode, IClusterStore, PresenceRecord
from mediatord.store.interfaces.decentrl import DecentrlQuotas, IDecentrlStore
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    ArrivalWindow,
    EarlyResultCallback,
    EnqueueRequest,
    EnqueueResult,
    MessageArrival,
    Payload,
    QueueBacklog,
    QueueLimits,
    QueueStatus,
    QueueTotals,
    RemovedMessage,
    StoredMessage,
    StoreLedger,
    StoreStatistics,
)
from mediatord.store.interfaces.store import (
    Account,
    AccountUsage,
    ExpiredAccount,
    IStore,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.recipient_names import filter_valid_ids
from mediatord.store.sqlite import account_queries, coordination_queries, decentrl_queries, message_queries
from mediatord.store.sqlite.administration import SQLiteStoreAdministration
from mediatord.store.sqlite.database_file import TableSizeEstimator
from mediatord.store.sqlite.decentrl_store import SQLiteDecentrlStore, estimate_items_bytes
from mediatord.store.sqlite.executor import SQLExecutor
from mediatord.store.sqlite.group_commit import OperationOutcome
from mediatord.store.sqlite.message_writes import (
    EnqueueOperation,
    MarkDeliveredOperation,
    RemoveOperation,
    enqueue_all,
    expire_messages,
    mark_pending,
)
from mediatord.store.sqlite.queue_accounting import read_ledger

T = TypeVar("T")
R = TypeVar("R")

# Messages that expire in one transaction: nobody else can write meanwhile.
EXPIRY_BATCH_MESSAGES = 64
EXPIRY_BATCH_BYTES = 1_048_576
# Seconds for which an account is cached: an operator may have removed it.
ACCOUNT_CACHE_SECONDS = 60.0


@implementer(IClusterStore)
class SQLiteClusterStore:
    """Cluster state for several processes on one host; leases are compared by its clock."""

    def __init__(self, executor: SQLExecutor, clock: IReactorTime) -> None:
        self._clock = clock
        self._read = executor.read
        self._write = executor.write

    def join(self, node: ClusterNode, lease: float) -> Deferred[None]:
        now = self._clock.seconds()
        joined = self._write("join", coordination_queries.join_node, node, now + lease, now)
        return joined.addCallback(_raise_join_error)

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._write("renew", coordination_queries.renew_node, boot, now + lease, now)

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        return self._write("drop", coordination_queries.drop_node, boot, max(until, self._clock.seconds()))

    def list_nodes(self) -> Deferred[list[ClusterNode]]:
        return self._read("nodes", coordination_queries.list_nodes, self._clock.seconds())

    def list_lapsed_nodes(self) -> Deferred[list[str]]:
        return self._read("lapsed", coordination_queries.list_lapsed_nodes, self._clock.seconds())

    def add_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        return self._write("announce", coordination_queries.add_presence, boot, tuple(dids))

    def remove_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        return self._write("withdraw", coordination_queries.remove_presence, boot, tuple(dids))

    def find_presence(self, dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        return self._read("whereabouts", coordination_queries.find_presence, tuple(dids), self._clock.seconds())

    def acquire_lease(self, lease_name: str, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._write("hold", coordination_queries.acquire_lease, lease_name, boot, now + lease, now)

    def take_quota(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        now = self._clock.seconds()
        return self._write("take", coordination_queries.take_quota, key, amount, limit, period, now)

    def return_quota(self, key: bytes, amount: int) -> Deferred[None]:
        return self._write("put_back", coordination_queries.return_quota, key, amount)

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        now = self._clock.seconds()
        return self._write(
            "record_pickups", coordination_queries.record_pickups, filter_valid_ids(ids), now + period, now
        )

    def find_picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        now = self._clock.seconds()
        return self._read("picked_up", coordination_queries.find_picked_up, filter_valid_ids(ids), now)


def _raise_join_error(refusal: ClusterJoinError | None) -> None:
    if refusal is not None:
        raise refusal


@implementer(IStore)
class SQLiteStore:
    """
    Operations as SQL. With a :class:`~mediatord.store.sqlite.executor.SQLiteExecutor`, writes that are submitted at
    the same time are committed together, durably, before their Deferreds fire, and SQL never runs in the reactor's
    thread.

    :param shared: whether other processes work on the database, so that nothing of it is cached.
    :param max_nonces: number of nonces that are kept.
    """

    def __init__(
        self,
        executor: SQLExecutor,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        shared: bool = False,
        max_nonces: int = 1_000_000,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._max_nonces = max_nonces
        self._executor = executor
        capacity = 0 if shared else OWNER_CACHE_CAPACITY
        self._owners: OwnerCache[str] = OwnerCache(capacity)
        self._accounts: OwnerCache[Account] = OwnerCache(
            capacity, now=clock.seconds, lifetime=ACCOUNT_CACHE_SECONDS, length=lambda account: len(account.did)
        )
        self._read = executor.read
        self._read_in_background = executor.read_in_background
        self._write = executor.write
        self._table_sizes = TableSizeEstimator()
        self._decentrl = SQLiteDecentrlStore(executor, clock, caps, max_nonces)
        self.decentrl: IDecentrlStore = self._decentrl
        self.cluster: IClusterStore = SQLiteClusterStore(executor, clock)
        self.administration: IStoreAdministration = SQLiteStoreAdministration(
            executor, lambda: self._forget_all(None)
        )

    def open(self) -> Deferred[None]:
        self._decentrl.opened()
        return self._executor.open()

    def close(self) -> Deferred[None]:
        return self._executor.close()

    @property
    def trouble(self) -> str:
        return self._executor.trouble

    def table_sizes(self) -> Deferred[dict[str, int]]:
        return self._read_in_background("table_sizes", self._table_sizes.measure)

    def ping(self) -> Deferred[None]:
        return self._executor.ping()

    def get_buffered(self) -> tuple[int, int]:
        return self._executor.buffered

    def enqueue(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        request = EnqueueRequest(recipient_did, tuple(payloads), expires_at, due_at, origin)
        ((operation, size),) = self._make_operations([request])
        return self._write("enqueue", operation, size=size).addErrback(self._forget_unknown, [request])

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        def report_early(place: int, outcomes: list[OperationOutcome]) -> None:
            assert early is not None
            results = self._make_results(outcomes, deposits[place : place + len(outcomes)])
            early(list(enumerate(results, place)))

        enqueued = self._executor.write_each(
            "enqueue", self._make_operations(deposits), None if early is None else report_early
        )
        return enqueued.addCallback(self._make_results, deposits)

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        operations = [operation for operation, _ in self._make_operations(deposits)]
        size = sum([operation.size for operation in operations])
        enqueued = self._write("enqueue", enqueue_all, operations, size=size)
        return enqueued.addErrback(self._forget_unknown, deposits)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        now = self._clock.seconds()
        return self._read(
            "fetch", message_queries.fetch_messages, account, recipient_did, now, limit, max_bytes, size=max_bytes
        )

    def get_queue_status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        now = self._clock.seconds()
        return self._read("status", message_queries.get_queue_status, account, recipient_did, now)

    def find_messages(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        wanted, now = filter_valid_ids(ids), self._clock.seconds()
        size = estimate_items_bytes(len(wanted))
        return self._read("find", message_queries.find_messages, wanted, now, size=size)

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        return self._read("arrived", message_queries.find_arrivals, tuple(accounts), window, limit)

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._write("mark_delivered", MarkDeliveredOperation(filter_valid_ids(ids), node))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        return self._write("mark_pending", mark_pending, filter_valid_ids(ids))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._write("remove", RemoveOperation(filter_valid_ids(ids), None, self._clock.seconds()))

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._remove(RemoveOperation(filter_valid_ids(ids), account, self._clock.seconds()))

    def acknowledge_once(
        self,
        account: str,
        ids: Sequence[str],
        key: bytes,
        until: float,
        share: float = 1.0,
        *,
        with_status: bool = False,
    ) -> Deferred[AcknowledgementResult | None]:
        now = self._clock.seconds()
        claim = coordination_queries.NonceClaim(key, until, now, share)
        return self._remove(
            RemoveOperation(filter_valid_ids(ids), account, now, claim, self._max_nonces, with_status)
        )

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        """In several transactions, between which others write."""
        expired: list[RemovedMessage] = []

        def expire_more(removed: list[RemovedMessage] | None = None) -> Any:
            expired.extend(removed or ())
            if removed == [] or (removed and len(expired) >= limit):
                return expired
            some = min(max(limit, 0) - len(expired), EXPIRY_BATCH_MESSAGES)
            written = self._write("expire", expire_messages, self._clock.seconds(), some, EXPIRY_BATCH_BYTES)
            return written.addCallback(expire_more)

        done: Deferred[list[RemovedMessage]] = expire_more()
        return done

    def find_next_due(self) -> Deferred[float | None]:
        return self._read("next_due", message_queries.find_next_due, self._clock.seconds())

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        return self._write("take_due", message_queries.take_due_messages, self._clock.seconds(), limit)

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return self._read_in_background("queue_sizes", message_queries.find_largest_queues, top)

    def read_statistics(self, top: int) -> Deferred[StoreStatistics]:
        return self._read_in_background("statistics", message_queries.collect_statistics, top)

    def get_queue_totals(self) -> Deferred[QueueTotals]:
        return self._read_in_background("waiting", message_queries.sum_queues)

    def read_ledger(self) -> Deferred[StoreLedger]:
        return self._read_in_background("ledger", read_ledger)

    def read_backlog(self, bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        return self._read_in_background("backlog", message_queries.collect_backlog, tuple(bounds), top)

    def get_account(self, did: str) -> Deferred[Account | None]:
        return self._read_cached("account", account_queries.get_account, self._accounts, did)

    def grant(self, did: str) -> Deferred[Account]:
        granted = self._write("grant", account_queries.grant_account, did, self._clock.seconds())
        return granted.addBoth(self._forget, self._accounts, [did])

    def record_contact(self, did: str) -> Deferred[None]:
        recorded = self._write("touch", account_queries.touch_account, did, self._clock.seconds())
        return recorded.addBoth(self._forget, self._accounts, [did])

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        expired = self._write("expire_accounts", account_queries.expire_accounts, limit, unused_before, idle_before)
        return expired.addCallback(lambda accounts: self._forget_all(accounts) if accounts else accounts)

    def get_account_usage(self) -> Deferred[AccountUsage]:
        return self._read("account_usage", account_queries.get_account_usage)

    def mark_draft03(self, did: str) -> Deferred[None]:
        marked = self._write("mark_draft03", account_queries.mark_draft03, did)
        return marked.addBoth(self._forget, self._accounts, [did])

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        return self._read_cached("owner", account_queries.find_owner, self._owners, canonicalize_did(recipient_did))

    def list_registered_names(self, recipient_did: str) -> Deferred[list[str]]:
        return self._read("spellings", account_queries.list_spellings, recipient_did)

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        updates = tuple(updates)
        only_removals = all(action == "remove" for _, action in updates)
        updated = self._write(
            "update", account_queries.update_recipients, account, updates, max_recipients, shrinking=only_removals
        )
        return updated.addBoth(self._forget, self._owners, [canonicalize_did(name) for name, _ in updates])

    def list_recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._read("recipients", account_queries.list_recipients, account, offset, limit)

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        return self._write("move", account_queries.move_account, prior, new).addBoth(self._forget_all)

    def is_retired(self, did: str) -> Deferred[bool]:
        return self._read("is_retired", account_queries.is_retired, did)

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        return self._write("remember_did", account_queries.remember_did, short, long)

    def recall_did(self, short: str) -> Deferred[str | None]:
        return self._read("recall_did", account_queries.recall_did, short)

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        claim = coordination_queries.NonceClaim(key, until, self._clock.seconds(), share)
        return self._write("claim", coordination_queries.NonceClaimOperation(claim, self._max_nonces))

    def release_nonce(self, key: bytes) -> Deferred[None]:
        return self._write("release", coordination_queries.release_nonce, key)

    def prune_nonces(self) -> Deferred[int]:
        """In several transactions, between which others write; deletes expired quotas and registrations as well."""
        pruned = 0

        def prune(work: Callable[..., Any], *args: Any) -> Deferred[Any]:
            return self._write("prune", work, self._clock.seconds(), *args)

        def prune_quotas(after: bytes | None = None) -> Deferred[Any]:
            done = prune(coordination_queries.prune_quotas, after)
            return done.addCallback(lambda last: prune_nonces(0) if last is None else prune_quotas(last))

        def prune_nonces(after: int) -> Deferred[Any]:
            return prune(coordination_queries.prune_nonces, after).addCallback(add_pruned)

        def add_pruned(done: tuple[int, int | None]) -> Deferred[Any]:
            nonlocal pruned
            number, last = done
            pruned += number
            return prune_registrations() if last is None else prune_nonces(last)

        def prune_registrations(number: int = decentrl_queries.REGISTRATIONS_PER_PRUNE) -> Any:
            if number < decentrl_queries.REGISTRATIONS_PER_PRUNE:
                return pruned
            return prune(decentrl_queries.drop_expired_registrations).addCallback(prune_registrations)

        return prune_quotas()

    def _make_operations(self, requests: Sequence[EnqueueRequest]) -> list[tuple[EnqueueOperation, int]]:
        now, limits = self._clock.seconds(), self._limits
        operations = []
        for request in requests:
            size = 0
            for payload in request.payloads:
                size += len(payload.data)
            operations.append((EnqueueOperation(request, limits, now, size), size))
        return operations

    def _make_results(
        self, outcomes: list[OperationOutcome], requests: Sequence[EnqueueRequest]
    ) -> list[EnqueueResult | MediatorError]:
        results: list[EnqueueResult | MediatorError] = []
        for outcome, request in zip(outcomes, requests, strict=True):
            if isinstance(outcome.error, UnknownRecipient):
                self._owners.forget([request.recipient_did])
            results.append(outcome.value if outcome.error is None else outcome.error)
        return results

    def _forget_unknown(self, failure: Failure, requests: Sequence[EnqueueRequest]) -> Failure:
        if failure.check(UnknownRecipient):
            self._owners.forget([request.recipient_did for request in requests])
        return failure

    def _remove(self, operation: RemoveOperation) -> Deferred[Any]:
        """Remove messages by their ids and the digests of their payloads."""
        digests = message_queries.parse_digests(operation.ids)
        if not digests:
            return self._write("acknowledge", operation)
        ids = dict.fromkeys(operation.ids)

        def find_more(after: int) -> Deferred[Any]:
            found = self._read("acknowledge", message_queries.find_by_digest, operation.account, digests, after)
            return found.addCallback(add_ids)

        def add_ids(found: message_queries.DigestMatches) -> Deferred[Any]:
            ids.update(dict.fromkeys(found.ids))
            if found.after is not None:
                return find_more(found.after)
            operation.ids = tuple(ids)
            return self._write("acknowledge", operation)

        return find_more(-1)

    def _read_cached(
        self, name: str, read: Callable[[Connection, str], T | None], cache: OwnerCache[T], did: str
    ) -> Deferred[T | None]:
        if not self._executor.is_readable:
            return fail(StoreUnavailable())
        cached = cache.get(did)
        if cached is not None:
            return succeed(cached)
        age = cache.age

        def keep(result: T | None) -> T | None:
            cache.keep(did, result, age)
            return result

        return self._read(name, read, did).addCallback(keep)

    def _forget(self, result: R, cache: OwnerCache[Any], dids: Sequence[str]) -> R:
        cache.forget(dids)
        return result

    def _forget_all(self, result: R) -> R:
        self._owners.clear()
        self._accounts.clear()
        return result
