"""A store in MongoDB."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import MediatorError, RecipientUnknown, StoreUnavailable, TooLarge
from mediatord.interfaces import (
    Account,
    AccountUsage,
    Action,
    Arrival,
    Backlog,
    Books,
    Deposit,
    Deposited,
    EarlyOutcomes,
    ExpiredAccount,
    IClusterStore,
    IStore,
    Payload,
    QueueLimits,
    QueueStatus,
    Removed,
    StoredMessage,
    StoreStatistics,
    UpdateResult,
    Waiting,
    Window,
)
from mediatord.interfaces.decentrl import Caps, IDecentrlStore
from mediatord.interfaces.store import Fault
from mediatord.protocol.canonical_did import canonical_did
from mediatord.store.batches import Bounds
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.each import one_by_one
from mediatord.store.mongo import accounts, backlog, books, cluster_schema, decentrl_schema, queues, sizes
from mediatord.store.mongo.aftermath import Aftermath, Tell
from mediatord.store.mongo.clocks import Clocks
from mediatord.store.mongo.cluster import MongoCluster
from mediatord.store.mongo.collections import COLLECTIONS, MIGRATIONS
from mediatord.store.mongo.decentrl import MongoDecentrl
from mediatord.store.mongo.deposits import Depositing
from mediatord.store.mongo.duplicates import begin, retried
from mediatord.store.mongo.gathering import Gathering
from mediatord.store.mongo.marks import Pushed, delivered_by, mark_delivered, mark_pending, release_delivered
from mediatord.store.mongo.messages_by_id import FindingMessages
from mediatord.store.mongo.names import NameBook
from mediatord.store.mongo.nonces import Claim, Claiming, Nonces, Releases
from mediatord.store.mongo.owners import Entry
from mediatord.store.mongo.ownership import Ownership
from mediatord.store.mongo.queue_finder import QueueFinder
from mediatord.store.mongo.queues import Queues, TakingDue
from mediatord.store.mongo.readers import Readers
from mediatord.store.mongo.removals import Removal, Removing
from mediatord.store.mongo.rows import Order
from mediatord.store.mongo.schema import Migration, Schema
from mediatord.store.mongo.server import Server, Transaction
from mediatord.store.mongo.space_quota import SpaceQuota
from mediatord.store.mongo.transactions import Work
from mediatord.store.texts import storable

T = TypeVar("T")

# Batches of writes, and of claims, that are under way at a time, and works in each: smaller ones cost a server more,
# larger ones are done by one of its threads while the others have nothing to do.
_AT_ONCE = 3
_CLAIMS_AT_ONCE = 2
_BOUNDS = Bounds(batch=32, waiting=5_000)


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
        server: Server,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: Caps = Caps(),  # noqa: B008  it is frozen
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        on_fault: Callable[[Fault, bool], None] = lambda fault, present: None,
        max_nonces: int = 1_000_000,
        migrations: Sequence[Migration] = (),
        tell: Tell = lambda removed: None,
        tell_events: Tell = lambda removed: None,
    ) -> None:
        self._server = server
        self._clock = clock
        collections = (*COLLECTIONS, *decentrl_schema.COLLECTIONS, *cluster_schema.COLLECTIONS)
        self._schema = Schema(collections, (*MIGRATIONS, *migrations))
        self._gathering = Gathering(server, at_once=_AT_ONCE, bounds=_BOUNDS)
        self._claims = Gathering(server, at_once=_CLAIMS_AT_ONCE, bounds=_BOUNDS)
        self._entry = Entry(server)
        self._book = book = NameBook()
        self._queues = Queues(book)
        aftermath = Aftermath(tell)
        self._depositing = Depositing(limits, QueueFinder(), aftermath)
        self._removing = Removing(book, aftermath)
        self._nonces = Nonces(server, max_nonces)
        self._releases = Releases(server)
        self._claiming = Claiming(self._nonces, self._releases)
        self._ownership = Ownership(server)
        self._readers = Readers(server)
        self._clocks = Clocks(server)
        self.space_quota = SpaceQuota(server, space_limits, on_fault)
        self._decentrl = MongoDecentrl(
            server, clock, caps, self._nonces, self._clocks, Aftermath(tell_events), self.space_quota.refuses
        )
        self.decentrl: IDecentrlStore = self._decentrl
        self.cluster: IClusterStore = MongoCluster(server, self._clocks)

    def open(self) -> Deferred[None]:
        return begin(self._open())

    def close(self) -> Deferred[None]:
        return begin(self._close())

    @property
    def trouble(self) -> str:
        return self.space_quota.trouble

    def ping(self) -> Deferred[None]:
        """A write that a majority has on disk; fails while the database is full."""
        return begin(self._ping())

    def deposit(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[Deposited]:
        deposited = self.deposit_all([Deposit(recipient_did, tuple(payloads), expires_at, due_at, origin)])
        return deposited.addCallback(lambda one: one[0])

    def deposit_each(
        self, deposits: Sequence[Deposit], early: EarlyOutcomes | None = None
    ) -> Deferred[list[Deposited | MediatorError]]:
        return one_by_one(self._clock, self.deposit, deposits, early)

    def deposit_all(self, deposits: Sequence[Deposit]) -> Deferred[list[Deposited]]:
        # With clocks that differ it would expire too early, or not be found where its recipient is.
        if self._clocks.differ or self.space_quota.refuses("deposit"):
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        orders = [
            Order(one.recipient_did, one.payloads, now, one.expires_at, one.due_at, one.origin) for one in deposits
        ]
        if not self._depositing.possible(orders):
            return fail(TooLarge())
        dids = {one.recipient_did for one in deposits}
        keys = {*dids, *filter(None, map(self._ownership.known, dids))}
        size = sum([len(payload.data) for one in deposits for payload in one.payloads])
        deposited = self._gathering.submit("deposit", self._depositing, orders, keys, size)
        return deposited.addErrback(self._not_deposited, dids)

    def fetch(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        if self._clocks.differ:
            return fail(StoreUnavailable())  # what waits would seem to have expired
        now = self._clock.seconds()

        def fetch(t: Transaction) -> Awaitable[list[StoredMessage]]:
            return self._queues.fetch(t, account, recipient_did, now, limit, max_bytes)

        return self._readers.read("fetch", account, _for_any(limit, fetch))

    def status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        if self._clocks.differ:
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        return self._readers.read("status", account, lambda t: queues.status(t, account, recipient_did, now))

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        if self._clocks.differ:
            return fail(StoreUnavailable())
        known = storable(ids)
        if not known:
            return self._limited("find", 0, _nothing)
        finding = FindingMessages(self._queues, self._book, known, self._clock.seconds())
        return begin(self._server.operate("find", finding))

    def arrived(self, accounts: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        dids = tuple(accounts)
        return self._limited("arrived", limit, lambda t: queues.arrived(t, dids, window, limit))

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        pushed = Pushed(storable(ids), node)
        return self._gathering.submit("mark_delivered", mark_delivered, pushed, frozenset(pushed.ids))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        known = storable(ids)
        return self._gathering.submit("mark_pending", mark_pending, known, frozenset(known))

    def remove(self, ids: Sequence[str]) -> Deferred[list[Removed]]:
        removal = Removal(storable(ids), None, self._clock.seconds())
        return self._gathering.submit("remove", self._removing, removal, frozenset(removal.ids), removal.size)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        removal = Removal(storable(ids), account, self._clock.seconds())
        keys = {account, *removal.ids}
        return self._gathering.submit("acknowledge", self._removing, removal, keys, removal.size)

    def expire(self, limit: int) -> Deferred[list[Removed]]:
        return begin(self._removing.expire(self._server, self._clock.seconds(), limit))

    def next_due(self) -> Deferred[float | None]:
        return begin(queues.next_due(self._server, self._clock.seconds()))

    def take_due(self, limit: int) -> Deferred[list[StoredMessage]]:
        if self._clocks.differ:
            return fail(StoreUnavailable())  # who knows what is due
        now = self._clock.seconds()
        taking = TakingDue(self._queues, self._clocks, now, limit)
        return begin(retried(lambda: self._server.transact("take_due", taking, undo=taking.undo)))

    def table_sizes(self) -> Deferred[dict[str, int]]:
        return begin(sizes.table_sizes(self._server))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return begin(sizes.queue_sizes(self._server, top))

    def statistics(self, top: int) -> Deferred[StoreStatistics]:
        return begin(sizes.statistics(self._server, top))

    def ledger(self) -> Deferred[Books]:
        return begin(books.ledger(self._server))

    def waiting(self) -> Deferred[Waiting]:
        return begin(sizes.waiting(self._server))

    def backlog(self, bounds: Sequence[float], top: int) -> Deferred[Backlog]:
        return begin(backlog.backlog(self._server, tuple(bounds), top))

    def account(self, did: str) -> Deferred[Account | None]:
        return begin(accounts.account(self._server, did))

    def grant(self, did: str) -> Deferred[Account]:
        if self.space_quota.refuses("grant"):
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        return self._transact("grant", lambda t: accounts.grant(t, did, now))

    def touch(self, did: str) -> Deferred[None]:
        return begin(accounts.touch(self._server, did, self._clock.seconds()))

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        return begin(self._expire_accounts(limit, unused_before, idle_before))

    async def _expire_accounts(
        self, limit: int, unused_before: float | None, idle_before: float | None
    ) -> list[ExpiredAccount]:
        before = {"unused": unused_before or 0.0, "idle": idle_before or 0.0}
        expired: list[ExpiredAccount] = []
        tried: set[str] = set()
        # An unused one for which something came is not fresh any more once it was tried, and makes room for others.
        while not expired:
            found = await accounts.candidates(self._server, limit, unused_before, idle_before)
            if all(did in tried for did, _ in found):
                break
            for did, reason in found:
                tried.add(did)
                expiring = partial(accounts.expire, did=did, reason=reason, before=before[reason])
                gone = await self._transact("expire_accounts", expiring)
                if gone is not None:
                    expired.append(gone)
        if expired:
            self._ownership.clear()
        return expired

    def account_usage(self) -> Deferred[AccountUsage]:
        return begin(accounts.usage(self._server))

    def mark_draft03(self, did: str) -> Deferred[None]:
        return begin(accounts.mark_draft03(self._server, did))

    def owner(self, recipient_did: str) -> Deferred[str | None]:
        """Answered from memory if it was asked lately."""
        return self._ownership.owner(canonical_did(recipient_did))

    def spellings(self, recipient_did: str) -> Deferred[list[str]]:
        return begin(accounts.spellings(self._server, recipient_did))

    def held(self) -> tuple[int, int]:
        waiting = [each.held for each in (self._gathering, self._claims)]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def update(
        self, account: str, updates: Sequence[tuple[str, Action]], *, max_recipients: int
    ) -> Deferred[list[UpdateResult]]:
        wanted = tuple(updates)
        if self.space_quota.refuses("update", shrinking=all(action == "remove" for _, action in wanted)):
            return fail(StoreUnavailable())
        updated = self._transact("update", lambda t: accounts.update(t, account, wanted, max_recipients))
        return updated.addBoth(self._forget_owners, [canonical_did(name) for name, _ in wanted])

    def recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._read("recipients", lambda t: accounts.recipients(t, account, offset, limit))

    def move(self, prior: str, new: str) -> Deferred[bool]:
        if self.space_quota.refuses("move"):
            return fail(StoreUnavailable())
        return self._transact("move", lambda t: accounts.move(t, prior, new)).addBoth(self._clear_owners)

    def is_retired(self, did: str) -> Deferred[bool]:
        return begin(accounts.is_retired(self._server, did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        if self.space_quota.refuses("remember_did"):
            return fail(StoreUnavailable())
        return begin(accounts.remember_did(self._server, short, long))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return begin(accounts.recall_did(self._server, short))

    def claim(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._claims.submit("claim", self._claiming, Claim(key, until, self._clock.seconds(), share), [key])

    def release(self, key: bytes) -> Deferred[None]:
        return begin(self._release(key))

    async def _release(self, key: bytes) -> None:
        self._nonces.released(await self._releases.release(key))

    def prune(self) -> Deferred[int]:
        """Registrations that have expired go as well."""
        return begin(self._prune(self._clock.seconds()))

    async def _open(self) -> None:
        await self._server.open(lambda operations: self._schema.prepare(operations, self._server.clock))
        self.space_quota.start()
        self._gathering.start()
        self._claims.start()
        live = {node.boot for node in await self.cluster.nodes()}
        await self._entry.enter(live)
        await books.begin(self._server)
        for boot in await delivered_by(self._server):
            if boot not in live:
                await release_delivered(self._server, boot)

    async def _ping(self) -> None:
        await self._server.beat("ping")
        if self.space_quota.trouble:
            raise StoreUnavailable

    async def _close(self) -> None:
        self.space_quota.stop()
        await gatherResults([self._gathering.drain(), self._claims.drain()])
        await self._entry.leave()
        await self._server.close()

    async def _prune(self, now: float) -> int:
        pruned = await self._nonces.prune(now)
        await self._decentrl.drop_expired_registrations()
        await books.carry_forward(self._server)
        return pruned

    def _transact(self, name: str, work: Work[T]) -> Deferred[T]:
        return begin(retried(lambda: self._server.transact(name, work)))

    def _read(self, name: str, work: Work[T]) -> Deferred[T]:
        return begin(self._server.transact(name, work, reading=True))

    def _limited(self, name: str, limit: int, work: Work[list[T]]) -> Deferred[list[T]]:
        """For nothing at all, only whether anybody could be asked."""
        return self._read(name, _for_any(limit, work))

    def _not_deposited(self, failure: Failure, dids: set[str]) -> Failure:
        if failure.check(RecipientUnknown):
            self._ownership.forget(dids)
        return failure

    def _forget_owners(self, result: T, dids: Sequence[str]) -> T:
        self._ownership.forget(dids)
        return result

    def _clear_owners(self, result: T) -> T:
        self._ownership.clear()
        return result


def _for_any(limit: int, work: Work[list[T]]) -> Work[list[T]]:
    return work if limit > 0 else _nothing


async def _nothing(_: object) -> list[Any]:
    return []
