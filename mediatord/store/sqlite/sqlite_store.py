"""
The cluster side of the store in one SQLite file, for several processes on one host.

A store in one SQLite file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import MediatorError, StoreUnavailable, UnknownRecipient
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.store.caches import OWNER_CACHE_CAPACITY, OwnerCache
from mediatord.store.interfaces.accounts import (
    Account,
    AccountUsage,
    ExpiredAccount,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import ClusterJoinError, ClusterNode, IClusterStore, PresenceRecord
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
from mediatord.store.message_operations import OperationObserver, ignore_observation
from mediatord.store.quotas import SpaceLimits
from mediatord.store.recipient_names import filter_valid_ids
from mediatord.store.sqlite import (
    account_queries,
    coordination_queries,
    decentrl_queries,
    message_queries,
    message_writes,
    queue_accounting,
)
from mediatord.store.sqlite.administration import SQLiteStoreAdministration
from mediatord.store.sqlite.decentrl_store import SQLiteDecentrlStore, estimate_items_bytes
from mediatord.store.sqlite.executor import SQLiteExecutor, SQLiteRunners, SQLiteTuning, TableSizeEstimator
from mediatord.store.sqlite.group_commit import OperationOutcome


@implementer(IClusterStore)
class SQLiteClusterStore:
    """Leases are compared by the clock of the host. Its many methods are those of the interface."""

    def __init__(self, file: SQLiteExecutor, clock: IReactorTime) -> None:
        self._file = file
        self._clock = clock

    def join(self, node: ClusterNode, lease: float) -> Deferred[None]:
        now = self._clock.seconds()
        joined = self._file.write("join", lambda c: coordination_queries.join_node(c, node, now + lease, now))
        return joined.addCallback(_raise_join_error)

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._file.write("renew", lambda c: coordination_queries.renew_node(c, boot, now + lease, now))

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        over = max(until, self._clock.seconds())
        return self._file.write("drop", lambda c: coordination_queries.drop_node(c, boot, over))

    def list_nodes(self) -> Deferred[list[ClusterNode]]:
        now = self._clock.seconds()
        return self._file.read("nodes", lambda c: coordination_queries.list_nodes(c, now))

    def list_lapsed_nodes(self) -> Deferred[list[str]]:
        now = self._clock.seconds()
        return self._file.read("lapsed", lambda c: coordination_queries.list_lapsed_nodes(c, now))

    def add_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        present = tuple(dids)
        return self._file.write("announce", lambda c: coordination_queries.add_presence(c, boot, present))

    def remove_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        gone = tuple(dids)
        return self._file.write("withdraw", lambda c: coordination_queries.remove_presence(c, boot, gone))

    def find_presence(self, dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        now, wanted = self._clock.seconds(), tuple(dids)
        return self._file.read("whereabouts", lambda c: coordination_queries.find_presence(c, wanted, now))

    def acquire_lease(self, lease_name: str, boot: str, lease: float) -> Deferred[bool]:
        now = self._clock.seconds()
        return self._file.write(
            "hold", lambda c: coordination_queries.acquire_lease(c, lease_name, boot, now + lease, now)
        )

    def take_quota(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        now = self._clock.seconds()
        return self._file.write("take", lambda c: coordination_queries.take_quota(c, key, amount, limit, period, now))

    def return_quota(self, key: bytes, amount: int) -> Deferred[None]:
        return self._file.write("put_back", lambda c: coordination_queries.return_quota(c, key, amount))

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        now, got = self._clock.seconds(), filter_valid_ids(ids)
        return self._file.write(
            "record_pickups", lambda c: coordination_queries.record_pickups(c, got, now + period, now)
        )

    def find_picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        now, wanted = self._clock.seconds(), filter_valid_ids(ids)
        return self._file.read("picked_up", lambda c: coordination_queries.find_picked_up(c, wanted, now))

    def prune(self, after: bytes | None = None) -> Deferred[None]:
        """Forget allowances that count no more, in slices, between which others write."""
        now = self._clock.seconds()

        def go_on(last: bytes | None) -> Deferred[None]:
            return succeed(None) if last is None else self.prune(last)

        return self._file.write("prune", lambda c: coordination_queries.prune_quotas(c, now, after)).addCallback(
            go_on
        )


def _raise_join_error(refusal: ClusterJoinError | None) -> None:
    if refusal is not None:
        raise refusal


T = TypeVar("T")
R = TypeVar("R")

# Of messages that go in one transaction because they have expired: nobody can write meanwhile.
EXPIRY_BATCH_MESSAGES = 64
EXPIRY_BATCH_BYTES = 1_048_576
# Seconds for which an account is remembered: an operator may have removed it.
ACCOUNT_CACHE_SECONDS = 60.0


@implementer(IStore)
class SQLiteStore:
    """
    Writes that are asked for at the same time are committed together, durably, before their Deferreds fire.
    SQL never runs in the reactor's thread. Its many methods are those of the interface.

    :param shared: whether other processes work on the file, so that nothing is to be remembered of it.
    :param observe: told what each operation took from being asked for to being done, and each commit and
        checkpoint alone, in seconds.
    :param create: whether to make the file if it is not there.
    :param on_fault: told of what is wrong with the file when that begins and ends.
    """

    def __init__(
        self,
        path: Path,
        clock: IReactorTime,
        limits: QueueLimits,
        runners: SQLiteRunners,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        shared: bool = False,
        create: bool = True,
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        observe: OperationObserver = ignore_observation,
        on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
        tuning: SQLiteTuning = SQLiteTuning(),  # noqa: B008  it is frozen
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._max_nonces = tuning.max_nonces
        self._file = SQLiteExecutor(
            path,
            clock,
            runners,
            observe,
            tuning,
            shared=shared,
            create=create,
            space_limits=space_limits,
            on_fault=on_fault,
        )
        capacity = 0 if shared else OWNER_CACHE_CAPACITY
        self._owners: OwnerCache[str] = OwnerCache(capacity)
        self._accounts: OwnerCache[Account] = OwnerCache(
            capacity, now=clock.seconds, lifetime=ACCOUNT_CACHE_SECONDS, length=lambda account: len(account.did)
        )
        self._write = self._file.write
        self._read = self._file.read
        self._decentrl = SQLiteDecentrlStore(self._file, clock, caps, tuning.max_nonces)
        self.decentrl: IDecentrlStore = self._decentrl
        self._sizes = TableSizeEstimator()
        self._cluster = SQLiteClusterStore(self._file, clock)
        self.cluster: IClusterStore = self._cluster
        self.administration: IStoreAdministration = SQLiteStoreAdministration(
            self._file, lambda: self._forget_all(None)
        )

    def open(self) -> Deferred[None]:
        self._decentrl.opened()
        return self._file.open()

    def close(self) -> Deferred[None]:
        return self._file.close()

    @property
    def trouble(self) -> str:
        return self._file.health.trouble

    def table_sizes(self) -> Deferred[dict[str, int]]:
        return self._file.survey("table_sizes", self._sizes.measure)

    def ping(self) -> Deferred[None]:
        """A write and a read, so that a full disk and a stuck thread show."""
        if self._file.health.faults:
            self._file.health.check()
        if self._file.health.faults:
            return fail(StoreUnavailable())
        return self._write("ping", coordination_queries.write_ping).addCallback(
            lambda _: self._read("ping", coordination_queries.read_ping)
        )

    def enqueue(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        now = self._clock.seconds()
        order = message_writes.TimedEnqueueRequest(recipient_did, tuple(payloads), now, expires_at, due_at, origin)
        enqueued = self._write("enqueue", message_writes.EnqueueOperation(order, self._limits), order.size)
        return enqueued.addErrback(self._not_enqueued, recipient_did)

    def enqueue_each(
        self, deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        orders, limits = self._build_requests(deposits), self._limits
        works = [(message_writes.EnqueueOperation(order, limits), order.size) for order in orders]

        def tell(place: int, outcomes: list[OperationOutcome]) -> None:
            assert early is not None
            done = self._to_results(outcomes, deposits[place : place + len(outcomes)])
            early(list(enumerate(done, place)))

        enqueued = self._file.write_each("enqueue", works, tell if early else None)
        return enqueued.addCallback(self._to_results, deposits)

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        orders = self._build_requests(deposits)
        size = sum([order.size for order in orders])
        enqueued = self._write("enqueue", lambda c: message_writes.enqueue_all(c, self._limits, orders), size)
        for one in deposits:
            enqueued.addErrback(self._not_enqueued, one.recipient_did)
        return enqueued

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        now = self._clock.seconds()
        fetching = partial(
            message_queries.fetch_messages,
            account=account,
            recipient_did=recipient_did,
            now=now,
            limit=limit,
            max_bytes=max_bytes,
        )
        return self._read("fetch", fetching, max_bytes)

    def get_queue_status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        now = self._clock.seconds()
        return self._read("status", lambda c: message_queries.get_queue_status(c, account, recipient_did, now))

    def find_messages(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        wanted, now = filter_valid_ids(ids), self._clock.seconds()
        return self._read(
            "find", lambda c: message_queries.find_messages(c, wanted, now), estimate_items_bytes(len(wanted))
        )

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        dids = tuple(accounts)
        return self._read("arrived", lambda c: message_queries.find_arrivals(c, dids, window, limit))

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._write("mark_delivered", message_writes.MarkDeliveredOperation(filter_valid_ids(ids), node))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        pending = filter_valid_ids(ids)
        return self._write("mark_pending", lambda c: message_writes.mark_pending(c, pending))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._take_out("remove", filter_valid_ids(ids), None)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        received = filter_valid_ids(ids)
        digests = message_queries.parse_digests(received)
        if not digests:
            return self._take_out("acknowledge", received, account)
        found = self._find_digests(account, digests, -1, [])
        return found.addCallback(lambda more: self._take_out("acknowledge", (*received, *more), account))

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        """In slices, between which others write."""
        return self._expire(max(limit, 0), [])

    def find_next_due(self) -> Deferred[float | None]:
        now = self._clock.seconds()
        return self._read("next_due", lambda c: message_queries.find_next_due(c, now))

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        now = self._clock.seconds()
        return self._write("take_due", lambda c: message_queries.take_due_messages(c, now, limit))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return self._file.survey("queue_sizes", lambda c: message_queries.find_largest_queues(c, top))

    def read_statistics(self, top: int) -> Deferred[StoreStatistics]:
        return self._file.survey("statistics", lambda c: message_queries.collect_statistics(c, top))

    def get_queue_totals(self) -> Deferred[QueueTotals]:
        return self._file.survey("waiting", message_queries.sum_queues)

    def read_ledger(self) -> Deferred[StoreLedger]:
        return self._file.survey("ledger", queue_accounting.read_ledger)

    def read_backlog(self, bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        times = tuple(bounds)
        return self._file.survey("backlog", lambda c: message_queries.collect_backlog(c, times, top))

    def get_account(self, did: str) -> Deferred[Account | None]:
        """Answered from memory if it was asked lately."""
        return self._known("account", account_queries.get_account, self._accounts, did)

    def grant(self, did: str) -> Deferred[Account]:
        now = self._clock.seconds()
        granted = self._write("grant", lambda c: account_queries.grant_account(c, did, now))
        return granted.addBoth(self._forget, self._accounts, [did])

    def record_contact(self, did: str) -> Deferred[None]:
        now = self._clock.seconds()
        touched = self._write("touch", lambda c: account_queries.touch_account(c, did, now))
        return touched.addBoth(self._forget, self._accounts, [did])

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        expiring = partial(
            account_queries.expire_accounts, limit=limit, unused_before=unused_before, idle_before=idle_before
        )
        return self._write("expire_accounts", expiring).addCallback(self._forget_expired)

    def get_account_usage(self) -> Deferred[AccountUsage]:
        return self._read("account_usage", account_queries.get_account_usage)

    def mark_draft03(self, did: str) -> Deferred[None]:
        marked = self._write("mark_draft03", lambda c: account_queries.mark_draft03(c, did))
        return marked.addBoth(self._forget, self._accounts, [did])

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        """Answered from memory if it was asked lately."""
        return self._known("owner", account_queries.find_owner, self._owners, canonicalize_did(recipient_did))

    def list_registered_names(self, recipient_did: str) -> Deferred[list[str]]:
        return self._read("spellings", lambda c: account_queries.list_spellings(c, recipient_did))

    def get_buffered(self) -> tuple[int, int]:
        return self._file.held

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        wanted = tuple(updates)
        removing = all(action == "remove" for _, action in wanted)
        work = partial(account_queries.update_recipients, did=account, updates=wanted, max_recipients=max_recipients)
        updated: Deferred[list[RecipientUpdateResult]] = self._write("update", work, shrinking=removing)
        return updated.addBoth(self._forget, self._owners, [canonicalize_did(name) for name, _ in wanted])

    def list_recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._read("recipients", lambda c: account_queries.list_recipients(c, account, offset, limit))

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        moved = self._write("move", lambda c: account_queries.move_account(c, prior, new))
        return moved.addBoth(self._forget_all)

    def is_retired(self, did: str) -> Deferred[bool]:
        return self._read("is_retired", lambda c: account_queries.is_retired(c, did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        return self._write("remember_did", lambda c: account_queries.remember_did(c, short, long))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return self._read("recall_did", lambda c: account_queries.recall_did(c, short))

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        claim = coordination_queries.NonceClaim(key, until, self._clock.seconds(), share)
        return self._write("claim", coordination_queries.NonceClaimOperation(claim, self._max_nonces))

    def release_nonce(self, key: bytes) -> Deferred[None]:
        return self._write("release", lambda c: coordination_queries.release_nonce(c, key))

    def prune_nonces(self) -> Deferred[int]:
        """In slices, between which others write; registrations and allowances that are over go as well."""
        return self._cluster.prune().addCallback(lambda _: self._prune_nonces(0, 0))

    def _prune_nonces(self, after: int, pruned: int) -> Deferred[int]:
        now = self._clock.seconds()

        def go_on(done: tuple[int, int | None]) -> Deferred[int]:
            gone, last = done
            if last is None:
                return self._prune_registrations(pruned + gone)
            return self._prune_nonces(last, pruned + gone)

        return self._write("prune", lambda c: coordination_queries.prune_nonces(c, now, after)).addCallback(go_on)

    def _prune_registrations(self, pruned: int) -> Deferred[int]:
        now = self._clock.seconds()

        def go_on(gone: int) -> Deferred[int]:
            more = gone == decentrl_queries.REGISTRATIONS_PER_PRUNE
            return self._prune_registrations(pruned) if more else succeed(pruned)

        return self._write("prune", lambda c: decentrl_queries.drop_expired_registrations(c, now)).addCallback(go_on)

    def _build_requests(self, deposits: Sequence[EnqueueRequest]) -> list[message_writes.TimedEnqueueRequest]:
        now, order = self._clock.seconds(), message_writes.TimedEnqueueRequest
        return [
            order(one.recipient_did, one.payloads, now, one.expires_at, one.due_at, one.origin) for one in deposits
        ]

    def _take_out(self, name: str, ids: Sequence[str], account: str | None) -> Deferred[list[RemovedMessage]]:
        return self._write(name, message_writes.RemoveOperation(ids, account, self._clock.seconds()))

    def _find_digests(
        self, account: str, digests: Sequence[bytes], after: int, found: list[str]
    ) -> Deferred[list[str]]:
        def go_on(part: message_queries.DigestMatches) -> Deferred[list[str]]:
            found.extend(part.ids)
            return succeed(found) if part.after is None else self._find_digests(account, digests, part.after, found)

        return self._read(
            "acknowledge", lambda c: message_queries.find_by_digest(c, account, digests, after)
        ).addCallback(go_on)

    def _expire(self, limit: int, expired: list[RemovedMessage]) -> Deferred[list[RemovedMessage]]:
        now, some = self._clock.seconds(), min(limit - len(expired), EXPIRY_BATCH_MESSAGES)

        def go_on(removed: list[RemovedMessage]) -> Deferred[list[RemovedMessage]]:
            expired.extend(removed)
            return self._expire(limit, expired) if removed and len(expired) < limit else succeed(expired)

        sweeping = partial(message_writes.expire_messages, now=now, limit=some, max_bytes=EXPIRY_BATCH_BYTES)
        return self._write("expire", sweeping).addCallback(go_on)

    def _to_results(
        self, outcomes: list[OperationOutcome], deposits: Sequence[EnqueueRequest]
    ) -> list[EnqueueResult | MediatorError]:
        for outcome, one in zip(outcomes, deposits, strict=True):
            if isinstance(outcome.error, UnknownRecipient):
                self._owners.forget([one.recipient_did])
        return [outcome.value if outcome.error is None else outcome.error for outcome in outcomes]

    def _not_enqueued(self, failure: Failure, recipient_did: str) -> Failure:
        if failure.check(UnknownRecipient):
            self._owners.forget([recipient_did])
        return failure

    def _known(
        self, name: str, ask: Callable[[Connection, str], T | None], known: OwnerCache[T], did: str
    ) -> Deferred[T | None]:
        if not self._file.is_readable:
            return fail(StoreUnavailable())
        answer = known.get(did)
        if answer is not None:
            return succeed(answer)
        return self._read(name, lambda c: ask(c, did)).addCallback(self._keep, known, did, known.age)

    def _keep(self, answer: T | None, known: OwnerCache[T], did: str, age: int) -> T | None:
        known.keep(did, answer, age)
        return answer

    def _forget(self, result: R, known: OwnerCache[Any], dids: Sequence[str]) -> R:
        known.forget(dids)
        return result

    def _forget_expired(self, expired: list[ExpiredAccount]) -> list[ExpiredAccount]:
        return self._forget_all(expired) if expired else expired

    def _forget_all(self, result: R) -> R:
        self._owners.clear()
        self._accounts.clear()
        return result
