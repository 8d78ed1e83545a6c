"""A store in memory, which is empty again when it is closed: its cluster state, quotas and facade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import MediatorError, StoreUnavailable, UnknownRecipient
from mediatord.protocol.canonical_did import canonicalize_did, compute_did_digest
from mediatord.store.interfaces.administration import IStoreAdministration
from mediatord.store.interfaces.cluster import (
    ClusterIdentityMismatch,
    ClusterJoinError,
    ClusterNode,
    ClusterSecretMismatch,
    IClusterStore,
    NodeNameTaken,
    PresenceRecord,
)
from mediatord.store.interfaces.decentrl import DecentrlQuotas, IDecentrlStore
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    ArrivalWindow,
    EnqueueRequest,
    EnqueueResult,
    LargeQueue,
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
from mediatord.store.interfaces.store import (
    Account,
    AccountUsage,
    ExpiredAccount,
    IStore,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from mediatord.store.memory.accounts import MemoryAccounts
from mediatord.store.memory.administration import MemoryStoreAdministration
from mediatord.store.memory.decentrl import MemoryDecentrlState, MemoryDecentrlStore, MemoryNonces
from mediatord.store.memory.messages import DeadlineHeap, EntryList, MemoryMessages, RecipientQueue
from mediatord.store.message_operations import (
    IndependentEnqueues,
    acknowledge_in_steps,
    add_queue_totals,
    build_backlog,
    find_earliest,
)
from mediatord.store.quotas import QuotaUse, add_quota_use, drop_expired_uses, get_quota_wait, remove_latest_use


class MemoryQuotas:
    """Uses of quotas by key, as long as they count."""

    def __init__(self) -> None:
        self._lots: dict[bytes, list[QuotaUse]] = {}
        self._over: DeadlineHeap[bytes] = DeadlineHeap()

    def take(self, key: bytes, amount: int, limit: int, period: float, now: float) -> float:
        self._forget(now)
        lots = drop_expired_uses(self._lots.get(key, ()), period, now)
        wait = get_quota_wait(lots, amount, limit=limit, period=period, now=now)
        if not wait and amount:
            self._lots[key] = lots = add_quota_use(lots, amount, period=period, now=now)
            self._over.add(key, lots[-1][0] + period)
        return wait

    def put_back(self, key: bytes, amount: int) -> None:
        lots = remove_latest_use(self._lots.get(key, ()), amount)
        if lots:
            self._lots[key] = lots
        elif self._lots.pop(key, None) is not None:
            self._over.discard(key)

    def _forget(self, now: float) -> None:
        while (key := self._over.take(now)) is not None:
            del self._lots[key]


T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class _NodeLease:
    """A node and the end of its lease, exclusive."""

    node: ClusterNode
    until: float


class StoreWorkRunner(Protocol):
    """Runs work at a time; the Deferred has its result or exception, or fails because the store is not open."""

    def __call__(self, work: Callable[[float], T]) -> Deferred[T]:
        """Run it at once."""


def _answer_now(
    method: Callable[Concatenate[MemoryClusterStore, float, P], T],
) -> Callable[Concatenate[MemoryClusterStore, P], Deferred[T]]:
    """Make an operation of the store of a method that takes the time and returns its result."""

    @wraps(method)
    def operation(self: MemoryClusterStore, /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return self.access(lambda now: method(self, now, *args, **kwargs))

    return operation


@implementer(IClusterStore)
class MemoryClusterStore:
    """Cluster side of the memory store, for several daemons in one process."""

    def __init__(self, access: StoreWorkRunner) -> None:
        self.access = access

    def reset(self, messages: MemoryMessages) -> None:
        """
        Begin empty.

        :param messages: of the whole store.
        """
        self._messages = messages
        self._leases: dict[str, _NodeLease] = {}
        self._present: dict[str, dict[str, None]] = {}
        self._announced: dict[str, dict[str, None]] = {}
        self._leader_leases: dict[str, tuple[str, float]] = {}
        self._pickups: dict[str, float] = {}
        self._quotas = MemoryQuotas()

    def release_lost(self, now: float) -> None:
        """Make deliveries of nodes that are not live pending again."""
        for boot in self._messages.delivering() - {node.boot for node in self._list_live(now)}:
            self._messages.release(boot)

    @_answer_now
    def join(self, now: float, node: ClusterNode, lease: float) -> None:
        others = [other for other in self._list_live(now) if other.boot != node.boot]
        if any(other.seal != node.seal for other in others):
            raise ClusterSecretMismatch()
        if node.identity and any(other.identity not in (node.identity, b"") for other in others):
            raise ClusterIdentityMismatch()
        for other in others:
            if other.name == node.name:
                raise NodeNameTaken(other, self._leases[other.boot].until)
        self._leases[node.boot] = _NodeLease(node, now + lease)

    @_answer_now
    def renew(self, now: float, boot: str, lease: float) -> bool:
        node = self._find_live(boot, now)
        if node is None:
            return False
        self._leases[boot] = _NodeLease(node, now + lease)
        return True

    @_answer_now
    def drop(self, now: float, boot: str, *, until: float = 0.0) -> int:
        lease = self._leases.get(boot)
        if not boot or (lease is not None and lease.until > max(until, now)):
            return 0
        self._leases.pop(boot, None)
        self._remove_presence(boot, list(self._announced.get(boot, ())))
        self._leader_leases = {
            lease_name: held for lease_name, held in self._leader_leases.items() if held[0] != boot
        }
        return self._messages.release(boot)

    @_answer_now
    def list_nodes(self, now: float) -> list[ClusterNode]:
        return self._list_live(now)

    @_answer_now
    def list_lapsed_nodes(self, now: float) -> list[str]:
        known = {*self._leases, *self._announced, *self._messages.delivering()} - {""}
        return sorted(known - {node.boot for node in self._list_live(now)})

    @_answer_now
    def add_presence(self, now: float, boot: str, dids: Sequence[str]) -> None:
        for did in dids:
            self._present.setdefault(did, {})[boot] = None
            self._announced.setdefault(boot, {})[did] = None

    @_answer_now
    def remove_presence(self, now: float, boot: str, dids: Sequence[str]) -> None:
        self._remove_presence(boot, dids)

    @_answer_now
    def find_presence(self, now: float, dids: Sequence[str]) -> list[PresenceRecord]:
        return [
            PresenceRecord(did, boot, self._find_live(boot, now))
            for did in dict.fromkeys(dids)
            for boot in self._present.get(did, ())
        ]

    @_answer_now
    def acquire_lease(self, now: float, lease_name: str, boot: str, lease: float) -> bool:
        holder, until = self._leader_leases.get(lease_name, (boot, now))
        if holder != boot and until > now:
            return False
        self._leader_leases[lease_name] = boot, now + lease
        return True

    @_answer_now
    def take_quota(self, now: float, key: bytes, amount: int, *, limit: int, period: float) -> float:
        return self._quotas.take(key, amount, limit, period, now)

    @_answer_now
    def return_quota(self, now: float, key: bytes, amount: int) -> None:
        self._quotas.put_back(key, amount)

    @_answer_now
    def record_pickups(self, now: float, ids: Sequence[str], period: float) -> None:
        for id_ in ids:
            self._pickups.pop(id_, None)
            self._pickups[id_] = now + period
        while self._pickups and next(iter(self._pickups.values())) <= now:
            del self._pickups[next(iter(self._pickups))]

    @_answer_now
    def find_picked_up(self, now: float, ids: Sequence[str]) -> frozenset[str]:
        return frozenset(id_ for id_ in ids if self._pickups.get(id_, now) > now)

    def _list_live(self, now: float) -> list[ClusterNode]:
        live = [lease.node for lease in self._leases.values() if lease.until > now]
        return sorted(live, key=lambda node: node.name)

    def _find_live(self, boot: str, now: float) -> ClusterNode | None:
        lease = self._leases.get(boot)
        return None if lease is None or lease.until <= now else lease.node

    def _remove_presence(self, boot: str, dids: Sequence[str]) -> None:
        for did in dids:
            _discard_member(self._present, did, boot)
            _discard_member(self._announced, boot, did)


def _discard_member(groups: dict[str, dict[str, None]], group: str, member: str) -> None:
    members = groups.get(group, {})
    members.pop(member, None)
    if not members:
        groups.pop(group, None)


@dataclass(slots=True)
class _MemoryState:
    """State of the store between open and close."""

    messages: MemoryMessages
    nonces: MemoryNonces
    decentrl: MemoryDecentrlState
    accounts: MemoryAccounts = field(default_factory=MemoryAccounts)
    documents: dict[str, str] = field(default_factory=dict)

    def entry_list(self, account: str, recipient_did: str | None) -> EntryList:
        """Messages of an account or of one of its recipient DIDs; empty if it does not exist."""
        account_entry = self.accounts.account_entry(account)
        if account_entry is None:
            return EntryList()
        if recipient_did is None:
            return account_entry.mailbox.entry_list
        recipient = account_entry.recipients.get(compute_did_digest(recipient_did))
        did = canonicalize_did(recipient_did) if recipient is None else recipient.did
        queue = account_entry.mailbox.queues.get(did)
        return EntryList() if queue is None else queue.entry_list

    def queue_for(self, recipient_did: str) -> RecipientQueue:
        """:raise UnknownRecipient: the DID is not registered."""
        recipient = self.accounts.recipient(recipient_did)
        if recipient is None:
            raise UnknownRecipient()
        return recipient.account_entry.mailbox.queue(recipient.did)

    def backlog(self, bounds: Sequence[float], top: int) -> QueueBacklog:
        """Backlog of both halves, as :meth:`~mediatord.store.interfaces.messages.IMessageStore.read_backlog`."""
        halves = self.messages, self.decentrl.pending
        largest = []
        for did, number in self.messages.ranking.top(max(top, 0))[0]:
            (size, at), (other_size, other_at) = [half.queue(did) for half in halves]
            largest.append(LargeQueue(did, number, size + other_size, find_earliest(at, other_at)))
        totals = [half.waiting() for half in halves]
        cohorts = [half.cohorts(bounds) for half in halves]
        found = build_backlog(cohorts, [(total.messages, total.bytes) for total in totals], largest)
        return replace(found, books=self.books())

    def usage(self, now: float) -> AccountUsage:
        """Storage as in :meth:`~mediatord.store.interfaces.store.IAccountStore.get_account_usage`."""
        usage, long_forms = self.accounts.usage(), sum(map(len, self.documents.values()))
        return replace(usage, bytes=usage.bytes + long_forms + self.decentrl.registrations.size(now))

    def books(self) -> StoreLedger:
        """Ledgers of both halves."""
        return StoreLedger(self.messages.ledger(), self.decentrl.pending.ledger())


@implementer(IStore)
class MemoryStore(IndependentEnqueues):
    """
    A store in memory. Every Deferred has fired when it is returned.

    Several daemons of one process may open it, each as if it had a process of its own; it is emptied when the last of
    them has closed it.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        max_nonces: int = 250_000,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._caps = caps
        self._max_nonces = max_nonces
        self.trouble = ""
        self._openings = 0
        self._contents: _MemoryState | None = None
        self.decentrl: IDecentrlStore = MemoryDecentrlStore(self._answer_decentrl)
        self._cluster = MemoryClusterStore(lambda work: self._answer(lambda contents, now: work(now)))
        self.cluster: IClusterStore = self._cluster
        self.administration: IStoreAdministration = MemoryStoreAdministration(
            lambda work: self._answer(lambda contents, now: work(contents))
        )

    def open(self) -> Deferred[None]:
        """Begin empty, unless another daemon has it open."""
        self._openings += 1
        if self._contents is None:
            messages, nonces = MemoryMessages(self._limits), MemoryNonces(self._max_nonces)
            decentrl = MemoryDecentrlState(self._caps, nonces, messages.ranking)
            self._contents = _MemoryState(messages, nonces, decentrl)
            self._cluster.reset(messages)
        self._cluster.release_lost(self._clock.seconds())
        return succeed(None)

    def close(self) -> Deferred[None]:
        self._openings = max(self._openings - 1, 0)
        if not self._openings:
            self._contents = None
        return succeed(None)

    def table_sizes(self) -> Deferred[dict[str, int]]:
        """Sizes are not measured."""
        return self._answer(lambda contents, now: {})

    def ping(self) -> Deferred[None]:
        return self._answer(lambda contents, now: None)

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        def enqueue(contents: _MemoryState, now: float) -> list[EnqueueResult]:
            addressed = [(contents.queue_for(one.recipient_did), one) for one in deposits]
            contents.messages.check(addressed)
            for queue, _ in addressed:
                contents.accounts.mark_used(queue.mailbox.did)
            return [contents.messages.enqueue(queue, one, now) for queue, one in addressed]

        return self._answer(enqueue)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        return self._answer(
            lambda contents, now: contents.messages.fetch(
                contents.entry_list(account, recipient_did), limit=limit, max_bytes=max_bytes
            )
        )

    def get_queue_status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        return self._answer(lambda contents, now: contents.entry_list(account, recipient_did).status())

    def find_messages(self, ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        return self._answer(lambda contents, now: contents.messages.find(ids))

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        def arrived(contents: _MemoryState, now: float) -> list[MessageArrival]:
            holders = [contents.accounts.account_entry(did) for did in dict.fromkeys(accounts)]
            mailboxes = [account_entry.mailbox for account_entry in holders if account_entry is not None]
            return contents.messages.arrived(mailboxes, window, limit)

        return self._answer(arrived)

    def mark_delivered(self, ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        return self._answer(lambda contents, now: contents.messages.mark_delivered(ids, node))

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        return self._answer(lambda contents, now: contents.messages.mark_pending(ids))

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return self._answer(lambda contents, now: contents.messages.remove(ids, now))

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        def acknowledge(contents: _MemoryState, now: float) -> list[RemovedMessage]:
            account_entry = contents.accounts.account_entry(account)
            return [] if account_entry is None else contents.messages.acknowledge(account_entry.mailbox, ids, now)

        return self._answer(acknowledge)

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
        return Deferred.fromCoroutine(
            acknowledge_in_steps(self, account, ids, key, until, share, with_status=with_status)
        )

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        return self._answer(lambda contents, now: contents.messages.expire(now, limit))

    def find_next_due(self) -> Deferred[float | None]:
        return self._answer(lambda contents, now: contents.messages.next_due(now))

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        return self._answer(lambda contents, now: contents.messages.take_due(now, limit))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        return self._answer(lambda contents, now: contents.messages.ranking.top(top))

    def read_statistics(self, top: int) -> Deferred[StoreStatistics]:
        def statistics(contents: _MemoryState, now: float) -> StoreStatistics:
            largest, other = contents.messages.ranking.top(top)
            return StoreStatistics(tuple(largest), other, contents.books())

        return self._answer(statistics)

    def get_queue_totals(self) -> Deferred[QueueTotals]:
        return self._answer(
            lambda contents, now: add_queue_totals(contents.messages.waiting(), contents.decentrl.pending.waiting())
        )

    def read_ledger(self) -> Deferred[StoreLedger]:
        return self._answer(lambda contents, now: contents.books())

    def read_backlog(self, bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        return self._answer(lambda contents, now: contents.backlog(bounds, top))

    def get_account(self, did: str) -> Deferred[Account | None]:
        def account(contents: _MemoryState, now: float) -> Account | None:
            account_entry = contents.accounts.account_entry(did)
            return None if account_entry is None else account_entry.account

        return self._answer(account)

    def grant(self, did: str) -> Deferred[Account]:
        return self._answer(lambda contents, now: contents.accounts.grant(did, now))

    def record_contact(self, did: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.accounts.touch(did, now))

    def expire_accounts(
        self, limit: int, *, unused_before: float | None, idle_before: float | None
    ) -> Deferred[list[ExpiredAccount]]:
        return self._answer(lambda contents, now: contents.accounts.expire(limit, unused_before, idle_before))

    def get_account_usage(self) -> Deferred[AccountUsage]:
        return self._answer(lambda contents, now: contents.usage(now))

    def mark_draft03(self, did: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.accounts.mark_draft03(did))

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        def owner(contents: _MemoryState, now: float) -> str | None:
            recipient = contents.accounts.recipient(recipient_did)
            return None if recipient is None else recipient.account_entry.account.did

        return self._answer(owner)

    def list_registered_names(self, recipient_did: str) -> Deferred[list[str]]:
        return self._answer(lambda contents, now: contents.accounts.spellings(recipient_did))

    def get_buffered(self) -> tuple[int, int]:
        return 0, 0

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        return self._answer(lambda contents, now: contents.accounts.update(account, updates, max_recipients))

    def list_recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        return self._answer(lambda contents, now: contents.accounts.recipients(account, offset, limit))

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.accounts.move(prior, new))

    def is_retired(self, did: str) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.accounts.is_retired(did))

    def remember_did(self, short: str, long: str) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.documents.update({short: long}))

    def recall_did(self, short: str) -> Deferred[str | None]:
        return self._answer(lambda contents, now: contents.documents.get(short))

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._answer(lambda contents, now: contents.nonces.claim(key, until, now, share))

    def release_nonce(self, key: bytes) -> Deferred[None]:
        return self._answer(lambda contents, now: contents.nonces.release(key))

    def prune_nonces(self) -> Deferred[int]:
        return self._answer(lambda contents, now: contents.nonces.prune(now))

    def _answer_decentrl(self, work: Callable[[MemoryDecentrlState, float], T]) -> Deferred[T]:
        return self._answer(lambda contents, now: work(contents.decentrl, now))

    def _answer(self, work: Callable[[_MemoryState, float], T]) -> Deferred[T]:
        if self._contents is None:
            return fail(StoreUnavailable())
        now = self._clock.seconds()
        self._contents.messages.update_visibility(now)
        try:
            return succeed(work(self._contents, now))
        except (MediatorError, ClusterJoinError) as error:
            return fail(error.with_traceback(None))  # which would keep the callers, and this Deferred with them
