"""The store in MongoDB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from twisted.internet.defer import Deferred, fail, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import InternalFault, MediatorError, PayloadTooLarge, StoreUnavailable, UnknownRecipient
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW, IClusterStore
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
    filter_valid_ids,
)
from mediatord.store.interfaces.store import BatchLimits, IStore, StoreFault, StoreUnusable
from mediatord.store.interfaces.v1_connections import IV1ConnectionStore
from mediatord.store.mongo import ledger
from mediatord.store.mongo.accounts import MessageDIDFinder, MongoAccountStore
from mediatord.store.mongo.administration import MongoStoreAdministration
from mediatord.store.mongo.cluster_and_quotas import MongoClusterStore, SessionOwnerRecord
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.devices import MongoDeviceStore
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import build_probe_write
from mediatord.store.mongo.driver.errors import DuplicateKeyError, UnsupportedServer
from mediatord.store.mongo.driver.operation import KeyedMutex, operation
from mediatord.store.mongo.enqueue import EnqueueBatch, EnqueueWork
from mediatord.store.mongo.message_queues import (
    MongoQueueReader,
    list_delivering_boots,
    mark_delivered,
    mark_pending,
    release_delivered,
)
from mediatord.store.mongo.nonces import NonceCapacity, NonceClaimRequest, NonceClaims
from mediatord.store.mongo.queue_statistics import MongoQueueStatistics
from mediatord.store.mongo.removal import (
    RecentMessages,
    RemovalBatch,
    RemovalListener,
    RemovalRequest,
    UncertainRemovalReporter,
)
from mediatord.store.mongo.schema import ALL_COLLECTIONS, MIGRATIONS, MongoMigration, MongoSchema
from mediatord.store.mongo.space_limit import MongoSpaceLimit
from mediatord.store.mongo.transaction_batcher import TransactionBatcher

# Batches of writes, and of nonce claims, that run at a time, and works in each: smaller ones cost the server more,
# larger ones keep one of its threads busy while the others are idle.
_WRITE_BATCHES_AT_ONCE = 3
_CLAIM_BATCHES_AT_ONCE = 2
_BATCH_BOUNDS = BatchLimits(batch=32, waiting=5_000)

_log = Logger(namespace="mediatord.store")


@implementer(IStore)
class MongoStore(MongoAccountStore, MongoQueueReader, MongoQueueStatistics):
    """
    Store in MongoDB. Concurrent writes are committed together, durably on a majority, before their Deferreds fire.

    :param clock: which messages and nonces expire by; leases expire by the clock of the server.
    :param space_limits: on the size of the database and the free space of its disk.
    :param on_fault: called when the database becomes full and when that is over.
    :param migrations: beyond those of the schema.
    :param on_late_removals: called with messages removed by operations that were reported as failed.
    :param on_late_acknowledgements: the same for Decentrl events.
    :ivar space_limit: refuses writes that need more space.
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
        super().__init__(client, clock, MongoSpaceLimit(client, space_limits, on_fault))
        self._schema = MongoSchema(ALL_COLLECTIONS, (*MIGRATIONS, *migrations))
        self._batcher = TransactionBatcher(client, at_once=_WRITE_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._claim_batcher = TransactionBatcher(client, at_once=_CLAIM_BATCHES_AT_ONCE, bounds=_BATCH_BOUNDS)
        self._batchers = self._batcher, self._claim_batcher, self._lookup_batcher
        self._session_owner = SessionOwnerRecord(client)
        self._did_finder = MessageDIDFinder()
        self._account_mutex = KeyedMutex(client.clock)
        self._clocks = ClockSkewMonitor(client, MAX_CLOCK_SKEW)
        reporter = UncertainRemovalReporter(on_late_removals)
        self._recent = RecentMessages()
        self._enqueue_batch = EnqueueBatch(limits, reporter, self._recent)
        self._nonces = NonceCapacity(client, max_nonces)
        self._nonce_claims = NonceClaims(client, self._nonces)
        self._removal_batch = RemovalBatch(reporter, recent=self._recent)
        event_reporter = UncertainRemovalReporter(on_late_acknowledgements)
        self._decentrl = MongoDecentrlStore(
            client, clock, caps, self._nonces, self._clocks, event_reporter, self.space_limit.refuses
        )
        self.decentrl: IDecentrlStore = self._decentrl
        self.devices: IDeviceStore = MongoDeviceStore(client, clock, self._clocks, self.space_limit)
        self.v1_connections: IV1ConnectionStore = self._v1_connections
        self.cluster: IClusterStore = MongoClusterStore(client, self._clocks)
        self.administration: IStoreAdministration = MongoStoreAdministration(client, self.forget_accounts)

    @property
    def fault_description(self) -> str:
        return self.space_limit.fault_description

    @operation
    async def open(self) -> None:
        try:
            await self._client.open(self._schema.prepare)
        except UnsupportedServer as error:
            raise StoreUnusable(str(error)) from None
        self.space_limit.start()
        for batcher in self._batchers:
            batcher.start()
        live = {node.boot for node in await self.cluster.list_nodes()}
        await self._session_owner.enter(live)
        with suppress(StoreUnavailable, DuplicateKeyError):
            await ledger.carry_forward(self._client)
        for boot in await list_delivering_boots(self._client):
            if boot not in live:
                await release_delivered(self._client, boot)

    @operation
    async def close(self) -> None:
        self.space_limit.stop()
        await gatherResults([batcher.drain() for batcher in self._batchers])
        await self._session_owner.leave()
        await self._client.close()

    @operation
    async def ping(self) -> None:
        """Write durably on a majority; fail while the database is full."""
        await self._client.write("ping", build_probe_write())
        if self.space_limit.fault_description:
            raise StoreUnavailable

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
        return enqueued.addCallback(lambda results: results[0])

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        outcomes: dict[int, EnqueueResult | MediatorError] = {}
        unreported: list[int] = []

        def take(result: list[EnqueueResult] | Failure, place: int) -> None:
            outcomes[place] = _to_outcome(result)
            if early is not None and len(outcomes) < len(deposits):
                if not unreported:
                    # Results of one transaction arrive together, and are reported together.
                    self._clock.callLater(0, report, early)
                unreported.append(place)

        def report(early: EarlyResultCallback) -> None:
            places = unreported.copy()
            unreported.clear()
            if len(outcomes) < len(deposits):
                early([(place, outcomes[place]) for place in places])

        enqueued = [self.enqueue_all([one]).addBoth(take, place) for place, one in enumerate(deposits)]
        return gatherResults(enqueued).addCallback(lambda _: [outcomes[place] for place in range(len(deposits))])

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        # With a skewed clock messages would expire too early, or not be found by their recipient.
        if self._clocks.is_skewed or self.space_limit.refuses("enqueue"):
            return fail(StoreUnavailable())
        if not self._enqueue_batch.is_possible(deposits):
            return fail(PayloadTooLarge())
        dids = {one.recipient_did for one in deposits}
        keys = {*dids, *filter(None, map(self._owner_cache.get, dids))}
        size = sum([len(payload.data) for one in deposits for payload in one.payloads])
        work = EnqueueWork(deposits, self._clock.seconds())
        enqueued = self._batcher.submit("enqueue", self._enqueue_batch, work, keys, size)
        return enqueued.addErrback(self._handle_unknown_recipient, dids)

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        known = filter_valid_ids(ids)
        self._recent.forget(known)
        return self._batcher.submit("mark_delivered", mark_delivered, (known, node), frozenset(known))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        known = filter_valid_ids(ids)
        return self._batcher.submit("mark_pending", mark_pending, known, frozenset(known))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._remove("remove", filter_valid_ids(ids), None)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._remove("acknowledge", filter_valid_ids(ids), account)

    def _remove(self, name: str, ids: Sequence[str], account: str | None) -> Deferred[list[RemovedMessage]]:
        request = RemovalRequest(ids, account, self._clock.seconds())
        keys = frozenset(ids) if account is None else {account, *ids}
        return self._batcher.submit(name, self._removal_batch, request, keys, request.size)

    def acknowledge_each(
        self, requests: Sequence[AcknowledgementRequest]
    ) -> Deferred[list[AcknowledgementResult | MediatorError]]:
        acknowledged = [Deferred.fromCoroutine(self._acknowledge_one(request)) for request in requests]
        return gatherResults([one.addErrback(_to_error) for one in acknowledged])

    async def _acknowledge_one(self, request: AcknowledgementRequest) -> AcknowledgementResult:
        result = AcknowledgementResult(await self.acknowledge(request.account, request.ids))
        if request.with_status:
            # What was removed has to be reported in any case.
            try:
                result.status = await self.get_queue_status(request.account, None)
            except StoreUnavailable:
                pass
            except Exception:
                _log.failure("reading the status of a queue failed", redact_failure())
        return result

    @operation
    async def expire_messages(self, limit: int) -> list[RemovedMessage]:
        return await self._removal_batch.expire(self._client, self._clocks, self._clock.seconds(), limit)

    def get_buffered(self) -> tuple[int, int]:
        waiting = [batcher.held for batcher in self._batchers]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        request = NonceClaimRequest(key, until, self._clock.seconds(), share)
        return self._claim_batcher.submit("claim", self._nonce_claims.claim, request, [key])

    @operation
    async def release_nonce(self, key: bytes) -> None:
        await self._nonce_claims.release(key)

    @operation
    async def prune_nonces(self) -> int:
        """Delete expired nonces and registrations, and carry the ledger forward."""
        pruned = await self._nonces.prune(self._clock.seconds())
        await self._decentrl.drop_expired_registrations()
        await ledger.carry_forward(self._client)
        return pruned

    def _handle_unknown_recipient(self, failure: Failure, dids: set[str]) -> Failure:
        if failure.check(UnknownRecipient):
            self._owner_cache.forget(dids)
        return failure


def _to_outcome(result: list[EnqueueResult] | Failure) -> EnqueueResult | MediatorError:
    return _to_error(result) if isinstance(result, Failure) else result[0]


def _to_error(failure: Failure) -> MediatorError:
    """The outcome of an operation that failed, while others of the same call may have succeeded."""
    if isinstance(failure.value, MediatorError):
        return failure.value.with_traceback(None)
    _log.failure("changing the store failed", redact_failure(failure))
    return InternalFault()
