"""The queues of the memory store."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from mediatord.interfaces import Payload, QueueStatus, Reason, Removed, StoredMessage
from mediatord.store.known_senders import KnownSenders


@dataclass(eq=False, slots=True)
class Entry:
    """
    One message with its place.

    :param node: boot of the node that delivered it; None while it is pending.
    :param shown: whether it is counted as visible: neither expired nor waiting to become due.
    :param arrived_at: when it came, or was handed out if it was delayed; None before.
    :param origin: see :class:`~mediatord.interfaces.QueueLimits`.
    """

    seq: int
    queue: Queue
    payload: Payload
    received_at: float
    expires_at: float
    due_at: float | None
    node: str | None = None
    pushes: int = 0
    shown: bool = False
    arrived_at: float | None = None
    origin: int = 0

    @property
    def size(self) -> int:
        return len(self.payload.data)

    def lanes(self) -> tuple[Lane, Lane]:
        """Where it is counted."""
        return self.queue.lane, self.queue.mailbox.lane

    def message(self) -> StoredMessage:
        return StoredMessage(
            id=self.payload.id,
            recipient_did=self.queue.did,
            account=self.queue.mailbox.did,
            payload=self.payload.data,
            form=self.payload.form,
            received_at=self.received_at,
            expires_at=self.expires_at,
            status="pending" if self.node is None else "delivered",
            due_at=self.due_at,
        )

    def removed(self, reason: Reason | None) -> Removed:
        return Removed(
            id=self.payload.id,
            recipient_did=self.queue.did,
            account=self.queue.mailbox.did,
            size=self.size,
            received_at=self.received_at,
            pushes=self.pushes,
            reason=reason,
        )


@dataclass(eq=False, slots=True)
class Lane:
    """
    Messages in order of arrival, and how many there are.

    :param size: bytes of all, shown or not.
    """

    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    size: int = 0
    shown: int = 0
    shown_size: int = 0

    def add(self, entry: Entry) -> None:
        self.entries[entry.seq] = entry
        self.size += entry.size

    def remove(self, entry: Entry) -> None:
        del self.entries[entry.seq]
        self.size -= entry.size

    def show(self, entry: Entry, difference: int) -> None:
        self.shown += difference
        self.shown_size += difference * entry.size

    def status(self) -> QueueStatus:
        if not self.shown:
            return QueueStatus(0, 0)
        oldest = next(entry for entry in self.entries.values() if entry.shown)
        newest = next(entry for entry in reversed(self.entries.values()) if entry.shown)
        return QueueStatus(self.shown, self.shown_size, oldest.received_at, newest.received_at)


@dataclass(eq=False, slots=True)
class Mailbox:
    """
    All that waits for one account: by recipient DID, together, and by digest.

    :param registered: the recipient DIDs of the account.
    :param senders: for each of them, and those for whom something still waits, whom it has acknowledged.
    """

    did: str
    queues: dict[str, Queue] = field(default_factory=dict)
    lane: Lane = field(default_factory=Lane)
    digests: dict[str, dict[int, None]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    senders: dict[str, KnownSenders] = field(default_factory=dict)

    def queue(self, recipient_did: str) -> Queue:
        return self.queues.setdefault(recipient_did, Queue(self, recipient_did))

    def tidy(self, recipient_did: str) -> None:
        """Forget whom a DID has acknowledged that is not registered and for which nothing waits."""
        queue = self.queues.get(recipient_did)
        if recipient_did not in self.registered and (queue is None or not queue.lane.entries):
            self.senders.pop(recipient_did, None)


@dataclass(eq=False, slots=True)
class Queue:
    """What waits for one recipient DID of one account."""

    mailbox: Mailbox
    did: str
    lane: Lane = field(default_factory=Lane)

    def add(self, entry: Entry) -> None:
        """It waits."""
        for lane in entry.lanes():
            lane.add(entry)

    def remove(self, entry: Entry) -> None:
        """It waits no longer."""
        for lane in entry.lanes():
            lane.remove(entry)
            if entry.shown:
                lane.show(entry, -1)


class Occupied:
    """Queues that are not empty, by DID: one that has changed hands may have several."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[Queue, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, queue: Queue) -> None:
        """It is not empty."""
        of_did = self._queues.setdefault(queue.did, {})
        self._count += queue not in of_did
        of_did[queue] = None

    def discard(self, queue: Queue) -> None:
        """It is empty."""
        of_did = self._queues[queue.did]
        del of_did[queue]
        self._count -= 1
        if not of_did:
            del self._queues[queue.did]

    def of(self, did: str) -> list[Queue]:
        """All of a DID."""
        return list(self._queues.get(did, ()))
