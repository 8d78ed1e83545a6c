"""A store that forgets everything when the process ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import MediatorError, RecipientUnknown, StoreUnavailable
from mediatord.interfaces import (
    Account,
    AccountUsage,
    Action,
    Arrival,
    Backlog,
    Books,
    ClusterRefused,
    Deposit,
    Deposited,
    EarlyOutcomes,
    ExpiredAccount,
    IClusterStore,
    IStore,
    LongQueue,
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
from mediatord.protocol.canonical_did import canonical_did, did_digest
from mediatord.store.backlog import earliest, together
from mediatord.store.each import one_by_one
from mediatord.store.memory_accounts import Accounts
from mediatord.store.memory_cluster import ClusterContents, MemoryCluster
from mediatord.store.memory_decentrl import DecentrlContents, MemoryDecentrl
from mediatord.store.memory_messages import Messages
from mediatord.store.memory_nonces import Nonces
from mediatord.store.memory_queues import Lane, Queue
from mediatord.store.waiting import both

T = TypeVar("T")


@dataclass(slots=True)
class _Contents:
    """What is there between open and close."""

    messages: Messages
    nonces: Nonces
    decentrl: DecentrlContents
    cluster: ClusterContents
    accounts: Accounts = field(default_factory=Accounts)
    documents: dict[str, str] = field(default_factory=dict)

    def lane(self, account: str, recipient_did: str | None) -> Lane:
        """What waits for an account or for one of its recipient DIDs; an empty one if nobody has it."""
        holder = self.accounts.holder(account)
        if holder is None:
            return Lane()
        if recipient_did is None:
            return holder.mailbox.lane
        recipient = holder.recipients.get(did_digest(recipient_did))
        did = canonical_did(recipient_did) if recipient is None else recipient.did
        queue = holder.mailbox.queues.get(did)
        return Lane() if queue is None else queue.lane

    def queue_for(self, recipient_did: str) -> Queue:
        """:raise RecipientUnknown: nobody has registered it."""
        recipient = self.accounts.recipient(recipient_did)
        if recipient is None:
            raise RecipientUnknown()
        return recipient.holder.mailbox.queue(recipient.did)

    def backlog(self, bounds: Sequence[float], top: int) -> Backlog:
        """As :meth:`~mediatord.interfaces.IMessageStore.backlog`, of both halves."""
        halves = self.messages, self.decentrl.pending
        largest = []
        for did, number in self.messages.ranking.top(max(top, 0))[0]:
            (size, at), (other_size, other_at) = [half.queue(did) for half in halves]
            largest.append(LongQueue(did, number, size + other_size, earliest(at, other_at)))
        totals = [half.waiting() for half in halves]
        cohorts = [half.cohorts(bounds) for half in halves]
        found = together(cohorts, [(total.messages, total.bytes) for total in totals], largest)
        return replace(found, books=self.books())

    def usage(self, now: float) -> AccountUsage:
        """As :meth:`~mediatord.interfaces.IAccountStore.account_usage`."""
        usage, long_forms = self.accounts.usage(), sum(map(len, self.documents.values()))
        return replace(usage, bytes=usage.bytes + long_forms + self.decentrl.registrations.size(now))

    def books(self) -> Books:
        """Of both halves."""
        return Books(self.messages.ledger(), self.decentrl.pending.ledger())


@implementer(IStore)
class MemoryStore:
    """
    Every Deferred has fired when it is returned. Its many methods are those of the interface.

    Several daemons of one process may open it, each as if it had a process of its own; it forgets everything when the
    last of them has closed it.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: Caps = Caps(),  # noqa: B008  it is frozen
        max_nonces: int = 250_000,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._caps = caps
        self._max_nonces = max_nonces
        self.trouble = ""
        self._openings = 0
        self._contents: _Contents | None = None
        self.decentrl: IDecentrlStore = MemoryDecentrl(self._answer_decentrl)
        self.cluster: IClusterStore = MemoryCluster(self._answer_cluster)

    def open(self) -> Deferred[None]:
        """Begin empty, unless somebody else has it open."""
        self._openings += 1
        if self._contents is None:
            self._contents = self._empty()
        self._contents.cluster.release_lost(self._clock.seconds())
        return succeed(None)

    def close(self) -> Deferred[None]:
        self._openings = max(self._openings - 1, 0)
        if not self._openings:
            self._contents = None
        return succeed(None)

    def table_sizes(self) -> Deferred[dict[str, int]]:
        """Nobody counts them."""
        return self._answer(lambda contents, now: {})

    def ping(self) -> Deferred[None]:
        return self._answer(lambda contents, now: None)

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
        def deposit(contents: _Contents, now: float) -> list[Deposited]:
            addressed = [(contents.queue_for(one.recipient_did), one) for one in deposits]
            contents.messages.check(addressed)
            for queue, _ in addressed:
                contents.accounts.mark_used(queue.mailbox.did)
            return [contents.messages.deposit(queue, one, now) for queue, one in addressed]

        return self._answer(deposit)

    def fetch(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        return self._answer(
            lambda contents, now: contents.messages.fetch(
                contents.lane(account, recipient_did), limit=limit, max_bytes=max_bytes
            )
        )

    def status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        return self._answer(lambda contents, now: contents.lane(account, recipient_did).status())

    def find(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        return self._answer(lambda contents, now: contents.messages.find(ids))

    def arrived(self, accounts: Sequence[str], window: Window, *, limit: int) -> Deferred[list[Arrival]]:
        def arrived(contents: _Contents, now: float) -> list[Arrival]:
            holders = [contents.accounts.holder(did) for did in dict.fromkeys(accounts)]
            mailboxes = [holder.mailbox for holder in holders if holder is not None]
            return contents.messages.arrived(mailboxes, window, limit)

        return self._answer(arrived)

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._answer(lambda contents, now: contents.messages.mark_delivered(ids, node))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        return self._answer(lambda contents, now: contents.messages.mark_pending(ids))

    def remove(self, ids: Sequence[str]) -> Deferred[list[Removed]]:
        return self._answer(lambda contents, now: contents.messages.remove(ids, now))

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[Removed]]:
        def acknowledge(contents: _Contents, now: float) -> list[Removed]:
            holder = contents.accounts.holder(account)
            return [] if holder is None else contents.messages.acknowledge(holder.mailbox, ids, now)

        return self._answer(acknowledge)

    def expire(self, limit: int) -> Deferred[list[Removed]]:
        return self._answer(lambda contents, now: contents.messages.expire(now, limit))

    def next_due(self) -> Deferred[float | None]:
        return self._answer(lambda contents, now: contents.messages.next_due(now))

    def take_due(self, limit: int) -> Deferred[list[StoredMessage]]:
        return self._answer(lambda contents, now: contents.messages.take_due(now, limit))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return self._answer(lambda contents, now: contents.messages.ranking.top(top))

    def statistics(self, top: int) -> Deferred[StoreStatistics]:
        def statistics(contents: _Contents, now: float) -> StoreStatistics:
            largest, other = contents.messages.ranking.top(top)
            return StoreStatistics(tuple(largest), other, contents.books())

        return self._answer(statistics)

    def waiting(self) -> Deferred[Waiting]:
        return self._answer(
            lambda contents, now: both(contents.messages.waiting(), contents.decentrl.pending.waiting())
        )

    def ledger(self) -> Deferred[Books]:
        return self._answer(lambda contents, now: contents.books())

    def backlog(self, bounds: Sequence[float], top: int) -> Deferred[Backlog]:
        return self._answer(lambda contents, now: contents.backlog(bounds, top))

    def account(self, did: str) -> Deferred[Account | None]:
        def account(contents: _Contents, now: float) -> Account | None:
            holder = contents.accounts.holder(did)
            return None if holder is None else holder.account

        return self._answer(account)

    def grant(self, did: str) -> Deferred[Account]:
        return self._answer(lambda contents, now: contents.accounts.grant(did, now))

    def touch(self, did: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.accounts.touch(did, now))

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        return self._answer(lambda contents, now: contents.accounts.expire(limit, unused_before, idle_before))

    def account_usage(self) -> Deferred[AccountUsage]:
        return self._answer(lambda contents, now: contents.usage(now))

    def mark_draft03(self, did: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.accounts.mark_draft03(did))

    def owner(self, recipient_did: str) -> Deferred[str | None]:
        def owner(contents: _Contents, now: float) -> str | None:
            recipient = contents.accounts.recipient(recipient_did)
            return None if recipient is None else recipient.holder.account.did

        return self._answer(owner)

    def spellings(self, recipient_did: str) -> Deferred[list[str]]:
        return self._answer(lambda contents, now: contents.accounts.spellings(recipient_did))

    def held(self) -> tuple[int, int]:
        return 0, 0

    def update(
        self, account: str, updates: Sequence[tuple[str, Action]], *, max_recipients: int
    ) -> Deferred[list[UpdateResult]]:
        return self._answer(lambda contents, now: contents.accounts.update(account, updates, max_recipients))

    def recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._answer(lambda contents, now: contents.accounts.recipients(account, offset, limit))

    def move(self, prior: str, new: str) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.accounts.move(prior, new))

    def is_retired(self, did: str) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.accounts.is_retired(did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.documents.update({short: long}))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return self._answer(lambda contents, now: contents.documents.get(short))

    def claim(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.nonces.claim(key, until, now, share))

    def release(self, key: bytes) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.nonces.release(key))

    def prune(self) -> Deferred[int]:
        return self._answer(lambda contents, now: contents.nonces.prune(now))

    def _empty(self) -> _Contents:
        messages, nonces = Messages(self._limits), Nonces(self._max_nonces)
        decentrl = DecentrlContents(self._caps, nonces, messages.ranking)
        return _Contents(messages, nonces, decentrl, ClusterContents(messages))

    def _answer_cluster(self, work: Callable[[ClusterContents, float], T]) -> Deferred[T]:
        return self._answer(lambda contents, now: work(contents.cluster, now))

    def _answer_decentrl(self, work: Callable[[DecentrlContents, float], T]) -> Deferred[T]:
        return self._answer(lambda contents, now: work(contents.decentrl, now))

    def _answer(self, work: Callable[[_Contents, float], T]) -> Deferred[T]:
        if self._contents is None:
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        self._contents.messages.turn(now)
        try:
            return succeed(work(self._contents, now))
        except (MediatorError, ClusterRefused) as error:
            return fail(error.with_traceback(None))  # which would keep the callers, and this Deferred with them
