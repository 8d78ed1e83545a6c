"""
Ids that mediatord gives out.

Opaque messages waiting for their recipients (UC-021 "Message model").
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twisted.internet.defer import Deferred
from zope.interface import Interface

from mediatord.errors import MediatorError

_RANDOM_BLOCK_BYTES = 4_000


def new_stored_message_id(now: float) -> str:
    """
    Id of a stored message: 32 hexadecimal digits, unguessable, in order of time so that indexes grow at their end.

    :param now: seconds since the epoch.
    """
    return f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}{_random_bytes(10).hex()}"


class _RandomBytePool:
    """
    Random bytes of the kernel, fetched many at a time: each time it is asked, the interpreter's lock is let go. None
    is given out twice, nor to two processes.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self, number: int) -> bytes:
        """So many bytes."""
        start, end = self._used, self._used + number
        if end > len(self._bytes):
            self._bytes, start, end = os.urandom(_RANDOM_BLOCK_BYTES), 0, number
        self._used = end
        return self._bytes[start:end]

    def _forget(self) -> None:
        self._bytes, self._used = b"", 0


_random_bytes = _RandomBytePool()


def new_didcomm_message_id() -> str:
    """Id of a DIDComm message that we write."""
    return str(uuid.uuid4())


PayloadForm = Literal["json", "base64"]
DeliveryStatus = Literal["pending", "delivered"]
RemovalReason = Literal["ttl", "fifo_count", "fifo_bytes"]
FullQueuePolicy = Literal["oldest", "refuse"]


@dataclass(slots=True)
class Payload:
    """
    One opaque message to be queued.

    :param form: how the sender attached it, so that it can be handed over the same way (D10).
    """

    id: str
    data: bytes = field(repr=False)
    form: PayloadForm


@dataclass(slots=True)
class EnqueueRequest:
    """Arguments of one :meth:`IMessageStore.enqueue`."""

    recipient_did: str
    payloads: tuple[Payload, ...]
    expires_at: float
    due_at: float | None = None
    origin: int = 0


@dataclass(slots=True)
class StoredMessage:
    """
    A message waiting for its recipient (UC-021 "Message model"). The sender is never kept.

    :param recipient_did: as it was registered.
    :param account: DID of the account that the recipient DID was registered by on arrival.
    :param status: `delivered` means pushed, not yet acknowledged.
    :param due_at: before this time nobody sees it (`delay_milli`); None when not delayed.
    """

    id: str
    recipient_did: str
    account: str
    payload: bytes = field(repr=False)
    form: PayloadForm
    received_at: float
    expires_at: float
    status: DeliveryStatus = "pending"
    due_at: float | None = None


@dataclass(slots=True)
class RemovedMessage:
    """
    A message that left the queue, without its payload.

    :param size: bytes of its payload.
    :param pushes: how often it was marked delivered.
    """

    id: str
    recipient_did: str
    account: str
    size: int
    received_at: float
    pushes: int
    reason: RemovalReason | None = None


@dataclass(frozen=True, slots=True)
class MessageArrival:
    """
    That something came and can be pushed.

    :param did: whom it is for.
    :param at: when; of a message that was delayed, when :meth:`IMessageStore.take_due_messages` handed it out.
    """

    id: str
    did: str
    at: float


@dataclass(frozen=True, slots=True)
class ArrivalWindow:
    """
    The time of some arrivals, which come in order of time, and those of the same time in order of their ids.

    :param until: exclusive.
    :param after: of what came at `since` exactly, only what has a greater id.
    """

    since: float
    until: float
    after: str = ""

    def has(self, at: float, id_: str) -> bool:
        """Whether it is one of them."""
        return self.since <= at < self.until and (at > self.since or id_ > self.after)

    def behind(self, last: MessageArrival) -> ArrivalWindow:
        """What is left of it behind an arrival."""
        return ArrivalWindow(last.at, self.until, last.id)


@dataclass(slots=True)
class EnqueueResult:
    """What :meth:`IMessageStore.enqueue` did: the stored messages in order, and what had to make room."""

    messages: tuple[StoredMessage, ...]
    evicted: tuple[RemovedMessage, ...]


# Takes the places of several deposits and what each of them came to.
EarlyResultCallback = Callable[[Sequence[tuple[int, EnqueueResult | MediatorError]]], None]


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """
    What waits (reference section 6): expired and not yet due messages are left out, pushed ones are in.

    :param oldest_received_time: None, like the newest, when nothing waits.
    """

    message_count: int
    total_bytes: int
    oldest_received_time: float | None = None
    newest_received_time: float | None = None


