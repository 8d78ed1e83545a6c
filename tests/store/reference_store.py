"""
Reference store in memory, which searches lists instead of using indexes.

The differential tests compare the stores with it. It has only the operations that they use, and DIDs in one form
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import (
    MediationNotGranted,
    MediatorError,
    QueueFull,
    ReplayCacheFull,
    StoreUnavailable,
    UnknownRecipient,
)
from mediatord.store.fair_share import (
    KnownSenders,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    find_exceeded_limit,
    get_party,
    is_from_group,
    needs_sender_usage,
)
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import (
    ArrivalWindow,
    EnqueueRequest,
    EnqueueResult,
    MessageArrival,
    MessageLedger,
    Payload,
    QueueLimits,
    QueueStatus,
    QueueTotals,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
    StoreLedger,
)
from mediatord.store.interfaces.store import (
    NONCE_GRACE_SECONDS,
    Account,
    RecipientUpdateAction,
    RecipientUpdateResult,
)
from tests.store.builders import LEDGER_ENTRY_BY_REASON
from tests.store.reference_decentrl_store import ReferenceDecentrlStore

T = TypeVar("T")


class ReferenceNonces:
    """A bounded cache of nonces."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._claims: dict[bytes, float] = {}

    def holds(self, key: bytes, now: float) -> bool:
        """Whether a nonce is claimed now."""
        return self._claims.get(key, now) > now

    def claim(self, key: bytes, until: float, now: float, share: float = 1.0) -> bool:
        """
        Claim a nonce; returns whether it was new.

        :raise ReplayCacheFull: there is no room for it.
        """
        if self.holds(key, now):
            return False
        self.refuse_full(key, share)
        self._claims[key] = until
        return True

    def refuse_full(self, key: bytes, share: float = 1.0) -> None:
        """:raise ReplayCacheFull: the nonce would have no room."""
        if key not in self._claims and len(self._claims) >= int(share * self._capacity):
            raise ReplayCacheFull

    def release(self, key: bytes) -> None:
        self._claims.pop(key, None)

    def prune(self, now: float) -> int:
        before = len(self._claims)
        self._claims = {key: until for key, until in self._claims.items() if until > now - NONCE_GRACE_SECONDS}
        return before - len(self._claims)


