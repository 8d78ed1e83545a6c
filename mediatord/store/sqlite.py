"""A store in one SQLite file."""

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

from mediatord.errors import MediatorError, RecipientUnknown, StoreUnavailable
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
from mediatord.store import (
    sql_accounts,
    sql_arrivals,
    sql_backlog,
    sql_contracts,
    sql_deposits,
    sql_digests,
    sql_ledger,
    sql_messages,
    sql_nonces,
    sql_queues,
)
from mediatord.store.batches import Observer, unobserved
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.group_commit import Outcome
from mediatord.store.owners import CAPACITY, Owners
from mediatord.store.sqlite_cluster import SQLiteCluster
from mediatord.store.sqlite_decentrl import SQLiteDecentrl, slice_bytes
from mediatord.store.sqlite_file import Runners, SQLiteFile, Tuning
from mediatord.store.table_sizes import TableSizes
from mediatord.store.texts import storable

T = TypeVar("T")
R = TypeVar("R")

# Of messages that go in one transaction because they have expired: nobody can write meanwhile.
EXPIRED_AT_A_TIME = 64
EXPIRED_BYTES = 1_048_576
# Seconds for which an account is remembered: an operator may have removed it.
ACCOUNT_LIFETIME = 60.0


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
        runners: Runners,
        *,
        caps: Caps = Caps(),  # noqa: B008  it is frozen
        shared: bool = False,
        create: bool = True,
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        observe: Observer = unobserved,
        on_fault: Callable[[Fault, bool], None] = lambda fault, present: None,
        tuning: Tuning = Tuning(),  # noqa: B008  it is frozen
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._max_nonces = tuning.max_nonces
        self._file = SQLiteFile(
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
        capacity = 0 if shared else CAPACITY
        self._owners: Owners[str] = Owners(capacity)
        self._accounts: Owners[Account] = Owners(
            capacity, now=clock.seconds, lifetime=ACCOUNT_LIFETIME, length=lambda account: len(account.did)
        )
        self._write = self._file.write
        self._read = self._file.read
        self._decentrl = SQLiteDecentrl(self._file, clock, caps, tuning.max_nonces)
        self.decentrl: IDecentrlStore = self._decentrl
        self._sizes = TableSizes()
        self._cluster = SQLiteCluster(self._file, clock)
        self.cluster: IClusterStore = self._cluster

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
        return self._write("ping", sql_nonces.ping).addCallback(lambda _: self._read("ping", sql_nonces.pong))

    def deposit(
        self,
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[Deposited]:
        now = self._clock.seconds()
        order = sql_messages.Deposit(recipient_did, tuple(payloads), now, expires_at, due_at, origin)
        deposited = self._write("deposit", sql_deposits.Depositing(order, self._limits), order.size)
        return deposited.addErrback(self._not_deposited, recipient_did)

    def deposit_each(
        self, deposits: Sequence[Deposit], early: EarlyOutcomes | None = None
    ) -> Deferred[list[Deposited | MediatorError]]:
        orders, limits = self._orders(deposits), self._limits
        works = [(sql_deposits.Depositing(order, limits), order.size) for order in orders]

        def tell(place: int, outcomes: list[Outcome]) -> None:
            assert early is not None
            done = self._deposited(outcomes, deposits[place : place + len(outcomes)])
            early(list(enumerate(done, place)))

        deposited = self._file.write_each("deposit", works, tell if early else None)
        return deposited.addCallback(self._deposited, deposits)

    def deposit_all(self, deposits: Sequence[Deposit]) -> Deferred[list[Deposited]]:
        orders = self._orders(deposits)
        size = sum([order.size for order in orders])
        deposited = self._write("deposit", lambda c: sql_deposits.deposit_all(c, self._limits, orders), size)
        for one in deposits:
            deposited.addErrback(self._not_deposited, one.recipient_did)
        return deposited

    def fetch(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        now = self._clock.seconds()
        fetching = partial(
            sql_queues.fetch, account=account, recipient_did=recipient_did, now=now, limit=limit, max_bytes=max_bytes
        )
        return self._read("fetch", fetching, max_bytes)

    def status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        now = self._clock.seconds()
        return self._read("status", lambda c: sql_queues.status(c, account, recipient_did, now))

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        wanted, now = storable(ids), self._clock.seconds()
        return self._read("find", lambda c: sql_arrivals.find(c, wanted, now), slice_bytes(len(wanted)))

    def arrived(self, accounts: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        dids = tuple(accounts)
        return self._read("arrived", lambda c: sql_arrivals.arrived(c, dids, window, limit))

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._write("mark_delivered", sql_deposits.Marking(storable(ids), node))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        pending = storable(ids)
        return self._write("mark_pending", lambda c: sql_messages.mark_pending(c, pending))

    def remove(self, ids: Sequence[str]) -> Deferred[list[Removed]]:
        return self._take_out("remove", storable(ids), None)

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        received = storable(ids)
        digests = sql_digests.digests(received)
        if not digests:
            return self._take_out("acknowledge", received, account)
        found = self._find_digests(account, digests, -1, [])
        return found.addCallback(lambda more: self._take_out("acknowledge", (*received, *more), account))

    def expire(self, limit: int) -> Deferred[list[Removed]]:
        """In slices, between which others write."""
        return self._expire(max(limit, 0), [])

    def next_due(self) -> Deferred[float | None]:
        now = self._clock.seconds()
        return self._read("next_due", lambda c: sql_queues.next_due(c, now))

    def take_due(self, limit: int) -> Deferred[list[StoredMessage]]:
        now = self._clock.seconds()
        return self._write("take_due", lambda c: sql_queues.take_due(c, now, limit))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return self._file.survey("queue_sizes", lambda c: sql_queues.queue_sizes(c, top))

    def statistics(self, top: int) -> Deferred[StoreStatistics]:
        return self._file.survey("statistics", lambda c: sql_queues.statistics(c, top))

    def waiting(self) -> Deferred[Waiting]:
        return self._file.survey("waiting", sql_queues.waiting)

    def ledger(self) -> Deferred[Books]:
        return self._file.survey("ledger", sql_ledger.ledger)

    def backlog(self, bounds: Sequence[float], top: int) -> Deferred[Backlog]:
        times = tuple(bounds)
        return self._file.survey("backlog", lambda c: sql_backlog.backlog(c, times, top))

    def account(self, did: str) -> Deferred[Account | None]:
        """Answered from memory if it was asked lately."""
        return self._known("account", sql_accounts.account, self._accounts, did)

    def grant(self, did: str) -> Deferred[Account]:
        now = self._clock.seconds()
        granted = self._write("grant", lambda c: sql_accounts.grant(c, did, now))
        return granted.addBoth(self._forget, self._accounts, [did])

    def touch(self, did: str) -> Deferred[None]:
        now = self._clock.seconds()
        touched = self._write("touch", lambda c: sql_accounts.touch(c, did, now))
        return touched.addBoth(self._forget, self._accounts, [did])

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        expiring = partial(
            sql_accounts.expire_accounts, limit=limit, unused_before=unused_before, idle_before=idle_before
        )
        return self._write("expire_accounts", expiring).addCallback(self._forget_expired)

    def account_usage(self) -> Deferred[AccountUsage]:
        return self._read("account_usage", sql_accounts.usage)

    def mark_draft03(self, did: str) -> Deferred[None]:
        marked = self._write("mark_draft03", lambda c: sql_accounts.mark_draft03(c, did))
        return marked.addBoth(self._forget, self._accounts, [did])

    def owner(self, recipient_did: str) -> Deferred[str | None]:
        """Answered from memory if it was asked lately."""
        return self._known("owner", sql_accounts.owner, self._owners, canonical_did(recipient_did))

    def spellings(self, recipient_did: str) -> Deferred[list[str]]:
        return self._read("spellings", lambda c: sql_accounts.spellings(c, recipient_did))

    def held(self) -> tuple[int, int]:
        return self._file.held

    def update(
        self, account: str, updates: Sequence[tuple[str, Action]], *, max_recipients: int
    ) -> Deferred[list[UpdateResult]]:
        wanted = tuple(updates)
        removing = all(action == "remove" for _, action in wanted)
        work = partial(sql_accounts.update, did=account, updates=wanted, max_recipients=max_recipients)
        updated: Deferred[list[UpdateResult]] = self._write("update", work, shrinking=removing)
        return updated.addBoth(self._forget, self._owners, [canonical_did(name) for name, _ in wanted])

    def recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._read("recipients", lambda c: sql_accounts.recipients(c, account, offset, limit))

    def move(self, prior: str, new: str) -> Deferred[bool]:
        moved = self._write("move", lambda c: sql_accounts.move(c, prior, new))
        return moved.addBoth(self._forget_all)

    def is_retired(self, did: str) -> Deferred[bool]:
        return self._read("is_retired", lambda c: sql_accounts.is_retired(c, did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        return self._write("remember_did", lambda c: sql_accounts.remember_did(c, short, long))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return self._read("recall_did", lambda c: sql_accounts.recall_did(c, short))

    def claim(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        claim = sql_nonces.Claim(key, until, self._clock.seconds(), share)
        return self._write("claim", sql_nonces.Claiming(claim, self._max_nonces))

    def release(self, key: bytes) -> Deferred[None]:
        return self._write("release", lambda c: sql_nonces.release(c, key))

    def prune(self) -> Deferred[int]:
        """In slices, between which others write; registrations and allowances that are over go as well."""
        return self._cluster.prune().addCallback(lambda _: self._prune_nonces(0, 0))

    def _prune_nonces(self, after: int, pruned: int) -> Deferred[int]:
        now = self._clock.seconds()

        def go_on(done: tuple[int, int | None]) -> Deferred[int]:
            gone, last = done
            if last is None:
                return self._prune_registrations(pruned + gone)
            return self._prune_nonces(last, pruned + gone)

        return self._write("prune", lambda c: sql_nonces.prune(c, now, after)).addCallback(go_on)

    def _prune_registrations(self, pruned: int) -> Deferred[int]:
        now = self._clock.seconds()

        def go_on(gone: int) -> Deferred[int]:
            more = gone == sql_contracts.EXPIRED_AT_A_TIME
            return self._prune_registrations(pruned) if more else succeed(pruned)

        return self._write("prune", lambda c: sql_contracts.drop_expired_registrations(c, now)).addCallback(go_on)

    def _orders(self, deposits: Sequence[Deposit]) -> list[sql_messages.Deposit]:
        now, order = self._clock.seconds(), sql_messages.Deposit
        return [
            order(one.recipient_did, one.payloads, now, one.expires_at, one.due_at, one.origin) for one in deposits
        ]

    def _take_out(self, name: str, ids: Sequence[str], account: str | None) -> Deferred[list[Removed]]:
        return self._write(name, sql_deposits.Removing(ids, account, self._clock.seconds()))

    def _find_digests(
        self, account: str, digests: Sequence[bytes], after: int, found: list[str]
    ) -> Deferred[list[str]]:
        def go_on(part: sql_digests.Slice) -> Deferred[list[str]]:
            found.extend(part.ids)
            return succeed(found) if part.after is None else self._find_digests(account, digests, part.after, found)

        return self._read("acknowledge", lambda c: sql_digests.find(c, account, digests, after)).addCallback(go_on)

    def _expire(self, limit: int, expired: list[Removed]) -> Deferred[list[Removed]]:
        now, some = self._clock.seconds(), min(limit - len(expired), EXPIRED_AT_A_TIME)

        def go_on(removed: list[Removed]) -> Deferred[list[Removed]]:
            expired.extend(removed)
            return self._expire(limit, expired) if removed and len(expired) < limit else succeed(expired)

        sweeping = partial(sql_messages.expire, now=now, limit=some, max_bytes=EXPIRED_BYTES)
        return self._write("expire", sweeping).addCallback(go_on)

    def _deposited(self, outcomes: list[Outcome], deposits: Sequence[Deposit]) -> list[Deposited | MediatorError]:
        for outcome, one in zip(outcomes, deposits, strict=True):
            if isinstance(outcome.error, RecipientUnknown):
                self._owners.forget([one.recipient_did])
        return [outcome.value if outcome.error is None else outcome.error for outcome in outcomes]

    def _not_deposited(self, failure: Failure, recipient_did: str) -> Failure:
        if failure.check(RecipientUnknown):
            self._owners.forget([recipient_did])
        return failure

    def _known(
        self, name: str, ask: Callable[[Connection, str], T | None], known: Owners[T], did: str
    ) -> Deferred[T | None]:
        if not self._file.is_readable:
            return fail(StoreUnavailable())
        answer = known.get(did)
        if answer is not None:
            return succeed(answer)
        return self._read(name, lambda c: ask(c, did)).addCallback(self._keep, known, did, known.age)

    def _keep(self, answer: T | None, known: Owners[T], did: str, age: int) -> T | None:
        known.keep(did, answer, age)
        return answer

    def _forget(self, result: R, known: Owners[Any], dids: Sequence[str]) -> R:
        known.forget(dids)
        return result

    def _forget_expired(self, expired: list[ExpiredAccount]) -> list[ExpiredAccount]:
        return self._forget_all(expired) if expired else expired

    def _forget_all(self, result: R) -> R:
        self._owners.clear()
        self._accounts.clear()
        return result
