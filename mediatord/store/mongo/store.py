"""A store in MongoDB."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import MediatorError, PayloadTooLarge, StoreUnavailable, UnknownRecipient
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.store.interfaces.accounts import (
    Account,
    AccountUsage,
    ExpiredAccount,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import IClusterStore
from mediatord.store.interfaces.decentrl import DecentrlQuotas, IDecentrlStore
from mediatord.store.interfaces.messages import (
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
from mediatord.store.interfaces.store import IStore, StoreFault
from mediatord.store.message_operations import BatchLimits, enqueue_independently
from mediatord.store.mongo import accounts, ledger, message_queues, queue_statistics, schema
from mediatord.store.mongo.accounts import RecipientDIDCache, RecipientOwnerCache
from mediatord.store.mongo.administration import MongoStoreAdministration
from mediatord.store.mongo.cluster import MongoClusterStore, SessionOwnerRecord
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.executor import retry_on_duplicate_key, start_operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.enqueue import EnqueueBatchOperation
from mediatord.store.mongo.eviction import MessageQueueFinder
from mediatord.store.mongo.message_queues import (
    AccountReadSerializer,
    DeliveryMark,
    DueMessageTransaction,
    MessageLookup,
    MessageQueueReader,
    MongoEnqueueRequest,
    list_delivering_boots,
    mark_delivered,
    mark_pending,
    release_delivered,
)
from mediatord.store.mongo.nonces import NonceCapacity, NonceClaimBatchOperation, NonceClaimRequest, NonceReleaseQueue
from mediatord.store.mongo.removal import LateCommitReporter, RemovalListener, RemovalRequest, RemoveBatchOperation
from mediatord.store.mongo.schema import DIDCOMM_COLLECTIONS, MIGRATIONS, MongoMigration, MongoSchema
from mediatord.store.mongo.space_quota import SpaceQuota
from mediatord.store.mongo.transaction_batcher import TransactionBatcher
from mediatord.store.quotas import SpaceLimits
from mediatord.store.recipient_names import filter_valid_ids

T = TypeVar("T")

# Batches of writes, and of claims, that are under way at a time, and works in each: smaller ones cost a server more,
# larger ones are done by one of its threads while the others have nothing to do.
_WRITE_BATCHES_AT_ONCE = 3
_CLAIM_BATCHES_AT_ONCE = 2
_BATCH_BOUNDS = BatchLimits(batch=32, waiting=5_000)


@implementer(IStore)
class MongoStore:
    """
    Writes that are asked for at the same time are committed together, durably on a majority of the servers, before
    their Deferreds fire. Its many methods are those of the interface.

    :param clock: what messages and nonces expire by; leases go by the clock of the server.
    :param space_limits: how much space the database may take.
    :param on_fault: told of a full database when that begins and ends.
    :ivar space_quota: refuses what would need more.
    :param migrations: beyond those that there are.
    :param tell: told what was removed by operations that had failed for all that was known when they ended.
    :param tell_events: told the same of the Decentrl half.
    """

    def __init__(
        self,
        client: ReplicaSetClient,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
        max_nonces: int = 1_000_000,
        migrations: Sequence[MongoMigration] = (),
        tell: RemovalListener = lambda removed: None,
        tell_events: RemovalListener = lambda removed: None,
    ) -> None:
        self._client = client
        self._clock = clock
        collections = (*DIDCOMM_COLLECTIONS, *schema.DECENTRL_COLLECTIONS, *schema.CLUSTER_COLLECTIONS)
        self._schema = MongoSchema(collections, (*MIGRATIONS, *migrations))
        self._batcher = TransactionBatcher(client, at_once=_WRITE_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._claim_batcher = TransactionBatcher(client, at_once=_CLAIM_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._session_owner = SessionOwnerRecord(client)
        self._did_cache = did_cache = RecipientDIDCache()
        self._queues = MessageQueueReader(did_cache)
        late_commits = LateCommitReporter(tell)
        self._enqueue_operation = EnqueueBatchOperation(limits, MessageQueueFinder(), late_commits)
        self._remove_operation = RemoveBatchOperation(did_cache, late_commits)
        self._nonces = NonceCapacity(client, max_nonces)
        self._release_queue = NonceReleaseQueue(client)
        self._claim_operation = NonceClaimBatchOperation(self._nonces, self._release_queue)
        self._owner_cache = RecipientOwnerCache(client)
        self._read_serializer = AccountReadSerializer(client)
        self._clocks = ClockSkewMonitor(client)
        self.space_quota = SpaceQuota(client, space_limits, on_fault)
        self._decentrl = MongoDecentrlStore(
            client, clock, caps, self._nonces, self._clocks, LateCommitReporter(tell_events), self.space_quota.refuses
        )
        self.decentrl: IDecentrlStore = self._decentrl
        self.cluster: IClusterStore = MongoClusterStore(client, self._clocks)
        self.administration: IStoreAdministration = MongoStoreAdministration(
            client, did_cache, self._owner_cache.clear
        )

    def open(self) -> Deferred[None]:
        return start_operation(self._open())

    def close(self) -> Deferred[None]:
        return start_operation(self._close())

    @property
    def trouble(self) -> str:
        return self.space_quota.trouble

    def ping(self) -> Deferred[None]:
        """A write that a majority has on disk; fails while the database is full."""
        return start_operation(self._ping())

    def enqueue(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        enqueued = self.enqueue_all([EnqueueRequest(recipient_did, tuple(payloads), expires_at, due_at, origin)])
        return enqueued.addCallback(lambda one: one[0])

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        return enqueue_independently(self._clock, self.enqueue, deposits, early)

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        # With clocks that differ it would expire too early, or not be found where its recipient is.
        if self._clocks.is_skewed or self.space_quota.refuses("enqueue"):
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        orders = [
            MongoEnqueueRequest(one.recipient_did, one.payloads, now, one.expires_at, one.due_at, one.origin)
            for one in deposits
        ]
        if not self._enqueue_operation.possible(orders):
            return fail(PayloadTooLarge())
        dids = {one.recipient_did for one in deposits}
        keys = {*dids, *filter(None, map(self._owner_cache.known, dids))}
        size = sum([len(payload.data) for one in deposits for payload in one.payloads])
        enqueued = self._batcher.submit("enqueue", self._enqueue_operation, orders, keys, size)
        return enqueued.addErrback(self._handle_unknown_recipient, dids)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # what waits would seem to have expired
        now = self._clock.seconds()

        def fetch(t: Transaction) -> Awaitable[list[StoredMessage]]:
            return self._queues.fetch(t, account, recipient_did, now, limit, max_bytes)

        return self._read_serializer.read("fetch", account, _unless_limit_is_zero(limit, fetch))

    def get_queue_status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        return self._read_serializer.read(
            "status", account, lambda t: message_queues.read_status(t, account, recipient_did, now)
        )

    def find_messages(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())
        known = filter_valid_ids(ids)
        if not known:
            return self._read_limited("find", 0, _return_nothing)
        finding = MessageLookup(self._queues, self._did_cache, known, self._clock.seconds())
        return start_operation(self._client.operate("find", finding))

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(accounts)
        return self._read_limited("arrived", limit, lambda t: message_queues.list_arrivals(t, dids, window, limit))

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        pushed = DeliveryMark(filter_valid_ids(ids), node)
        return self._batcher.submit("mark_delivered", mark_delivered, pushed, frozenset(pushed.ids))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        known = filter_valid_ids(ids)
        return self._batcher.submit("mark_pending", mark_pending, known, frozenset(known))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        removal = RemovalRequest(filter_valid_ids(ids), None, self._clock.seconds())
        return self._batcher.submit("remove", self._remove_operation, removal, frozenset(removal.ids), removal.size)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        removal = RemovalRequest(filter_valid_ids(ids), account, self._clock.seconds())
        keys = {account, *removal.ids}
        return self._batcher.submit("acknowledge", self._remove_operation, removal, keys, removal.size)

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        return start_operation(self._remove_operation.expire(self._client, self._clock.seconds(), limit))

    def find_next_due(self) -> Deferred[float | None]:
        return start_operation(message_queues.find_next_due(self._client, self._clock.seconds()))

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # who knows what is due
        now = self._clock.seconds()
        taking = DueMessageTransaction(self._queues, self._clocks, now, limit)
        return start_operation(
            retry_on_duplicate_key(lambda: self._client.transact("take_due", taking, undo=taking.undo))
        )

    def table_sizes(self) -> Deferred[dict[str, int]]:
        return start_operation(queue_statistics.read_collection_sizes(self._client))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return start_operation(queue_statistics.read_queue_sizes(self._client, top))

    def read_statistics(self, top: int) -> Deferred[StoreStatistics]:
        return start_operation(queue_statistics.read_statistics(self._client, top))

    def read_ledger(self) -> Deferred[StoreLedger]:
        return start_operation(ledger.read_ledger(self._client))

    def get_queue_totals(self) -> Deferred[QueueTotals]:
        return start_operation(queue_statistics.read_waiting(self._client))

    def read_backlog(self, bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        return start_operation(queue_statistics.read_backlog(self._client, tuple(bounds), top))

    def get_account(self, did: str) -> Deferred[Account | None]:
        return start_operation(accounts.find_account(self._client, did))

    def grant(self, did: str) -> Deferred[Account]:
        if self.space_quota.refuses("grant"):
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        return self._transact("grant", lambda t: accounts.grant_account(t, did, now))

    def record_contact(self, did: str) -> Deferred[None]:
        return start_operation(accounts.touch_account(self._client, did, self._clock.seconds()))

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        return start_operation(self._expire_accounts(limit, unused_before, idle_before))

    async def _expire_accounts(
        self, limit: int, unused_before: float | None, idle_before: float | None
    ) -> list[ExpiredAccount]:
        before = {"unused": unused_before or 0.0, "idle": idle_before or 0.0}
        expired: list[ExpiredAccount] = []
        tried: set[str] = set()
        # An unused one for which something came is not fresh any more once it was tried, and makes room for others.
        while not expired:
            found = await accounts.find_expiry_candidates(self._client, limit, unused_before, idle_before)
            if all(did in tried for did, _ in found):
                break
            for did, reason in found:
                tried.add(did)
                expiring = partial(accounts.expire_account, did=did, reason=reason, before=before[reason])
                gone = await self._transact("expire_accounts", expiring)
                if gone is not None:
                    expired.append(gone)
        if expired:
            self._owner_cache.clear()
        return expired

    def get_account_usage(self) -> Deferred[AccountUsage]:
        return start_operation(accounts.measure_accounts(self._client))

    def mark_draft03(self, did: str) -> Deferred[None]:
        return start_operation(accounts.mark_draft03(self._client, did))

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        """Answered from memory if it was asked lately."""
        return self._owner_cache.owner(canonicalize_did(recipient_did))

    def list_registered_names(self, recipient_did: str) -> Deferred[list[str]]:
        return start_operation(accounts.list_spellings(self._client, recipient_did))

    def get_buffered(self) -> tuple[int, int]:
        waiting = [each.held for each in (self._batcher, self._claim_batcher)]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        wanted = tuple(updates)
        if self.space_quota.refuses("update", shrinking=all(action == "remove" for _, action in wanted)):
            return fail(StoreUnavailable())
        updated = self._transact("update", lambda t: accounts.update_recipients(t, account, wanted, max_recipients))
        return updated.addBoth(self._invalidate_owners, [canonicalize_did(name) for name, _ in wanted])

    def list_recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._read("recipients", lambda t: accounts.list_recipients(t, account, offset, limit))

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        if self.space_quota.refuses("move"):
            return fail(StoreUnavailable())
        return self._transact("move", lambda t: accounts.move_account(t, prior, new)).addBoth(self._clear_owners)

    def is_retired(self, did: str) -> Deferred[bool]:
        return start_operation(accounts.is_retired(self._client, did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        if self.space_quota.refuses("remember_did"):
            return fail(StoreUnavailable())
        return start_operation(accounts.remember_did(self._client, short, long))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return start_operation(accounts.recall_did(self._client, short))

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._claim_batcher.submit(
            "claim", self._claim_operation, NonceClaimRequest(key, until, self._clock.seconds(), share), [key]
        )

    def release_nonce(self, key: bytes) -> Deferred[None]:
        return start_operation(self._release(key))

    async def _release(self, key: bytes) -> None:
        self._nonces.released(await self._release_queue.release(key))

    def prune_nonces(self) -> Deferred[int]:
        """Registrations that have expired go as well."""
        return start_operation(self._prune(self._clock.seconds()))

    async def _open(self) -> None:
        await self._client.open(lambda executor: self._schema.prepare(executor, self._client.clock))
        self.space_quota.start()
        self._batcher.start()
        self._claim_batcher.start()
        live = {node.boot for node in await self.cluster.list_nodes()}
        await self._session_owner.enter(live)
        await ledger.open_ledger(self._client)
        for boot in await list_delivering_boots(self._client):
            if boot not in live:
                await release_delivered(self._client, boot)

    async def _ping(self) -> None:
        await self._client.write_heartbeat("ping")
        if self.space_quota.trouble:
            raise StoreUnavailable

    async def _close(self) -> None:
        self.space_quota.stop()
        await gatherResults([self._batcher.drain(), self._claim_batcher.drain()])
        await self._session_owner.leave()
        await self._client.close()

    async def _prune(self, now: float) -> int:
        pruned = await self._nonces.prune(now)
        await self._decentrl.drop_expired_registrations()
        await ledger.carry_forward(self._client)
        return pruned

    def _transact(self, name: str, work: TransactionWork[T]) -> Deferred[T]:
        return start_operation(retry_on_duplicate_key(lambda: self._client.transact(name, work)))

    def _read(self, name: str, work: TransactionWork[T]) -> Deferred[T]:
        return start_operation(self._client.transact(name, work, reading=True))

    def _read_limited(self, name: str, limit: int, work: TransactionWork[list[T]]) -> Deferred[list[T]]:
        """For nothing at all, only whether anybody could be asked."""
        return self._read(name, _unless_limit_is_zero(limit, work))

    def _handle_unknown_recipient(self, failure: Failure, dids: set[str]) -> Failure:
        if failure.check(UnknownRecipient):
            self._owner_cache.forget(dids)
        return failure

    def _invalidate_owners(self, result: T, dids: Sequence[str]) -> T:
        self._owner_cache.forget(dids)
        return result

    def _clear_owners(self, result: T) -> T:
        self._owner_cache.clear()
        return result


def _unless_limit_is_zero(limit: int, work: TransactionWork[list[T]]) -> TransactionWork[list[T]]:
    return work if limit > 0 else _return_nothing


async def _return_nothing(_: object) -> list[Any]:
    return []
