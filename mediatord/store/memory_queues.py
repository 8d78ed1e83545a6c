"""The queues of the memory store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mediatord.interfaces import Payload, QueueStatus, Reason, Removed, StoredMessage


@dataclass(eq=False, slots=True)
class Entry:
    """
    One message with its place.

    :param node: boot of the node that delivered it; None while it is pending.
    :param shown: whether it is counted as visible: neither expired nor waiting to become due.
    :param arrived_at: when it came, or was handed out if it was delayed; None before.
    :param parties: that it counts for, see :mod:`mediatord.store.shares`.
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
    parties: Sequence[int] = ()

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
    """All that waits for one account: by recipient DID, together, and by digest."""

    did: str
    queues: dict[str, Queue] = field(default_factory=dict)
    lane: Lane = field(default_factory=Lane)
    digests: dict[str, dict[int, None]] = field(default_factory=dict)

    def queue(self, recipient_did: str) -> Queue:
        return self.queues.setdefault(recipient_did, Queue(self, recipient_did))


@dataclass(eq=False, slots=True)
class Queue:
    """
    What waits for one recipient DID of one account.

    :param parties: what there is of each, which is something.
    """

    mailbox: Mailbox
    did: str
    lane: Lane = field(default_factory=Lane)
    parties: dict[int, Lane] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """It waits."""
        for lane in entry.lanes():
            lane.add(entry)
        for party in entry.parties:
            self.parties.setdefault(party, Lane()).add(entry)

    def remove(self, entry: Entry) -> None:
        """It waits no longer."""
        for lane in entry.lanes():
            lane.remove(entry)
            if entry.shown:
                lane.show(entry, -1)
        for party in entry.parties:
            self.parties[party].remove(entry)
            if not self.parties[party].entries:
                del self.parties[party]


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