@dataclass(slots=True)
class AcknowledgementResult:
    """
    What :meth:`~mediatord.store.interfaces.store.IStore.acknowledge_once` did.

    :param removed: messages that were there, in order of arrival.
    :param status: of all queues of the account afterwards; None if it was not wanted.
    """

    removed: list[RemovedMessage]
    status: QueueStatus | None = None


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """
    Per recipient DID: at most `max_messages` and `max_bytes` (UC-021 AF-4).

    A deposit has an *origin*: 63 bits, of which the upper 31 stand for the network that it came from and the lower 32
    for its sender, 0 in either half where that is not known (:func:`mediatord.ratelimit.sender_fingerprint`). Either half is one
    *party* with all that waits in this queue and has the same half.

    Senders have a *rank* by what is scarce: the lowest are those of whom nothing but a network is proven, then those
    who have proven a DID, which anybody can make, and the highest those whom the recipient has acknowledged before
    (:class:`~mediatord.store.fair_share.KnownSenders`): a proven DID, or the network of an anonymous one.

    * `oldest`: while a deposit makes a queue exceed a limit, one message that was there before makes room: the oldest
      of its sender, if that party, with what comes now, has more than `share` of `max_messages` or of `max_bytes`;
      else the oldest of its rank and network, if that has; else one of the lowest rank that has more than `reserved`,
      or of the lowest that has anything if none has: the oldest of the network that has most of it, and of networks
      that have the same the oldest of the rank. So nobody can push the mail of others out of a queue by filling it,
      and one sender alone has a FIFO.
    * `refuse`: a deposit that would exceed a limit is refused as a whole, and so is one after which a party that is
      known would have more than `share` of one of them, or all below the highest rank more than all but `reserved`,
      if there is anybody whom the recipient knows.

    :param share: of a queue, for one party; 1 for no such rule.
    :param reserved: of a queue, for each rank at least; 0 for no ranks, so that all are of one and the oldest goes.
    """

    max_messages: int = 1000
    max_bytes: int = 67_108_864
    when_full: FullQueuePolicy = "oldest"
    share: float = 1.0
    reserved: float = 0.0


@dataclass(frozen=True, slots=True)
class MessageLedger:
    """
    What became of all messages that a store has ever accepted, of one half. Kept by the very transactions that accept
    and remove messages, so no crash makes it wrong.

    :param accepted: stored for a recipient, those that were evicted by their own deposit among them.
    :param acknowledged: by the recipient, or taken by an endpoint.
    :param expired: at the end of their time.
    :param evicted: to make room.
    :param removed: by the operator (`queue purge`).
    :param withdrawn: accepted by a commit whose answer was lost, so that the sender was refused, and taken out again.
    :param waiting: rows that are there, counted one by one and not by these numbers; None where there are too many.
    """

    accepted: int = 0
    acknowledged: int = 0
    expired: int = 0
    evicted: int = 0
    removed: int = 0
    withdrawn: int = 0
    waiting: int | None = 0

    @property
    def difference(self) -> int | None:
        """What is accounted for nowhere, or twice; 0 if all is well, None where it is not known what waits."""
        if self.waiting is None:
            return None
        gone = self.acknowledged + self.expired + self.evicted + self.removed + self.withdrawn
        return self.accepted - gone - self.waiting


@dataclass(frozen=True, slots=True)
class StoreLedger:
    """The ledgers of both halves, as of one moment. Of Decentrl it is pending events that count as messages."""

    didcomm: MessageLedger = MessageLedger()
    decentrl: MessageLedger = MessageLedger()


@dataclass(frozen=True, slots=True)
class QueueTotals:
    """
    All that waits, messages and pending events, whether visible or not.

    :param messages: of very many, what the store's server says, which may be a little wrong.
    :param bytes: of their payloads; None, like `recipients`, where finding out would be too much work.
    :param recipients: queues that are not empty; who has one in each half counts twice.
    :param oldest_received_at: of what arrived first; None when nothing waits.
    """

    messages: int
    bytes: int | None
    recipients: int | None
    oldest_received_at: float | None


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """
    What waits and came in one span of time.

    :param messages: messages and pending events; at least so many if that is not all.
    :param bytes: of their payloads; None where finding out would be too much work.
    :param exact: whether it is all.
    """

    messages: int
    bytes: int | None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class LargeQueue:
    """
    All that waits for a DID, in both halves.

    :param oldest_received_at: of what arrived first; None when it is gone by now.
    """

    recipient_did: str
    messages: int
    bytes: int
    oldest_received_at: float | None


@dataclass(frozen=True, slots=True)
class QueueBacklog:
    """
    What waits, by age and by queue, whether visible or not.

    :param messages: all messages and pending events, those that wait by the ledger; of very many, as in
        :class:`Waiting`.
    :param bytes: of their payloads; None where finding out would be too much work.
    :param cohorts: the youngest first, one for each bound and one for what is older than the last.
    :param largest: the largest queues, largest first.
    :param books: the ledger, as of the same moment.
    """

    messages: int
    bytes: int | None
    cohorts: tuple[AgeBucket, ...]
    largest: tuple[LargeQueue, ...]
    books: StoreLedger = StoreLedger()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """
    What a scrape shows of the store, as of one moment.

    :param largest: the largest queues as (recipient DID, messages), largest first.
    :param other: messages in all other queues.
    """

    largest: tuple[tuple[str, int], ...]
    other: int
    books: StoreLedger


