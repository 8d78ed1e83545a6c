"""The store in MongoDB."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import PayloadTooLarge, StoreUnavailable, UnknownRecipient
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW, IClusterStore
from mediatord.store.interfaces.decentrl import DecentrlQuotas, IDecentrlStore
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    ArrivalWindow,
    EnqueueRequest,
    EnqueueResult,
    MessageArrival,
    QueueBacklog,
    QueueLimits,
    QueueStatus,
    QueueTotals,
    RemovedMessage,
    StoredMessage,
    StoreLedger,
    StoreStatistics,
)
from mediatord.store.interfaces.store import BatchLimits, IStore, StoreFault, StoreUnusable
from mediatord.store.mongo import ledger, message_queues, queue_statistics
from mediatord.store.mongo.accounts import MongoAccountStore, RecipientDIDCache
from mediatord.store.mongo.administration import MongoStoreAdministration
from mediatord.store.mongo.cluster import MongoClusterStore, SessionOwnerRecord
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.errors import UnsupportedServer
from mediatord.store.mongo.driver.executor import operation, retry_on_duplicate_key, start_operation
from mediatord.store.mongo.driver.transactions import Transaction, TransactionWork
from mediatord.store.mongo.enqueue import EnqueueBatchOperation
from mediatord.store.mongo.message_queues import (
    AccountReadSerializer,
    DeliveryMark,
    DueMessageTransaction,
    MessageQueueFinder,
    MessageQueueReader,
    MongoEnqueueRequest,
    list_delivering_boots,
    mark_delivered,
    mark_pending,
    release_delivered,
)
from mediatord.store.mongo.nonces import NonceCapacity, NonceClaimBatchOperation, NonceClaimRequest, NonceReleaseQueue
from mediatord.store.mongo.removal import LateCommitReporter, RemovalListener, RemovalRequest, RemoveBatchOperation
from mediatord.store.mongo.schema import ALL_COLLECTIONS, MIGRATIONS, MongoMigration, MongoSchema
from mediatord.store.mongo.space_quota import SpaceQuota
from mediatord.store.mongo.transaction_batcher import TransactionBatcher
from mediatord.store.recipient_names import filter_valid_ids
from mediatord.store.separate_transactions import IndependentEnqueues, acknowledge_in_steps

T = TypeVar("T")

# Batches of writes, and of nonce claims, that run at a time, and works in each: smaller ones cost the server more,
# larger ones keep one of its threads busy while the others are idle.
_WRITE_BATCHES_AT_ONCE = 3
_CLAIM_BATCHES_AT_ONCE = 2
_BATCH_BOUNDS = BatchLimits(batch=32, waiting=5_000)


@implementer(IStore)
class MongoStore(MongoAccountStore, IndependentEnqueues):
    """
    Store in MongoDB. Concurrent writes are committed together, durably on a majority, before their Deferreds fire.

    :param clock: which messages and nonces expire by; leases expire by the clock of the server.
    :param space_limits: on the size of the database and the free space of its disk.
    :param on_fault: called when the database becomes full and when that is over.
    :param migrations: beyond those of the schema.
    :param on_late_removals: called with messages removed by operations that were reported as failed.
    :param on_late_acknowledgements: the same for events of the Decentrl half.
    :ivar space_quota: refuses writes that need more space.
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
        on_late_removals: RemovalListener = lambda removed: None,
        on_late_acknowledgements: RemovalListener = lambda removed: None,
    ) -> None:
        super().__init__(client, clock, SpaceQuota(client, space_limits, on_fault))
        self._schema = MongoSchema(ALL_COLLECTIONS, (*MIGRATIONS, *migrations))
        self._batcher = TransactionBatcher(client, at_once=_WRITE_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._claim_batcher = TransactionBatcher(client, at_once=_CLAIM_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._session_owner = SessionOwnerRecord(client)
        did_cache = RecipientDIDCache()
        self._queues = MessageQueueReader(did_cache)
        late_commits = LateCommitReporter(on_late_removals)
        self._enqueue_operation = EnqueueBatchOperation(limits, MessageQueueFinder(), late_commits)
        self._remove_operation = RemoveBatchOperation(did_cache, late_commits)
        self._nonces = NonceCapacity(client, max_nonces)
        self._release_queue = NonceReleaseQueue(client)
        self._claim_operation = NonceClaimBatchOperation(self._nonces, self._release_queue)
        self._read_serializer = AccountReadSerializer(client)
        self._clocks = ClockSkewMonitor(client, MAX_CLOCK_SKEW)
        self._decentrl = MongoDecentrlStore(
            client,
            clock,
            caps,
            self._nonces,
            self._clocks,
            LateCommitReporter(on_late_acknowledgements),
            self.space_quota.refuses,
        )
        self.decentrl: IDecentrlStore = self._decentrl
        self.cluster: IClusterStore = MongoClusterStore(client, self._clocks)
        self.administration: IStoreAdministration = MongoStoreAdministration(
            client, did_cache, self._owner_cache.clear
        )

    @property
    def fault_description(self) -> str:
        return self.space_quota.fault_description

    @operation
    async def open(self) -> None:
        try:
            await self._client.open(lambda executor: self._schema.prepare(executor, self._client.clock))
        except UnsupportedServer as error:
            raise StoreUnusable(str(error)) from None
        self.space_quota.start()
        self._batcher.start()
        self._claim_batcher.start()
        live = {node.boot for node in await self.cluster.list_nodes()}
        await self._session_owner.enter(live)
        await ledger.open_ledger(self._client)
        for boot in await list_delivering_boots(self._client):
            if boot not in live:
                await release_delivered(self._client, boot)

    @operation
    async def close(self) -> None:
        self.space_quota.stop()
        await gatherResults([self._batcher.drain(), self._claim_batcher.drain()])
        await self._session_owner.leave()
        await self._client.close()

    @operation
    async def ping(self) -> None:
        """Write durably on a majority; fail while the database is full."""
        await self._client.write_heartbeat("ping")
        if self.space_quota.fault_description:
            raise StoreUnavailable

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        # With a skewed clock messages would expire too early, or not be found by their recipient.
        if self._clocks.is_skewed or self.space_quota.refuses("enqueue"):
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        orders = [
            MongoEnqueueRequest(one.recipient_did, one.payloads, now, one.expires_at, one.due_at, one.origin)
            for one in deposits
        ]
        if not self._enqueue_operation.is_possible(orders):
            return fail(PayloadTooLarge())
        dids = {one.recipient_did for one in deposits}
        keys = {*dids, *filter(None, map(self._owner_cache.get_cached, dids))}
        size = sum([len(payload.data) for one in deposits for payload in one.payloads])
        enqueued = self._batcher.submit("enqueue", self._enqueue_operation, orders, keys, size)
        return enqueued.addErrback(self._handle_unknown_recipient, dids)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # messages would seem to have expired
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
            return self._read("find", _return_nothing)
        now = self._clock.seconds()
        return start_operation(
            self._client.operate("find", lambda executor, deadline: self._queues.find(executor, deadline, known, now))
        )

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(accounts)
        return self._read(
            "arrived",
            _unless_limit_is_zero(limit, lambda t: message_queues.list_arrivals(t, dids, window, limit)),
        )

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
        return start_operation(acknowledge_in_steps(self, account, ids, key, until, share, with_status=with_status))

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        return start_operation(
            self._remove_operation.expire(self._client, self._clocks, self._clock.seconds(), limit)
        )

    def find_next_due(self) -> Deferred[float | None]:
        return start_operation(message_queues.find_next_due(self._client, self._clock.seconds()))

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        if self._clocks.is_skewed:
            return fail(StoreUnavailable())  # messages would seem to be due
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

    def get_buffered(self) -> tuple[int, int]:
        waiting = [each.held for each in (self._batcher, self._claim_batcher)]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._claim_batcher.submit(
            "claim", self._claim_operation, NonceClaimRequest(key, until, self._clock.seconds(), share), [key]
        )

    @operation
    async def release_nonce(self, key: bytes) -> None:
        self._nonces.released(await self._release_queue.release(key))

    @operation
    async def prune_nonces(self) -> int:
        """Delete expired nonces and registrations, and carry the ledger forward."""
        pruned = await self._nonces.prune(self._clock.seconds())
        await self._decentrl.drop_expired_registrations()
        await ledger.carry_forward(self._client)
        return pruned

    def _read(self, name: str, work: TransactionWork[T]) -> Deferred[T]:
        return start_operation(self._client.transact(name, work, reading=True))

    def _handle_unknown_recipient(self, failure: Failure, dids: set[str]) -> Failure:
        if failure.check(UnknownRecipient):
            self._owner_cache.forget(dids)
        return failure


def _unless_limit_is_zero(limit: int, work: TransactionWork[list[T]]) -> TransactionWork[list[T]]:
    """Replace the work by none if it would find nothing; it still fails if the server is unreachable."""
    return work if limit > 0 else _return_nothing


async def _return_nothing(_: object) -> list[Any]:
    return []
