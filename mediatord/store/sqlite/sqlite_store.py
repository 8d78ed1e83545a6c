"""
The store in an SQLite database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import MediatorError, UnknownRecipient
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.store.caches import OWNER_CACHE_CAPACITY, OwnerCache
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster_and_quotas import IClusterStore
from mediatord.store.interfaces.decentrl import DecentrlQuotas, IDecentrlStore
from mediatord.store.interfaces.devices import IDeviceStore
from mediatord.store.interfaces.messages import (
    AcknowledgementRequest,
    AcknowledgementResult,
    EarlyResultCallback,
    EnqueueRequest,
    EnqueueResult,
    Payload,
    QueueLimits,
    RemovedMessage,
    StoredMessage,
    filter_valid_ids,
)
from mediatord.store.interfaces.store import (
    Account,
    ExpiredAccount,
    IStore,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore
from mediatord.store.sqlite import (
    account_queries,
    arrival_queries,
    coordination_queries,
    decentrl_queries,
    device_queries,
    message_queries,
    message_writes,
    queue_statistics,
)
from mediatord.store.sqlite.administration import SQLiteStoreAdministration
from mediatord.store.sqlite.database_file import TableSizeEstimator
from mediatord.store.sqlite.decentrl_store import SQLiteDecentrlStore, estimate_items_bytes
from mediatord.store.sqlite.executor import (
    SliceSize,
    SQLExecutor,
    get_single_result,
    read_cached,
    sql_method,
    timed_sql_method,
)
from mediatord.store.sqlite.message_writes import EnqueueOperation, MarkDeliveredOperation, RemoveOperation
from mediatord.store.sqlite.v1_connections import SQLiteV1ConnectionStore

T = TypeVar("T")
R = TypeVar("R")

# Rows of a slice of each kind, at least and at most, and bytes of expired messages in one: nobody else can write
# meanwhile.
EXPIRY_SLICE_ROWS = 8, 64
EXPIRY_SLICE_BYTES = 1_048_576
ACCOUNTS_SLICE_ROWS = 8, 64
PRUNE_SLICE_ROWS = 32, 256
# Seconds for which an account is cached: an operator may have removed it, or another process that uses the database.
# Until then its requests are served, and find nothing.
ACCOUNT_CACHE_SECONDS, SHARED_ACCOUNT_CACHE_SECONDS = 60.0, 2.0


@implementer(IClusterStore)
class SQLiteClusterStore:
    """Cluster state for several processes on one host; leases are compared by its clock."""

    def __init__(self, executor: SQLExecutor, clock: IReactorTime) -> None:
        self._executor = executor
        self._clock = clock

    join = timed_sql_method("write", "join", coordination_queries.join_node)
    renew = timed_sql_method("write", "renew", coordination_queries.renew_node)
    drop = timed_sql_method("write", "drop", coordination_queries.drop_node)
    list_nodes = timed_sql_method("read", "nodes", coordination_queries.list_nodes)
    list_lapsed_nodes = timed_sql_method("read", "lapsed", coordination_queries.list_lapsed_nodes)
    add_presence = sql_method("write", "add_presence", coordination_queries.add_presence)
    remove_presence = sql_method("write", "remove_presence", coordination_queries.remove_presence)
    find_presence = timed_sql_method("read", "find_presence", coordination_queries.find_presence)
    acquire_lease = timed_sql_method("write", "acquire_lease", coordination_queries.acquire_lease)
    take_quota = timed_sql_method("write", "take_quota", coordination_queries.take_quota)
    return_quota = sql_method("write", "return_quota", coordination_queries.return_quota)
    record_pickups = timed_sql_method("write", "record_pickups", coordination_queries.record_pickups)
    find_picked_up = timed_sql_method("read", "picked_up", coordination_queries.find_picked_up)


@implementer(IDeviceStore)
class SQLiteDeviceStore:
    """Devices and wake-ups; processes of one host compare times by its clock."""

    def __init__(self, executor: SQLExecutor, clock: IReactorTime) -> None:
        self._executor = executor
        self._clock = clock

    set_device = timed_sql_method("write", "set_device", device_queries.set_device)
    list_devices = timed_sql_method("read", "list_devices", device_queries.list_devices)
    remove_devices = sql_method("write", "remove_devices", device_queries.remove_devices)
    forget_devices = sql_method("write", "forget_devices", device_queries.forget_devices)
    expire_devices = timed_sql_method("write", "expire_devices", device_queries.expire_devices)
    count_devices = sql_method("read_in_background", "count_devices", device_queries.count_devices)
    scan_devices = sql_method("read_in_background", "scan_devices", device_queries.scan_devices)
    reseal_devices = sql_method("write", "reseal_devices", device_queries.reseal_devices)
    record_polls = timed_sql_method("write", "record_polls", device_queries.record_polls)
    claim_wakeups = timed_sql_method("write", "claim_wakeups", device_queries.claim_wakeups)
    finish_wakeups = timed_sql_method("write", "finish_wakeups", device_queries.finish_wakeups)
    find_owed_wakeups = timed_sql_method("read_in_background", "find_owed", device_queries.find_owed_wakeups)


@implementer(IStore)
class SQLiteStore:
    """
    Operations as SQL. With a :class:`~mediatord.store.sqlite.executor.SQLiteExecutor`, writes that are submitted at
    the same time are committed together, durably, before their Deferreds fire, and SQL never runs in the reactor's
    thread.

    :param shared: whether other processes work on the database, so that little of it is cached, and not for long.
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
        self._owners: OwnerCache[str] = OwnerCache(0 if shared else OWNER_CACHE_CAPACITY)
        lifetime = SHARED_ACCOUNT_CACHE_SECONDS if shared else ACCOUNT_CACHE_SECONDS
        self._accounts: OwnerCache[Account] = OwnerCache(
            now=clock.seconds, lifetime=lifetime, length=lambda account: len(account.did)
        )
        self._expiry_size = SliceSize(*EXPIRY_SLICE_ROWS)
        self._accounts_size = SliceSize(*ACCOUNTS_SLICE_ROWS)
        self._prune_size = SliceSize(*PRUNE_SLICE_ROWS)
        self._table_sizes = TableSizeEstimator()
        self._decentrl = SQLiteDecentrlStore(executor, clock, caps, max_nonces)
        self.decentrl: IDecentrlStore = self._decentrl
        self.cluster: IClusterStore = SQLiteClusterStore(executor, clock)
        self.devices: IDeviceStore = SQLiteDeviceStore(executor, clock)
        self._v1_connections = SQLiteV1ConnectionStore(executor, clock, lifetime)
        self.v1_connections: IV1ConnectionStore = self._v1_connections
        self.administration: IStoreAdministration = SQLiteStoreAdministration(executor, self._forget_all)

    get_queue_status = timed_sql_method("read", "status", message_queries.get_queue_status)
    find_arrivals = sql_method("read", "arrived", arrival_queries.find_arrivals)
    find_next_due = timed_sql_method("read", "next_due", message_queries.find_next_due)
    take_due_messages = timed_sql_method("write", "take_due", message_queries.take_due_messages)
    mark_pending = sql_method("write", "mark_pending", message_writes.mark_pending)
    queue_sizes = sql_method("read_in_background", "queue_sizes", queue_statistics.find_largest_queues)
    read_statistics = sql_method("read_in_background", "statistics", queue_statistics.collect_statistics)
    get_queue_totals = sql_method("read_in_background", "waiting", queue_statistics.sum_queues)
    read_ledger = sql_method("read_in_background", "ledger", queue_statistics.read_ledger)
    read_backlog = sql_method("read_in_background", "backlog", queue_statistics.collect_backlog)
    get_account_usage = sql_method("read", "account_usage", account_queries.get_account_usage)
    list_spellings = sql_method("read", "spellings", account_queries.list_spellings)
    list_recipients = sql_method("read", "recipients", account_queries.list_recipients)
    is_retired = sql_method("read", "is_retired", account_queries.is_retired)
    remember_did = sql_method("write", "remember_did", account_queries.remember_did)
    recall_did = sql_method("read", "recall_did", account_queries.recall_did)
    release_nonce = sql_method("write", "release", coordination_queries.release_nonce)

    def open(self) -> Deferred[None]:
        self._decentrl.opened()
        self._forget_all(None)  # the database may be another one
        return self._executor.open()

    def close(self) -> Deferred[None]:
        return self._executor.close()

    @property
    def fault_description(self) -> str:
        return self._executor.fault_description

    def table_sizes(self) -> Deferred[dict[str, int]]:
        return self._executor.read_in_background("table_sizes", self._table_sizes.measure)

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
        requests = [EnqueueRequest(recipient_did, tuple(payloads), expires_at, due_at, origin)]
        enqueued = self._executor.write_each("enqueue", self._make_operations(requests))
        return enqueued.addCallback(self._forget_unknown, requests).addCallback(get_single_result)

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        def report_early(place: int, outcomes: list[Any]) -> None:
            assert early is not None
            self._forget_unknown(outcomes, deposits[place : place + len(outcomes)])
            early(list(enumerate(outcomes, place)))

        operations = self._make_operations(deposits)
        enqueued = self._executor.write_each("enqueue", operations, None if early is None else report_early)
        return enqueued.addCallback(self._forget_unknown, deposits)

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        def forget(failure: Failure) -> Failure:
            if failure.check(UnknownRecipient):
                self._owners.forget([request.recipient_did for request in deposits])
            return failure

        operations = [operation for operation, _ in self._make_operations(deposits)]
        size = sum([operation.size for operation in operations])
        return self._executor.write("enqueue", message_writes.enqueue_all, operations, size=size).addErrback(forget)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        arguments = self._clock.seconds(), account, recipient_did, limit, max_bytes
        return self._executor.read("fetch", message_queries.fetch_messages, *arguments, size=max_bytes)

    def find_messages(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        now, size = self._clock.seconds(), estimate_items_bytes(len(ids))
        return self._executor.read("find", arrival_queries.find_messages, now, ids, size=size)

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._executor.write("mark_delivered", MarkDeliveredOperation(filter_valid_ids(ids), node))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        operation = RemoveOperation(filter_valid_ids(ids), None, self._clock.seconds())
        return self._executor.write("remove", operation).addCallback(_get_removed)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        acknowledged = self._acknowledge_each([AcknowledgementRequest(account, ids)])
        return acknowledged.addCallback(get_single_result).addCallback(_get_removed)

    def acknowledge_each(
        self, requests: Sequence[AcknowledgementRequest]
    ) -> Deferred[list[AcknowledgementResult | MediatorError]]:
        return self._acknowledge_each(requests)

    def _acknowledge_each(self, requests: Sequence[AcknowledgementRequest]) -> Deferred[list[Any]]:
        operations, digests = [], {}
        for place, (account, ids, with_status) in enumerate(requests):
            operations.append(RemoveOperation(filter_valid_ids(ids), account, self._clock.seconds(), with_status))
            if some := message_queries.parse_digests(operations[-1].ids):
                digests[place] = some
        if digests:
            return Deferred.fromCoroutine(self._acknowledge_by_digest(operations, digests))
        return self._executor.write_each("acknowledge", [(operation, 0) for operation in operations])

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        """In slices, between which others write."""
        return Deferred.fromCoroutine(self._expire_messages(limit))

    async def _expire_messages(self, limit: int) -> list[RemovedMessage]:
        expired: list[RemovedMessage] = []
        work = message_writes.expire_messages
        while (left := limit - len(expired)) > 0:
            arguments = self._clock.seconds(), left, EXPIRY_SLICE_BYTES
            removed = await self._executor.write_slice("expire", self._expiry_size, work, *arguments)
            if not removed:
                break
            expired += removed
        return expired

    def get_account(self, did: str) -> Deferred[Account | None]:
        return read_cached(self._executor, "account", account_queries.get_account, self._accounts, did)

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        did = canonicalize_did(recipient_did)
        return read_cached(self._executor, "owner", account_queries.find_owner, self._owners, did)

    def grant(self, did: str) -> Deferred[Account]:
        granted = self._executor.write("grant", account_queries.grant_account, did, self._clock.seconds())
        return granted.addBoth(self._forget, self._accounts, [did])

    def record_contact(self, did: str) -> Deferred[None]:
        recorded = self._executor.write("touch", account_queries.touch_account, did, self._clock.seconds())
        return recorded.addBoth(self._forget, self._accounts, [did])

    def mark_draft03(self, did: str) -> Deferred[None]:
        marked = self._executor.write("mark_draft03", account_queries.mark_draft03, did)
        return marked.addBoth(self._forget, self._accounts, [did])

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        arguments = limit, unused_before, idle_before
        work = account_queries.expire_accounts
        expired = self._executor.write_slice("expire_accounts", self._accounts_size, work, *arguments)
        return expired.addCallback(lambda accounts: self._forget_all(accounts) if accounts else accounts)

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        shrinking = all(action == "remove" for _, action in updates)
        arguments = account, tuple(updates), max_recipients
        updated = self._executor.write("update", account_queries.update_recipients, *arguments, shrinking=shrinking)
        return updated.addBoth(self._forget, self._owners, [canonicalize_did(name) for name, _ in updates])

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        return self._executor.write("move", account_queries.move_account, prior, new).addBoth(self._forget_all)

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._executor.write(
            "claim", coordination_queries.NonceClaim(key, until, now, share, self._max_nonces)
        )

    def prune_nonces(self) -> Deferred[int]:
        """In slices, between which others write; deletes expired quotas and registrations as well."""
        return Deferred.fromCoroutine(self._prune_nonces())

    async def _prune_nonces(self) -> int:
        def prune(work: Callable[..., Any], *args: Any) -> Deferred[Any]:
            return self._executor.write_slice("prune", self._prune_size, work, self._clock.seconds(), *args)

        key: Any = b""
        while key is not None:
            key = await prune(coordination_queries.prune_quotas, key)
        pruned, place = await prune(coordination_queries.prune_nonces, 0)
        while place is not None:
            number, place = await prune(coordination_queries.prune_nonces, place)
            pruned += number
        while await prune(decentrl_queries.drop_expired_registrations):
            pass
        return int(pruned)

    def _make_operations(self, requests: Sequence[EnqueueRequest]) -> list[tuple[EnqueueOperation, int]]:
        now, limits = self._clock.seconds(), self._limits
        operations = []
        for request in requests:
            size = 0
            for payload in request.payloads:
                size += len(payload.data)
            operations.append((EnqueueOperation(request, limits, now, size), size))
        return operations

    def _forget_unknown(self, outcomes: list[Any], requests: Sequence[EnqueueRequest]) -> list[Any]:
        for outcome, request in zip(outcomes, requests, strict=True):
            if isinstance(outcome, UnknownRecipient):
                self._owners.forget([request.recipient_did])
        return outcomes

    async def _acknowledge_by_digest(
        self, operations: Sequence[RemoveOperation], digests: Mapping[int, list[bytes]]
    ) -> list[AcknowledgementResult | MediatorError]:
        """Add the ids of the payloads with these digests, by the place of the operation; then remove."""
        for place, some in digests.items():
            operation, ids = operations[place], dict.fromkeys(operations[place].ids)
            after: int | None = -1
            while after is not None:
                arguments = operation.account, some, after
                found, after = await self._executor.read("acknowledge", message_queries.find_by_digest, *arguments)
                ids |= dict.fromkeys(found)
            operation.ids = tuple(ids)
        return await self._executor.write_each("acknowledge", [(operation, 0) for operation in operations])

    def _forget(self, result: R, cache: OwnerCache[Any], dids: Sequence[str]) -> R:
        cache.forget(dids)
        return result

    def _forget_all(self, result: R) -> R:
        self._owners.clear()
        self._accounts.clear()
        self._v1_connections.forget_all()
        return result


def _get_removed(result: AcknowledgementResult) -> list[RemovedMessage]:
    return result.removed
