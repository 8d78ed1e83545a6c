"""Queued DIDComm messages (UC-021 "Message model"), their ids, and the ledger of what became of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
    Random bytes of the kernel, read in blocks, since each read releases the interpreter's lock. No byte is returned
    twice, nor by two processes.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self, number: int) -> bytes:
        """Random bytes."""
        start, end = self._used, self._used + number
        if end > len(self._bytes):
            self._bytes, start, end = os.urandom(_RANDOM_BLOCK_BYTES), 0, number
        self._used = end
        return self._bytes[start:end]

    def _forget(self) -> None:
        self._bytes, self._used = b"", 0


_random_bytes = _RandomBytePool()
_UUID_VARIANTS = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


def new_didcomm_message_id() -> str:
    """Id of a DIDComm message that mediatord writes: a random UUID (RFC 9562, version 4)."""
    text = _random_bytes(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{_UUID_VARIANTS[text[16]]}{text[17:20]}-{text[20:]}"


PayloadForm = Literal["json", "base64"]
DeliveryStatus = Literal["pending", "delivered"]
RemovalReason = Literal["ttl", "fifo_count", "fifo_bytes"]
FullQueuePolicy = Literal["oldest", "refuse"]


@dataclass(slots=True)
class Payload:
    """
    One opaque message to be queued.

    :param form: how the sender attached it, so that it can be delivered in the same form (D10).
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
    A queued message (UC-021 "Message model"). The sender is never stored.

    :param recipient_did: canonical form of the recipient DID.
    :param account: DID of the account that had registered the recipient DID on arrival.
    :param status: `delivered` means pushed, not yet acknowledged.
    :param due_at: the message is invisible before this time (`delay_milli`); None when not delayed.
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
    A message that was removed from its queue, without its payload.

    :param size: bytes of its payload.
    :param pushes: how often it was marked delivered.
    :param reason: None for an acknowledgement or removal by id.
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
    A message or event that arrived and can be pushed.

    :param did: its account or recipient.
    :param at: when it arrived; for a delayed message, when :meth:`IMessageStore.take_due_messages` returned it.
    """

    id: str
    did: str
    at: float


@dataclass(frozen=True, slots=True)
class ArrivalWindow:
    """
    A range of arrivals, which are ordered by time and then by id.

    :param until: exclusive.
    :param after: of arrivals at `since` exactly, only those with a greater id.
    """

    since: float
    until: float
    after: str = ""

    def has(self, at: float, id_: str) -> bool:
        """Whether an arrival is in the window."""
        return self.since <= at < self.until and (at > self.since or id_ > self.after)

    def behind(self, last: MessageArrival) -> ArrivalWindow:
        """The rest of the window, behind an arrival."""
        return ArrivalWindow(last.at, self.until, last.id)


@dataclass(slots=True)
class EnqueueResult:
    """Result of :meth:`IMessageStore.enqueue`: the stored messages in order, and those that were evicted."""

    messages: tuple[StoredMessage, ...]
    evicted: tuple[RemovedMessage, ...]


# Takes pairs of the index of an enqueue and its result.
EarlyResultCallback = Callable[[Sequence[tuple[int, EnqueueResult | MediatorError]]], None]


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """
    Messages of a queue (reference section 6), without expired and delayed ones, with delivered ones.

    :param oldest_received_time: None, like the newest, when there are none.
    """

    message_count: int
    total_bytes: int
    oldest_received_time: float | None = None
    newest_received_time: float | None = None


# Of a SHA-256 in hexadecimal, which stands for a message in acknowledgements.
PAYLOAD_DIGEST_LENGTH = 64


class AcknowledgementRequest(NamedTuple):
    """
    An acknowledgement of messages of an account.

    :param with_status: whether the result has the status of all queues of the account.
    """

    account: str
    ids: Sequence[str]
    with_status: bool = False


@dataclass(slots=True)
class AcknowledgementResult:
    """
    What :meth:`IMessageStore.acknowledge_each` did.

    :param removed: messages that were there, in order of arrival.
    :param status: of all queues of the account afterwards; None if it was not wanted, or could not be read.
    """

    removed: list[RemovedMessage]
    status: QueueStatus | None = None


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """
    Limits of the queue of one recipient DID (UC-021 AF-4), and the policy when it is full.

    The *origin* of an enqueue is a number of 63 bits, of which the upper 31 stand for its network and the lower 32
    for its sender, 0 in either half where that is unknown (:mod:`mediatord.didcomm.forward_router`). Each half
    is a *party*, which has all messages of the queue with the same half.

    Senders have a *rank*: the lowest are anonymous, with nothing proven but a network; then those that have proven a
    DID, which anybody can create; the highest those that the recipient has acknowledged before
    (:class:`~mediatord.store.fair_share.KnownSenders`): a proven DID, or the network of an anonymous sender.

    * `oldest`: while an enqueue makes a queue exceed a limit, one earlier message is evicted: the oldest of its
      sender, if that party, with the new messages, has more than `share` of `max_messages` or of `max_bytes`; else
      the oldest of its rank and network, if that has; else one of the lowest rank that has more than `reserved`, or
      of the lowest that has any if none has: the oldest of the network that has most of it, and of networks that have
      the same the oldest of the rank. So nobody can displace the messages of others by filling a queue, and a single
      sender has a FIFO.
    * `refuse`: an enqueue that would exceed a limit is refused as a whole, and so is one after which a party would
      have more than `share` of one of them, or all ranks below the highest more than all but `reserved`, if the
      recipient has known senders.

    :param share: of a queue, for one party; 1 for no limit.
    :param reserved: of a queue, for each rank at least; 0 for no ranks, so that the oldest message is evicted.
    """

    max_messages: int = 1000
    max_bytes: int = 67_108_864
    when_full: FullQueuePolicy = "oldest"
    share: float = 1.0
    reserved: float = 0.0


LedgerEntry = Literal["accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn"]
LEDGER_ENTRIES: tuple[LedgerEntry, ...] = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn")


@dataclass(frozen=True, slots=True)
class MessageLedger:
    """
    What became of all messages of one protocol that a store has ever accepted. Written by the transactions that
    accept and remove messages, so that no crash makes it wrong.

    :param accepted: stored for a recipient, including those evicted by their own enqueue.
    :param acknowledged: by the recipient, or accepted by an endpoint.
    :param expired: at the end of their lifetime.
    :param evicted: to make room.
    :param removed: by the operator (`queue purge`).
    :param withdrawn: accepted by a commit whose result was lost, so that the sender was refused, and removed again.
    :param waiting: rows in the queues, counted independently of these numbers; None where there are too many.
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
        """
        Messages that are accounted for nowhere, or twice; 0 if the ledger balances, None where `waiting` is unknown.
        """
        if self.waiting is None:
            return None
        gone = self.acknowledged + self.expired + self.evicted + self.removed + self.withdrawn
        return self.accepted - gone - self.waiting