class IMessageStore(Interface):
    """Opaque messages waiting for their recipients, in order of arrival."""

    def enqueue(
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        """
        Append all payloads in order or none, evicting messages of the recipient in the same transaction while it is
        over its :class:`QueueLimits`. Delayed messages count against them too. A newly deposited message is never
        evicted by its own deposit unless it alone is over `max_bytes`, or the deposit is more than a queue may have.

        Fires once everything is durable. `received_at` is the store's clock.

        :param origin: as :class:`QueueLimits` has it.
        :raise UnknownRecipient: nobody has registered `recipient_did` (an exact match); nothing was stored.
        :raise QueueFull: by `when_full` refuse; nothing was stored.
        """

    def enqueue_each(
        deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        """
        Several deposits that have nothing to do with each other, as :meth:`enqueue` each; fires when all are done,
        with what each of them would fire with, in order: an error in place of what could not be done.

        :param early: called with those that are done, or could not be done, while others are still waiting; each is
            told of once at most.
        :raise StoreUnavailable: nothing was stored.
        """

    def enqueue_all(deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        """
        Several deposits in order, all or none of them, as :meth:`enqueue`.

        :raise UnknownRecipient: one of the DIDs is not registered; nothing was stored.
        """

    def fetch_messages(
        account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        """
        The oldest visible messages of an account, of one of its recipient DIDs or of all (None), at most `limit`,
        and no more than fit in `max_bytes` of payload, but at least one if there is one. Changes nothing.
        """

    def get_queue_status(account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        """What waits for an account, or for one of its recipient DIDs."""

    def find_messages(ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        """
        The visible messages with these ids in order of arrival, but no more than the first that fit in
        :data:`~mediatord.store.interfaces.decentrl.MAX_PAGE_BYTES` bytes of payload, and at least one if there is one.
        """

    def find_arrivals(
        accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        """
        What came for these accounts in a time and still waits: the first `limit` of it, or less if there is no more.
        Whether it was pushed, or has expired meanwhile, does not count; what is delayed has not come before
        :meth:`take_due_messages` has handed it out.
        """

    def mark_delivered(ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        """
        Messages that were pushed and not yet acknowledged become `delivered`; unknown ids are ignored.

        :param node: boot of the node that pushed them (:class:`~mediatord.store.interfaces.cluster.ClusterNode`); the last one
            counts.
        """

    def mark_pending(ids: Sequence[str]) -> Deferred[list[str]]:
        """Delivered messages become `pending` again (UC-021 AF-6); fires with the ids that were delivered."""

    def remove_messages(ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """Remove the messages with these ids, whoever they belong to by now; unknown ids are ignored."""

    def acknowledge(account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """
        Remove the messages of this account with these ids, or whose payload has this lower-case hexadecimal SHA-256
        (reference 6.1). Unknown and foreign ids are ignored. Fires once that is durable.
        """

    def expire_messages(limit: int) -> Deferred[list[RemovedMessage]]:
        """Remove at most `limit` messages whose `expires_at` has come (UC-021 AF-5)."""

    def find_next_due() -> Deferred[float | None]:
        """When the earliest delayed message becomes visible."""

    def take_due_messages(limit: int) -> Deferred[list[StoredMessage]]:
        """
        Delayed messages, oldest due first, that have become visible since they were last asked for. From then on
        :meth:`find_arrivals` has them, so that they are not lost if whoever asked is.
        """

    def queue_sizes(top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        """The `top` largest queues as (recipient DID, messages), largest first, and the sum of all others."""

    def read_statistics(top: int) -> Deferred[StoreStatistics]:
        """
        As :meth:`queue_sizes` and :meth:`read_ledger`, of one moment, so that the queues add up to what waits by the
        ledger; where that is not counted, they add up to what the store's server says.
        """

    def read_ledger() -> Deferred[StoreLedger]:
        """
        What became of all that was ever accepted. Asked every minute by each process: what waits is counted where no
        commit waits for that, and of more messages than can be counted in a second or so it is None.
        """

    def get_queue_totals() -> Deferred[QueueTotals]:
        """
        All that waits for anybody. Asked every minute: what it costs depends on the number of recipients, and of
        those only up to some, never on that of messages.
        """

    def read_backlog(bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        """
        What waits by the time that it came, and the `top` largest queues, with the ledger of the same moment. Only so
        much of each cohort is counted, and the ledger as in :meth:`read_ledger`; the rest depends on the number of
        recipients, and of those only up to some, not on that of messages.

        :param bounds: times, latest first: of the first cohort came at the first of them or later, of the next at the
            second or later and before the first, and so on. What is kept on disk is found by its ids, which begin
            with the time (:func:`~mediatord.store.interfaces.messages.new_stored_message_id`).
        """
