"""The messages of the memory store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import (
    Deposited,
    Payload,
    QueueLimits,
    QueueStatus,
    Reason,
    Removed,
    StoredMessage,
)
from mediatord.store.deadlines import Deadlines
from mediatord.store.ranking import Ranking


@dataclass(eq=False, slots=True)
class Entry:
    """
    One message with its place.

    :param shown: whether it is counted as visible: neither expired nor waiting to become due.
    """

    seq: int
    queue: Queue
    payload: Payload
    received_at: float
    expires_at: float
    due_at: float | None
    delivered: bool = False
    pushes: int = 0
    shown: bool = False

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
            status="delivered" if self.delivered else "pending",
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
    """What waits for one recipient DID of one account."""

    mailbox: Mailbox
    did: str
    lane: Lane = field(default_factory=Lane)


class Messages:
    """Every message, found by id, by expiry and by when it becomes visible."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._places = count(1)
        self._entries: dict[int, Entry] = {}
        self._seqs: dict[str, int] = {}
        self._expiry: Deadlines[int] = Deadlines()
        self._due: Deadlines[int] = Deadlines()
        self._turning: Deadlines[int] = Deadlines()  # when an entry is next shown or hidden
        self.ranking = Ranking()

    def turn(self, now: float) -> None:
        """Show what has become due and hide what has expired; to be called before anything is read."""
        while (seq := self._turning.take(now)) is not None:
            self._turn(self._entries[seq], now)

    def check_ids(self, payloads: Sequence[Payload]) -> None:
        """:raise StoreUnavailable: an id of one that will be kept was used before, or is used twice."""
        fitting = [payload for payload in payloads if len(payload.data) <= self._limits.max_bytes]
        ids = {payload.id for payload in fitting}
        if len(ids) < len(fitting) or ids & self._seqs.keys():
            raise StoreUnavailable()

    def deposit(
        self, queue: Queue, payloads: Sequence[Payload], *, now: float, expires_at: float, due_at: float | None
    ) -> Deposited:
        """Append to a queue and make room in it; too large ones are out again at once."""
        incoming = [Entry(0, queue, payload, now, expires_at, due_at) for payload in payloads]
        oversize = [entry.removed("fifo_bytes") for entry in incoming if entry.size > self._limits.max_bytes]
        newcomers = [entry for entry in incoming if entry.size <= self._limits.max_bytes]
        victims = list(self._victims(queue.lane, len(newcomers), sum(entry.size for entry in newcomers)))
        for entry in newcomers:
            self._add(entry)
        evicted = [self._remove(entry, reason) for entry, reason in victims]
        return Deposited(tuple(entry.message() for entry in incoming), (*evicted, *oversize))

    def fetch(self, lane: Lane, *, limit: int, max_bytes: int) -> list[StoredMessage]:
        """The oldest that are shown and fit, but at least one."""
        found: list[StoredMessage] = []
        size = 0
        for entry in lane.entries.values():
            if len(found) >= limit:
                break
            if not entry.shown:
                continue
            size += entry.size
            if found and size > max_bytes:
                break
            found.append(entry.message())
        return found

    def mark_delivered(self, ids: Iterable[str]) -> None:
        for entry in self._known(ids):
            entry.delivered = True
            entry.pushes += 1

    def mark_pending(self, ids: Iterable[str]) -> list[str]:
        delivered = [entry for entry in self._known(ids) if entry.delivered]
        for entry in delivered:
            entry.delivered = False
        return [entry.payload.id for entry in delivered]

    def remove(self, ids: Iterable[str]) -> list[Removed]:
        """Remove by id, whoever it belongs to."""
        return [self._remove(entry, None) for entry in self._known(ids)]

    def acknowledge(self, mailbox: Mailbox, ids: Iterable[str]) -> list[Removed]:
        """Remove by id or by digest from one mailbox; what is removed comes in order of arrival."""
        wanted = list(dict.fromkeys(ids))
        seqs = {entry.seq for entry in self._known(wanted) if entry.queue.mailbox is mailbox}
        for digest in wanted:
            seqs.update(mailbox.digests.get(digest, ()))
        return [self._remove(self._entries[seq], None) for seq in sorted(seqs)]

    def expire(self, now: float, limit: int) -> list[Removed]:
        removed: list[Removed] = []
        while len(removed) < limit and (seq := self._expiry.take(now)) is not None:
            removed.append(self._remove(self._entries[seq], "ttl"))
        return removed

    def next_due(self, now: float) -> float | None:
        while (first := self._due.earliest()) is not None:
            if self._entries[first[1]].expires_at > now:
                return first[0]
            self._due.discard(first[1])
        return None

    def take_due(self, now: float, limit: int) -> list[StoredMessage]:
        taken: list[StoredMessage] = []
        while len(taken) < limit and (seq := self._due.take(now)) is not None:
            entry = self._entries[seq]
            if entry.expires_at > now:
                taken.append(entry.message())
                entry.due_at = None
        return taken

    def _known(self, ids: Iterable[str]) -> list[Entry]:
        seqs = (self._seqs.get(id) for id in dict.fromkeys(ids))
        return [self._entries[seq] for seq in seqs if seq is not None]

    def _victims(self, lane: Lane, messages: int, size: int) -> Iterator[tuple[Entry, Reason]]:
        """The oldest, until so many messages of so many bytes fit beside the rest."""
        messages += len(lane.entries)
        size += lane.size
        for entry in lane.entries.values():
            if messages > self._limits.max_messages:
                yield entry, "fifo_count"
            elif size > self._limits.max_bytes:
                yield entry, "fifo_bytes"
            else:
                return
            messages -= 1
            size -= entry.size

    def _add(self, entry: Entry) -> None:
        entry.seq = seq = next(self._places)
        self._entries[seq] = entry
        self._seqs[entry.payload.id] = seq
        for lane in entry.lanes():
            lane.add(entry)
        digest = sha256(entry.payload.data).hexdigest()
        entry.queue.mailbox.digests.setdefault(digest, {})[seq] = None
        self.ranking.change(entry.queue.did, 1)
        self._expiry.add(seq, entry.expires_at)
        if entry.due_at is None:
            self._turn(entry, entry.received_at)
            return
        self._turning.add(seq, entry.due_at)
        if entry.due_at < entry.expires_at:
            self._due.add(seq, entry.due_at)

    def _turn(self, entry: Entry, now: float) -> None:
        """Show it if it has not expired, else hide it."""
        expired = entry.expires_at <= now
        if entry.shown == expired:
            entry.shown = not expired
            for lane in entry.lanes():
                lane.show(entry, 1 if entry.shown else -1)
        if not expired:
            self._turning.add(entry.seq, entry.expires_at)

    def _remove(self, entry: Entry, reason: Reason | None) -> Removed:
        seq = entry.seq
        del self._entries[seq]
        del self._seqs[entry.payload.id]
        for lane in entry.lanes():
            lane.remove(entry)
            if entry.shown:
                lane.show(entry, -1)
        mailbox = entry.queue.mailbox
        digest = sha256(entry.payload.data).hexdigest()
        del mailbox.digests[digest][seq]
        if not mailbox.digests[digest]:
            del mailbox.digests[digest]
        if not entry.queue.lane.entries:
            mailbox.queues.pop(entry.queue.did, None)
        self.ranking.change(entry.queue.did, -1)
        for deadlines in (self._expiry, self._due, self._turning):
            deadlines.discard(seq)
        return entry.removed(reason)