class _Account:
    """An account with its recipient DIDs, in order of registration."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.recipients: list[str] = []


_Queue = tuple[_Account, str]


@dataclass(eq=False)
class _Message:
    """
    A queued message.

    :param arrived_at: None until a delayed message is taken.
    """

    queue: _Queue
    payload: Payload
    received_at: float
    expires_at: float
    due_at: float | None
    origin: int
    arrived_at: float | None
    is_delivered: bool = False
    pushes: int = 0

    @property
    def size(self) -> int:
        return len(self.payload.data)

    def is_visible(self, now: float) -> bool:
        return self.expires_at > now and (self.due_at is None or self.due_at <= now)

    def to_stored(self) -> StoredMessage:
        owner, did = self.queue
        return StoredMessage(
            self.payload.id,
            did,
            owner.account.did,
            self.payload.data,
            self.payload.form,
            self.received_at,
            self.expires_at,
            "delivered" if self.is_delivered else "pending",
            self.due_at,
        )

    def to_removed(self, reason: RemovalReason | None) -> RemovedMessage:
        owner, did = self.queue
        return RemovedMessage(
            self.payload.id, did, owner.account.did, self.size, self.received_at, self.pushes, reason
        )


class ReferenceStore:
    """Reference store; every Deferred that it returns has fired."""

    def __init__(
        self,
        clock: IReactorTime,
        limits: QueueLimits,
        *,
        caps: DecentrlQuotas = DecentrlQuotas(),  # noqa: B008  it is frozen
        max_nonces: int,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._nonces = ReferenceNonces(max_nonces)
        self._owners: dict[str, _Account] = {}
        self._retired: set[str] = set()
        self._messages: list[_Message] = []
        self._senders: dict[_Queue, KnownSenders] = {}
        self._ledger: Counter[str] = Counter()
        self.decentrl = ReferenceDecentrlStore(self._answer, clock, caps, self._nonces)

    def open(self) -> Deferred[None]:
        return succeed(None)

    def close(self) -> Deferred[None]:
        return succeed(None)

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
        return self.enqueue_all([request]).addCallback(lambda results: results[0])

    def enqueue_all(self, deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        def enqueue() -> list[EnqueueResult]:
            addressed = [(self._find_queue(deposit.recipient_did), deposit) for deposit in deposits]
            if self._limits.when_full == "refuse":
                self._refuse_full(addressed)
            ids = [payload.id for _, one in addressed for payload in one.payloads if self._fits(payload)]
            if len(set(ids)) < len(ids) or self._find(ids):
                raise StoreUnavailable()
            return [self._enqueue(queue, one) for queue, one in addressed]

        return self._answer(enqueue)

    def fetch_messages(
        self, account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        found: list[_Message] = []
        for message in self._list_shown(account, recipient_did):
            if len(found) == limit or found and sum(one.size for one in (*found, message)) > max_bytes:
                break
            found.append(message)
        return succeed([message.to_stored() for message in found])

    def get_queue_status(self, account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        shown = self._list_shown(account, recipient_did)
        if not shown:
            return succeed(QueueStatus(0, 0))
        size = sum(message.size for message in shown)
        return succeed(QueueStatus(len(shown), size, shown[0].received_at, shown[-1].received_at))

    def find_arrivals(
        self, accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        found = [
            MessageArrival(message.payload.id, message.queue[0].account.did, message.arrived_at)
            for message in self._messages
            if message.arrived_at is not None
            and message.queue[0].account.did in accounts
            and window.has(message.arrived_at, message.payload.id)
        ]
        return succeed(sorted(found, key=lambda one: (one.at, one.id))[:limit])

    def mark_delivered(self, ids: Sequence[str]) -> Deferred[None]:
        for message in self._find(ids):
            message.is_delivered = True
            message.pushes += 1
        return succeed(None)

    def mark_pending(self, ids: Sequence[str]) -> Deferred[list[str]]:
        delivered = [message for message in self._find(ids) if message.is_delivered]
        for message in delivered:
            message.is_delivered = False
        return succeed([message.payload.id for message in delivered])

    def remove_messages(self, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return succeed(self._acknowledge(self._find(ids)))

    def acknowledge(self, account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        return succeed(
            self._acknowledge(
                [
                    message
                    for message in self._messages
                    if message.queue[0].account.did == account
                    and (message.payload.id in ids or sha256(message.payload.data).hexdigest() in ids)
                ]
            )
        )

    def expire_messages(self, limit: int) -> Deferred[list[RemovedMessage]]:
        expired = [message for message in self._messages if message.expires_at <= self._clock.seconds()]
        expired.sort(key=lambda message: message.expires_at)
        return succeed([self._remove(message, "ttl") for message in expired[:limit]])

    def find_next_due(self) -> Deferred[float | None]:
        return succeed(min([message.due_at or 0.0 for message in self._list_delayed()], default=None))

    def take_due_messages(self, limit: int) -> Deferred[list[StoredMessage]]:
        now, due = self._clock.seconds(), list[StoredMessage]()
        for message in sorted(self._list_delayed(), key=lambda message: message.due_at or 0.0):
            if len(due) < limit and (message.due_at or 0.0) <= now:
                due.append(message.to_stored())
                message.due_at, message.arrived_at = None, now
        return succeed(due)

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        dids = [message.queue[1] for message in self._messages]
        sizes = Counter([*dids, *(event.recipient_did for event in self.decentrl.pending)])
        largest = sizes.most_common(top)
        return succeed((largest, sizes.total() - sum(number for _, number in largest)))

    def get_queue_totals(self) -> Deferred[QueueTotals]:
        """Of messages only, and without their age."""
        queues = {message.queue for message in self._messages}
        size = sum(message.size for message in self._messages)
        return succeed(QueueTotals(len(self._messages), size, len(queues), None))

    def read_ledger(self) -> Deferred[StoreLedger]:
        messages = MessageLedger(**self._ledger, waiting=len(self._messages))
        return succeed(StoreLedger(messages, self.decentrl.read_ledger()))

    def get_account(self, did: str) -> Deferred[Account | None]:
        return succeed(self._owners[did].account if did in self._owners else None)

    def grant(self, did: str) -> Deferred[Account]:
        if did in self._retired:
            return fail(MediationNotGranted())
        return succeed(self._owners.setdefault(did, _Account(Account(did, self._clock.seconds()))).account)

    def mark_draft03(self, did: str) -> Deferred[None]:
        if did in self._owners:
            self._owners[did].account = replace(self._owners[did].account, draft03=True)
        return succeed(None)

    def find_owner(self, recipient_did: str) -> Deferred[str | None]:
        owner = self._find_owner(recipient_did)
        return succeed(None if owner is None else owner.account.did)

    def update_recipients(
        self, account: str, updates: Sequence[tuple[str, RecipientUpdateAction]], *, max_recipients: int
    ) -> Deferred[list[RecipientUpdateResult]]:
        if account not in self._owners:
            return fail(MediationNotGranted())
        return succeed([self._update(self._owners[account], *update, max_recipients) for update in updates])

    def list_recipients(self, account: str, *, offset: int, limit: int) -> Deferred[tuple[list[str], int]]:
        recipients = self._owners[account].recipients if account in self._owners else []
        return succeed((recipients[offset : offset + limit], len(recipients)))

    def move_account(self, prior: str, new: str) -> Deferred[bool]:
        if prior not in self._owners or new in self._owners or new in self._retired:
            return succeed(False)
        owner = self._owners[new] = self._owners.pop(prior)
        owner.account = replace(owner.account, did=new)
        self._retired.add(prior)
        return succeed(True)

    def claim_nonce(self, key: bytes, until: float, share: float = 1.0) -> Deferred[bool]:
        return self._answer(lambda: self._nonces.claim(key, until, self._clock.seconds(), share))

    def release_nonce(self, key: bytes) -> Deferred[None]:
        self._nonces.release(key)
        return succeed(None)

    def prune_nonces(self) -> Deferred[int]:
        return succeed(self._nonces.prune(self._clock.seconds()))

    @staticmethod
    def _answer(work: Callable[[], T]) -> Deferred[T]:
        try:
            return succeed(work())
        except MediatorError as error:
            return fail(error)

    def _update(
        self, owner: _Account, did: str, action: RecipientUpdateAction, max_recipients: int
    ) -> RecipientUpdateResult:
        holder = self._find_owner(did)
        if action == "add":
            if holder is owner:
                return "no_change"
            if holder is not None or len(owner.recipients) >= max_recipients:
                return "client_error"
            owner.recipients.append(did)
            return "success"
        if holder is not owner:
            return "no_change"
        owner.recipients.remove(did)
        self._forget_senders((owner, did))
        return "success"

    def _find_owner(self, did: str) -> _Account | None:
        return next((owner for owner in self._owners.values() if did in owner.recipients), None)

    def _find_queue(self, did: str) -> _Queue:
        """:raise UnknownRecipient: the DID is not registered."""
        owner = self._find_owner(did)
        if owner is None:
            raise UnknownRecipient()
        return owner, did

    def _find(self, ids: Iterable[str]) -> list[_Message]:
        """Messages by id, in the order of the ids."""
        by_id = {message.payload.id: message for message in self._messages}
        return [by_id[id] for id in dict.fromkeys(ids) if id in by_id]

    def _list(self, queue: _Queue) -> list[_Message]:
        return [message for message in self._messages if message.queue == queue]

    def _list_shown(self, account: str, recipient_did: str | None) -> list[_Message]:
        now = self._clock.seconds()
        return [
            message
            for message in self._messages
            if message.queue[0].account.did == account
            and recipient_did in (None, message.queue[1])
            and message.is_visible(now)
        ]

    def _list_delayed(self) -> list[_Message]:
        """Delayed messages that were not taken as due yet."""
        now = self._clock.seconds()
        return [
            message
            for message in self._messages
            if message.due_at is not None and max(message.due_at, now) < message.expires_at
        ]

    def _fits(self, payload: Payload) -> bool:
        return len(payload.data) <= self._limits.max_bytes

    def _refuse_full(self, deposits: Iterable[tuple[_Queue, EnqueueRequest]]) -> None:
        """:raise QueueFull: one of the enqueues, in order, is to be refused."""
        volume: dict[_Queue, tuple[MessageVolume, SenderUsage]] = {}
        for queue, one in deposits:
            if queue not in volume:
                queued = self._list(queue)
                volume[queue] = (
                    MessageVolume(len(queued), sum(message.size for message in queued)),
                    self._usage(queue),
                )
            whole, usage = volume[queue]
            amount = MessageVolume(len(one.payloads), sum(len(payload.data) for payload in one.payloads))
            whole.add(amount.messages, amount.size)
            if find_exceeded_limit(self._limits, whole.messages, whole.size) is not None:
                raise QueueFull()
            usage.check(one.origin, amount)
            usage.change(one.origin, amount.messages, amount.size)

    def _enqueue(self, queue: _Queue, one: EnqueueRequest) -> EnqueueResult:
        now = self._clock.seconds()
        incoming = [
            _Message(queue, payload, now, one.expires_at, one.due_at, one.origin, now if one.due_at is None else None)
            for payload in one.payloads
        ]
        fitting = [message for message in incoming if self._fits(message.payload)]
        evicted = self._evict(
            queue, one.origin, MessageVolume(len(fitting), sum(message.size for message in fitting))
        )
        oversize = [message.to_removed("fifo_bytes") for message in incoming if message not in fitting]
        self._messages += fitting
        self._ledger["accepted"] += len(incoming)
        self._ledger["evicted"] += len(oversize)
        return EnqueueResult(tuple(message.to_stored() for message in incoming), (*evicted, *oversize))

    def _evict(self, queue: _Queue, origin: int, volume: MessageVolume) -> list[RemovedMessage]:
        """Make room in a queue."""
        evicted: list[RemovedMessage] = []
        usage = (
            self._usage(queue) if needs_sender_usage(self._limits, origin) else SenderUsage(self._limits, frozenset())
        )
        while True:
            queued = self._list(queue)
            size = volume.size + sum(message.size for message in queued)
            reason = find_exceeded_limit(self._limits, volume.messages + len(queued), size)

            def list_group(group: SenderGroup, queued: Sequence[_Message] = queued) -> list[_Message]:
                return [message for message in queued if is_from_group(group, message.origin, usage.known)]

            def find_oldest(group: SenderGroup) -> int | None:
                return next((message.origin for message in list_group(group)), None)

            group = None if reason is None else usage.victim(origin, volume, find_oldest)
            if group is None:
                return evicted
            victim = list_group(group)[0]
            if len(usage):
                usage.change(victim.origin, -1, -victim.size)
            evicted.append(self._remove(victim, reason))

    def _usage(self, queue: _Queue) -> SenderUsage:
        known = self._senders[queue].known if queue in self._senders else frozenset()
        return SenderUsage(self._limits, known, ((message.origin, 1, message.size) for message in self._list(queue)))

    def _acknowledge(self, messages: Sequence[_Message]) -> list[RemovedMessage]:
        parties: dict[_Queue, set[int]] = {}
        for message in messages:
            if party := get_party(message.origin):
                parties.setdefault(message.queue, set()).add(party)
        for queue, some in parties.items():
            self._senders.setdefault(queue, KnownSenders()).acknowledged(some, self._clock.seconds())
        return [self._remove(message, None) for message in messages]

    def _remove(self, message: _Message, reason: RemovalReason | None) -> RemovedMessage:
        self._messages.remove(message)
        self._ledger[LEDGER_ENTRY_BY_REASON[reason]] += 1
        self._forget_senders(message.queue)
        return message.to_removed(reason)

    def _forget_senders(self, queue: _Queue) -> None:
        """Forget the known senders of an unregistered DID without messages."""
        owner, did = queue
        if did not in owner.recipients and not self._list(queue):
            self._senders.pop(queue, None)
