"""The messages of the memory store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import accumulate, count

from mediatord.errors import StoreUnavailable
from mediatord.interfaces import (
    Arrival,
    Cohort,
    Deposit,
    Deposited,
    Ledger,
    QueueLimits,
    Reason,
    Removed,
    StoredMessage,
    Waiting,
    Window,
)
from mediatord.interfaces.decentrl import LARGEST_SLICE
from mediatord.store.backlog import completed, earliest, grouped
from mediatord.store.books import ENTRY_OF
from mediatord.store.deadlines import Deadlines
from mediatord.store.known_senders import KnownSenders
from mediatord.store.memory_queues import Entry, Lane, Mailbox, Occupied, Queue
from mediatord.store.memory_room import Room
from mediatord.store.ranking import Ranking
from mediatord.store.shares import party_of

# Messages, and events, that are looked at to tell how old what waits is: it is done in the reactor's thread.
LOOKED_AT = 20_000


class Messages:
    """Every message, found by id, by expiry and by when it becomes visible."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._room = Room(limits)
        self._places = count(1)
        self._entries: dict[int, Entry] = {}
        self._seqs: dict[str, int] = {}
        self._expiry: Deadlines[int] = Deadlines()
        self._due: Deadlines[int] = Deadlines()
        self._turning: Deadlines[int] = Deadlines()  # when an entry is next shown or hidden
        self._delivered: dict[str, dict[int, None]] = {}
        self._occupied = Occupied()
        self._size = 0
        self._ledger: Counter[str] = Counter()
        self.ranking = Ranking()

    def turn(self, now: float) -> None:
        """Show what has become due and hide what has expired; to be called before anything is read."""
        while (seq := self._turning.take(now)) is not None:
            self._turn(self._entries[seq], now)

    def check(self, deposits: Sequence[tuple[Queue, Deposit]]) -> None:
        """
        :raise QueueFull: one of these deposits is to be refused.
        :raise StoreUnavailable: an id of one that will be kept was used before, or is used twice.
        """
        self._room.check(deposits)
        fitting = [payload for _, one in deposits for payload in one.payloads if self._room.fits(payload)]
        ids = {payload.id for payload in fitting}
        if len(ids) < len(fitting) or ids & self._seqs.keys():
            raise StoreUnavailable()

    def deposit(self, queue: Queue, one: Deposit, now: float) -> Deposited:
        """Append to a queue and make room in it; too large ones are out again at once."""
        incoming = [
            Entry(0, queue, payload, now, one.expires_at, one.due_at, origin=one.origin) for payload in one.payloads
        ]
        newcomers = [entry for entry in incoming if self._room.fits(entry.payload)]
        oversize = [entry.removed("fifo_bytes") for entry in incoming if not self._room.fits(entry.payload)]
        size = sum(entry.size for entry in newcomers)
        victims = self._room.victims(queue, one.origin, len(newcomers), size)
        evicted = [self._remove(entry, reason) for entry, reason in victims]
        for entry in newcomers:
            self._add(entry)
        self._ledger["accepted"] += len(incoming)
        self._ledger["evicted"] += len(oversize)
        return Deposited(tuple(entry.message() for entry in incoming), (*evicted, *oversize))

    def ledger(self) -> Ledger:
        """What became of all of them."""
        return Ledger(**self._ledger, waiting=len(self._entries))

    def waiting(self) -> Waiting:
        """All of them."""
        oldest = next(iter(self._entries.values()), None)
        return Waiting(len(self._entries), self._size, len(self._occupied), oldest.received_at if oldest else None)

    def cohorts(self, bounds: Sequence[float]) -> list[Cohort]:
        """All of them by the time that they came."""
        found = ((entry.received_at, entry.size) for entry in reversed(self._entries.values()))
        return completed(grouped(found, bounds, LOOKED_AT), len(self._entries), self._size)

    def queue(self, did: str) -> tuple[int, float | None]:
        """Bytes that wait for a DID, whoever has it or had it, and since when."""
        lanes = [queue.lane for queue in self._occupied.of(did)]
        times = [next(iter(lane.entries.values())).received_at for lane in lanes]
        return sum([lane.size for lane in lanes]), earliest(*times)

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

    def find(self, ids: Iterable[str]) -> list[StoredMessage]:
        """Those that are shown, in order of arrival."""
        shown = sorted(entry.seq for entry in self._known(ids) if entry.shown)
        return _fitting([self._entries[seq] for seq in shown])

    def arrived(self, mailboxes: Iterable[Mailbox], window: Window, limit: int) -> list[Arrival]:
        """What came in a time, or was handed out then."""
        found = [
            Arrival(entry.payload.id, mailbox.did, entry.arrived_at)
            for mailbox in mailboxes
            for entry in mailbox.lane.entries.values()
            if entry.arrived_at is not None and window.has(entry.arrived_at, entry.payload.id)
        ]
        return first_arrivals(found, limit)

    def mark_delivered(self, ids: Iterable[str], node: str) -> None:
        for entry in self._known(ids):
            self._set_node(entry, node)
            entry.pushes += 1

    def mark_pending(self, ids: Iterable[str]) -> list[str]:
        delivered = [entry for entry in self._known(ids) if entry.node is not None]
        for entry in delivered:
            self._set_node(entry, None)
        return [entry.payload.id for entry in delivered]

    def delivering(self) -> set[str]:
        """Nodes by which messages are delivered."""
        return set(self._delivered)

    def release(self, node: str) -> int:
        """What is delivered by a node is pending again; how many messages those were."""
        entries = [self._entries[seq] for seq in self._delivered.get(node, ())]
        for entry in entries:
            self._set_node(entry, None)
        return len(entries)

    def remove(self, ids: Iterable[str], now: float) -> list[Removed]:
        """Remove by id, whoever it belongs to."""
        return self._acknowledge(self._known(ids), now)

    def acknowledge(self, mailbox: Mailbox, ids: Iterable[str], now: float) -> list[Removed]:
        """Remove by id or by digest from one mailbox; what is removed comes in order of arrival."""
        wanted = list(dict.fromkeys(ids))
        seqs = {entry.seq for entry in self._known(wanted) if entry.queue.mailbox is mailbox}
        for digest in wanted:
            seqs.update(mailbox.digests.get(digest, ()))
        return self._acknowledge([self._entries[seq] for seq in sorted(seqs)], now)

    def _acknowledge(self, entries: Sequence[Entry], now: float) -> list[Removed]:
        parties: dict[Queue, set[int]] = {}
        for entry in entries:
            parties.setdefault(entry.queue, set()).add(party_of(entry.origin))
        for queue, some in parties.items():
            if some := some - {0}:
                queue.mailbox.senders.setdefault(queue.did, KnownSenders()).acknowledged(some, now)
        return [self._remove(entry, None) for entry in entries]

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
                entry.due_at, entry.arrived_at = None, now
        return taken

    def _set_node(self, entry: Entry, node: str | None) -> None:
        if entry.node is not None:
            delivered = self._delivered[entry.node]
            del delivered[entry.seq]
            if not delivered:
                del self._delivered[entry.node]
        if node is not None:
            self._delivered.setdefault(node, {})[entry.seq] = None
        entry.node = node

    def _known(self, ids: Iterable[str]) -> list[Entry]:
        seqs = (self._seqs.get(id) for id in dict.fromkeys(ids))
        return [self._entries[seq] for seq in seqs if seq is not None]

    def _add(self, entry: Entry) -> None:
        entry.seq = seq = next(self._places)
        self._entries[seq] = entry
        self._seqs[entry.payload.id] = seq
        self._size += entry.size
        self._occupied.add(entry.queue)
        entry.queue.add(entry)
        entry.queue.mailbox.queues[entry.queue.did] = entry.queue  # it may have had to be emptied for this
        digest = sha256(entry.payload.data).hexdigest()
        entry.queue.mailbox.digests.setdefault(digest, {})[seq] = None
        self.ranking.change(entry.queue.did, 1)
        self._expiry.add(seq, entry.expires_at)
        if entry.due_at is None:
            entry.arrived_at = entry.received_at
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
        gone = entry.removed(reason)
        self._ledger[ENTRY_OF[reason]] += 1
        self._set_node(entry, None)
        seq = entry.seq
        del self._entries[seq]
        del self._seqs[entry.payload.id]
        entry.queue.remove(entry)
        mailbox = entry.queue.mailbox
        digest = sha256(entry.payload.data).hexdigest()
        del mailbox.digests[digest][seq]
        if not mailbox.digests[digest]:
            del mailbox.digests[digest]
        self._size -= entry.size
        if not entry.queue.lane.entries:
            self._occupied.discard(entry.queue)
            mailbox.queues.pop(entry.queue.did, None)
            mailbox.tidy(entry.queue.did)
        self.ranking.change(entry.queue.did, -1)
        for deadlines in (self._expiry, self._due, self._turning):
            deadlines.discard(seq)
        return gone


def first_arrivals(found: Iterable[Arrival], limit: int) -> list[Arrival]:
    """So many, in their order."""
    return sorted(found, key=lambda one: (one.at, one.id))[: max(limit, 0)]


def _fitting(entries: Sequence[Entry]) -> list[StoredMessage]:
    """The first that fit in a slice, but at least one."""
    sizes = accumulate(entry.size for entry in entries)
    fit = [entry for entry, size in zip(entries, sizes, strict=True) if size <= LARGEST_SLICE]
    return [entry.message() for entry in fit or entries[:1]]