@dataclass(frozen=True, slots=True)
class StoreLedger:
    """The ledgers of both protocols, as of one moment. Of Decentrl, pending events count as messages."""

    didcomm: MessageLedger = MessageLedger()
    decentrl: MessageLedger = MessageLedger()


@dataclass(frozen=True, slots=True)
class QueueTotals:
    """
    All queued messages and pending events, whether visible or not.

    :param messages: if there are very many, an estimate by the store's server.
    :param bytes: of their payloads; None, like `recipients`, where counting would be too expensive.
    :param recipients: queues that are not empty; a DID with a queue in each protocol counts twice.
    :param oldest_received_at: time of the first arrival; None when nothing is queued.
    """

    messages: int
    bytes: int | None
    recipients: int | None
    oldest_received_at: float | None


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """
    Queued messages and pending events that arrived in one range of time.

    :param messages: their number; a lower bound if `exact` is False.
    :param bytes: of their payloads; None where counting would be too expensive.
    """

    messages: int
    bytes: int | None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class LargeQueue:
    """
    Everything that is queued for a DID, in both protocols.

    :param oldest_received_at: time of the first arrival; None when it has been removed meanwhile.
    """

    recipient_did: str
    messages: int
    bytes: int
    oldest_received_at: float | None


@dataclass(frozen=True, slots=True)
class QueueBacklog:
    """
    Queued messages by age and by queue, whether visible or not.

    :param messages: all messages and pending events, as counted by the ledger; if there are very many, as in
        :class:`QueueTotals`.
    :param bytes: of their payloads; None where counting would be too expensive.
    :param buckets: youngest first, one for each bound and one for everything older than the last.
    :param largest: the largest queues, largest first.
    :param ledger: the ledger, as of the same moment.
    """

    messages: int
    bytes: int | None
    buckets: tuple[AgeBucket, ...]
    largest: tuple[LargeQueue, ...]
    ledger: StoreLedger = StoreLedger()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """
    Queue sizes and ledger for the metrics, as of one moment.

    :param largest: the largest queues as (recipient DID, messages), largest first.
    :param other: messages in all other queues.
    """

    largest: tuple[tuple[str, int], ...]
    other: int
    ledger: StoreLedger


