"""A queue while deposits are made into it: what waits there, as far as it is known, and what makes room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mediatord.interfaces import Payload, QueueLimits, Reason, Removed
from mediatord.store.mongo.queue_finder import Queue
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.rows import Order, Place, origin_of, removed
from mediatord.store.shares import Amount, Part, Usage, excess, is_counted, is_in


@dataclass(frozen=True, slots=True)
class Held:
    """
    Who has how much of a queue.

    :param amounts: of each origin.
    :param known: parties whom the recipient has acknowledged before.
    """

    amounts: dict[int, Amount]
    known: frozenset[int] = frozenset()


class TooFewKnown(Exception):
    """More of what waits has to be looked at."""

    def __init__(self, did: str, part: Part) -> None:
        super().__init__()
        self.did = did
        self.part = part


@dataclass(frozen=True, slots=True)
class Known:
    """
    What was seen of a queue.

    :param oldest: outlines of its first messages, by the part that they are of, and whether there are no more.
    :param held: None if it does not matter.
    """

    oldest: Mapping[Part, tuple[Sequence[Document], bool]] = field(default_factory=dict)
    held: Held | None = None


@dataclass(eq=False, slots=True)
class Newcomer:
    """A message that is being deposited."""

    order: Order
    payload: Payload
    place: Place
    kept: bool = True


class Lane:
    """
    :ivar messages: how many there are by now, `bytes` being those of their payloads.
    :ivar newcomers: those of them that were deposited.
    :ivar gone: ids of those that waited before and are out.
    :ivar held: what there was of each origin before, which is not changed here; `more` is what there is beyond that.
    :ivar usage: as it is by now; None if it does not matter.
    """

    def __init__(self, queue: Queue, known: Known, limits: QueueLimits) -> None:
        self.queue = queue
        self.messages, self.bytes = queue.messages, queue.bytes
        self.newcomers: deque[Newcomer] = deque()
        self.gone: dict[str, None] = {}
        self._limits = limits
        self._oldest = {part: (deque(some), all_known) for part, (some, all_known) in known.oldest.items()}
        self.held = known.held
        self.usage = usage_of(limits, known.held) if known.held is not None else None
        self.more: dict[int, Amount] = {}

    def append(self, order: Order, payloads: Sequence[Payload]) -> list[Newcomer]:
        """Let these wait."""
        newcomers = [Newcomer(order, payload, self.queue.place) for payload in payloads]
        self.newcomers += newcomers
        self._count(len(payloads), size_of(payloads), order.origin)
        return newcomers

    def make_room(self, order: Order, payloads: Sequence[Payload]) -> list[Removed]:
        """Take out what is in the way of these, as long as there is anything."""
        evicted: list[Removed] = []
        coming = Amount(len(payloads), size_of(payloads))
        while reason := excess(self._limits, self.messages + coming.messages, self.bytes + coming.size):
            usage = self.usage if self.usage and is_counted(self._limits, order.origin) else _unknown(self._limits)
            part = usage.victim(order.origin, coming, self._origin)
            if part is None:
                break
            evicted.append(self._take(part, reason))
        return evicted

    def _origin(self, part: Part) -> int | None:
        """That of the oldest of some, if there is one."""
        document = self._outline(part)
        if document is not None:
            return origin_of(document)
        newcomer = self._newcomer(part)
        return None if newcomer is None else newcomer.order.origin

    def _take(self, part: Part, reason: Reason) -> Removed:
        """Take out the oldest of some; there is one."""
        document = self._outline(part)
        if document is not None:
            self.gone[document["_id"]] = None
            self._count(-1, -document["size"], origin_of(document))
            return removed(document, self.queue.did, self.queue.account, reason)
        newcomer = self._newcomer(part)
        assert newcomer is not None
        newcomer.kept = False
        self.newcomers.remove(newcomer)
        self._count(-1, -len(newcomer.payload.data), newcomer.order.origin)
        return newcomer.order.removed(newcomer.payload, self.queue.account, reason)

    def _outline(self, part: Part) -> Document | None:
        """
        Of the oldest that waited before and is not out.

        :raise TooFewKnown: that cannot be told.
        """
        outlines, all_known = self._oldest.get(part, (deque(), False))
        while outlines and outlines[0]["_id"] in self.gone:
            outlines.popleft()
        if outlines:
            return outlines[0]
        if not all_known:
            raise TooFewKnown(self.queue.did, part)
        return None

    def _newcomer(self, part: Part) -> Newcomer | None:
        known = self.held.known if self.held is not None else frozenset[int]()
        return next((one for one in self.newcomers if is_in(part, one.order.origin, known)), None)

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.usage is not None:
            self.usage.change(origin, messages, size)
            self.more.setdefault(origin, Amount()).add(messages, size)


def usage_of(limits: QueueLimits, held: Held) -> Usage:
    """The same, by all that matters."""
    return Usage(limits, held.known, [(origin, one.messages, one.size) for origin, one in held.amounts.items()])


def _unknown(limits: QueueLimits) -> Usage:
    return Usage(limits, frozenset())


def fitting(payloads: Sequence[Payload], limits: QueueLimits) -> Sequence[Payload]:
    """Those that are not too large for any queue."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


def size_of(payloads: Iterable[Payload]) -> int:
    """Their bytes."""
    return sum([len(payload.data) for payload in payloads])