class IMessageStore(Interface):
    """Queues of opaque messages, in order of arrival."""

    def enqueue(
        recipient_did: str,
        payloads: Sequence[Payload],
        *,
        expires_at: float,
        due_at: float | None = None,
        origin: int = 0,
    ) -> Deferred[EnqueueResult]:
        """
        Append all payloads in order or none, evicting messages of the recipient in the same transaction while its
        queue exceeds :class:`QueueLimits`. Delayed messages count too. A new message is never evicted by its own
        enqueue unless it alone exceeds `max_bytes`, or the enqueue is more than a queue may have.

        Fires once everything is durable. `received_at` is the store's clock.

        :param origin: as for :class:`QueueLimits`.
        :raise UnknownRecipient: `recipient_did` is not registered; nothing was stored.
        :raise QueueFull: by `when_full` refuse; nothing was stored.
        """

    def enqueue_each(
        deposits: Sequence[EnqueueRequest], early: EarlyResultCallback | None = None
    ) -> Deferred[list[EnqueueResult | MediatorError]]:
        """
        Several independent enqueues, as :meth:`enqueue` each; fires when all are done, with their results in order:
        an error for each that failed.

        :param early: called with results while others are missing; each is passed once at most.
        :raise StoreUnavailable: nothing was stored.
        """

    def enqueue_all(deposits: Sequence[EnqueueRequest]) -> Deferred[list[EnqueueResult]]:
        """
        Several enqueues in order, all or none of them, as :meth:`enqueue`.

        :raise UnknownRecipient: one of the DIDs is not registered; nothing was stored.
        """

    def fetch_messages(
        account: str, recipient_did: str | None, *, limit: int, max_bytes: int
    ) -> Deferred[list[StoredMessage]]:
        """
        The oldest visible messages of an account, of one of its recipient DIDs or of all (None), at most `limit`, and
        no more than fit in `max_bytes` of payload, but at least one if there is one. Changes nothing.
        """

    def get_queue_status(account: str, recipient_did: str | None) -> Deferred[QueueStatus]:
        """Status of the queues of an account, or of one of its recipient DIDs."""

    def find_messages(ids: Sequence[str]) -> Deferred[list[StoredMessage]]:
        """
        Visible messages with these ids in order of arrival, but no more than the first that fit in
        :data:`~mediatord.store.interfaces.decentrl.MAX_PAGE_BYTES` bytes of payload, and at least one if there is
        one.
        """

    def find_arrivals(
        accounts: Sequence[str], window: ArrivalWindow, *, limit: int
    ) -> Deferred[list[MessageArrival]]:
        """
        Queued messages of these accounts that arrived in a window; fewer than `limit` only if there are no more.
        Delivered and expired ones are included; delayed ones have not arrived before :meth:`take_due_messages` has
        returned them.
        """

    def mark_delivered(ids: Sequence[str], *, node: str = "") -> Deferred[None]:
        """
        Record that messages were pushed and not yet acknowledged; unknown ids are ignored.

        :param node: boot of the node that pushed them, see
            :class:`~mediatord.store.interfaces.cluster_and_quotas.ClusterNode`; the last one counts.
        """

    def mark_pending(ids: Sequence[str]) -> Deferred[list[str]]:
        """Make delivered messages `pending` again (UC-021 AF-6); fires with the ids that were delivered."""

    def remove_messages(ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """Remove the messages with these ids, of any account; unknown ids are ignored."""

    def acknowledge(account: str, ids: Sequence[str]) -> Deferred[list[RemovedMessage]]:
        """
        Remove the messages of this account with these ids, or whose payload has this lower-case hexadecimal SHA-256
        (reference 6.1). Ids that are unknown or of others are ignored. Fires once that is durable.
        """

    def acknowledge_each(
        requests: Sequence[AcknowledgementRequest],
    ) -> Deferred[list[AcknowledgementResult | MediatorError]]:
        """
        Several independent acknowledgements, as :meth:`acknowledge` each; fires when all are durable, with their
        results in order: an error for each that failed.

        :raise StoreUnavailable: nothing was removed.
        """

    def expire_messages(limit: int) -> Deferred[list[RemovedMessage]]:
        """Remove at most `limit` messages whose `expires_at` has passed (UC-021 AF-5)."""

    def find_next_due() -> Deferred[float | None]:
        """When the earliest delayed message becomes visible."""

    def take_due_messages(limit: int) -> Deferred[list[StoredMessage]]:
        """
        Delayed messages, oldest due first, that have become visible since the last call. From then on
        :meth:`find_arrivals` returns them, so that they are not lost if the caller is.
        """

    def queue_sizes(top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        """The `top` largest queues as (recipient DID, messages), largest first, and the messages in all others."""

    def read_statistics(top: int) -> Deferred[StoreStatistics]:
        """
        Results of :meth:`queue_sizes` and :meth:`read_ledger` of one moment, so that the queues add up to what the
        ledger has as waiting; where that is not counted, to the estimate of the store's server.
        """

    def read_ledger() -> Deferred[StoreLedger]:
        """
        The ledger. Called every minute by each process: rows are counted where no commit waits for it; if there are
        more than can be counted in about a second, their number is None.
        """

    def get_queue_totals() -> Deferred[QueueTotals]:
        """
        Totals of all queues. Called every minute: the cost depends on the number of recipients, up to a limit, never
        on that of messages.
        """

    def read_backlog(bounds: Sequence[float], top: int) -> Deferred[QueueBacklog]:
        """
        Queued messages by age, and the `top` largest queues, with the ledger of the same moment. Cohorts and ledger
        are counted up to limits; the rest of the cost depends on the number of recipients, up to a limit, not on that
        of messages.

        :param bounds: times, latest first: the first bucket arrived at the first of them or later, the next at the
            second or later and before the first, and so on. Rows on disk are found by their ids, which begin with the
            time (:func:`~mediatord.store.interfaces.messages.new_stored_message_id`).
        """


def is_valid_unicode(text: str) -> bool:
    """Whether a text can be encoded; one with half of a surrogate pair cannot, so no row has it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def filter_valid_ids(ids: Iterable[str]) -> tuple[str, ...]:
    """Distinct ids that a row can have; an invalid one would make a query for all of them fail."""
    distinct = dict.fromkeys(ids)
    if "".join(distinct).isascii():
        return tuple(distinct)
    return tuple([id_ for id_ in distinct if is_valid_unicode(id_)])
