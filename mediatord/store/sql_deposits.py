"""
Many deposits, acknowledgements and marks in few statements.

SQLite gives the interpreter's lock back at every step of a statement, and has it again when the reactor lets it: what
a deposit costs is mostly the number of steps. Deposits, removals and marks that stand next to each other in a batch
share a statement that deletes, one that inserts, one that marks and one that counts; what comes of them is what would
have come of one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sqlite3 import Connection

from mediatord.errors import QueueFull, RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits, Removed
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.known_queues import Queue, known_queues
from mediatord.store.shares import Amount, may_be_refused, party_of
from mediatord.store.sql_ledger import enter
from mediatord.store.sql_messages import (
    Deposit,
    delete,
    deposit,
    deposit_in,
    find_waiting,
    insert_all,
    mark_delivered,
)
from mediatord.store.sql_queue_counts import Counts
from mediatord.store.sql_room import check_room
from mediatord.store.sql_senders import read_senders, write_senders
from mediatord.store.sql_waiting import Waiting

# What the works of this module have in common: they are done together.
TRAFFIC = "traffic"


class Depositing:
    """A deposit as an operation of a batch."""

    kind = TRAFFIC
    __slots__ = ("limits", "order")

    def __init__(self, order: Deposit, limits: QueueLimits) -> None:
        self.order = order
        self.limits = limits

    def __call__(self, connection: Connection) -> Deposited:
        """By itself; see :func:`~mediatord.store.sql_messages.deposit`."""
        return deposit(connection, self.limits, self.order)

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the deposits, removals and marks after it."""
        return _Run(connection, works).outcomes()


class Removing:
    """
    The removal of messages as an operation of a batch.

    :param ids: of messages.
    :param account: the only one whose messages count, in order of arrival; None for anybody's, in this order.
    :param now: when they are acknowledged.
    """

    kind = TRAFFIC
    __slots__ = ("account", "ids", "now")

    def __init__(self, ids: Iterable[str], account: str | None, now: float) -> None:
        self.ids = tuple(dict.fromkeys(ids))
        self.account = account
        self.now = now

    def __call__(self, connection: Connection) -> list[Removed]:
        """By itself."""
        (outcome,) = _Run(connection, [self]).outcomes()
        removed: list[Removed] = outcome.value
        return removed

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the deposits, removals and marks after it."""
        return _Run(connection, works).outcomes()


class Marking:
    """A mark that messages were pushed as an operation of a batch."""

    kind = TRAFFIC
    __slots__ = ("ids", "node")

    def __init__(self, ids: Iterable[str], node: str) -> None:
        self.ids = tuple(dict.fromkeys(ids))
        self.node = node

    def __call__(self, connection: Connection) -> None:
        """By itself."""
        mark_delivered(connection, self.ids, self.node)

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the deposits, removals and marks after it."""
        return _Run(connection, works).outcomes()


def deposit_all(connection: Connection, limits: QueueLimits, orders: Sequence[Deposit]) -> list[Deposited]:
    """
    Several deposits, all or none.

    :raise RecipientUnknown: nobody has registered one of the DIDs.
    :raise QueueFull: one of them is to be refused.
    """
    dids = list(dict.fromkeys([order.recipient_did for order in orders]))
    queues = known_queues(connection).find(connection, dids)
    if len(queues) < len(dids):
        raise RecipientUnknown()
    if limits.when_full == "refuse":
        addressed = [(queues[order.recipient_did], order.origin, len(order.payloads), order.size) for order in orders]
        check_room(connection, limits, addressed)
    counts = Counts()
    done = [deposit_in(connection, limits, queues[order.recipient_did], order, counts) for order in orders]
    counts.write(connection)
    return done


class _Run:
    """Deposits and removals in a row, with what is known of their queues."""

    def __init__(self, connection: Connection, works: Sequence[Work]) -> None:
        self._connection = connection
        self._works = works
        dids = dict.fromkeys([work.order.recipient_did for work in works if isinstance(work, Depositing)])
        ids = dict.fromkeys([id_ for work in works if isinstance(work, Removing) for id_ in work.ids])
        self._known = known_queues(connection)
        self._queues = self._known.find(connection, list(dids)) if dids else {}
        self._waiting = find_waiting(connection, self._known, list(ids)) if ids else {}
        self._counts = Counts()
        self._rows: list[tuple[Queue, Deposit, Payload]] = []
        self._gone: list[Waiting] = []
        self._marks: dict[str, dict[str, None]] = {}
        self._heard_of: dict[int, Queue] = {}
        self._brought: set[str] | None = None
        self._accepted = self._acknowledged = 0

    def outcomes(self) -> list[Outcome]:
        """What became of each, in order."""
        outcomes = [self._do(work) for work in self._works]
        self._flush()
        self._counts.write(self._connection)
        enter(self._connection, "didcomm", "accepted", self._accepted)
        enter(self._connection, "didcomm", "acknowledged", self._acknowledged)
        return outcomes

    def _do(self, work: Work) -> Outcome:
        if isinstance(work, Depositing):
            return self._deposit(work)
        if isinstance(work, Removing):
            return self._remove(work)
        assert isinstance(work, Marking)
        return self._mark(work)

    def _deposit(self, work: Depositing) -> Outcome:
        order, limits = work.order, work.limits
        queue = self._queues.get(order.recipient_did)
        if queue is None:
            return Outcome(error=RecipientUnknown())
        payloads = order.payloads
        size = order.size
        messages, total = queue.messages + len(payloads), queue.size + size
        if messages > limits.max_messages or total > limits.max_bytes:
            return self._make_room(queue, order, limits)
        if limits.when_full == "refuse" and may_be_refused(limits, order.origin, Amount(messages, total)):
            if self._is_refused(queue, order, limits):
                return Outcome(error=QueueFull())
        self._accepted += len(payloads)
        self._counts.add(queue, len(payloads), size, order.origin)
        for payload in payloads:
            self._rows.append((queue, order, payload))
        return Outcome(order.deposited(queue.account))

    def _make_room(self, queue: Queue, order: Deposit, limits: QueueLimits) -> Outcome:
        """It is more than there is room for."""
        if limits.when_full == "refuse":
            return Outcome(error=QueueFull())
        # What came before is inserted first, so that the order is kept.
        self._flush()
        deposited = deposit_in(self._connection, limits, queue, order, self._counts)
        for one in deposited.evicted:
            self._waiting.pop(one.id, None)
        return Outcome(deposited)

    def _is_refused(self, queue: Queue, order: Deposit, limits: QueueLimits) -> bool:
        self._flush()
        try:
            check_room(self._connection, limits, [(queue, order.origin, len(order.payloads), order.size)])
        except QueueFull:
            return True
        return False

    def _remove(self, work: Removing) -> Outcome:
        self._look_again(work)
        found = [self._waiting[id_] for id_ in work.ids if id_ in self._waiting]
        if work.account is not None:
            found = sorted([one for one in found if one.queue.account == work.account], key=lambda one: one.seq)
        for one in found:
            del self._waiting[one.id]
            self._counts.add(one.queue, -1, -one.size)
        self._note_senders(found, work.now)
        self._gone += found
        self._acknowledged += len(found)
        return Outcome([one.removed() for one in found])

    def _note_senders(self, acknowledged: Iterable[Waiting], now: float) -> None:
        parties: dict[Queue, set[int]] = {}
        for one in acknowledged:
            if one.origin:
                parties.setdefault(one.queue, set()).add(party_of(one.origin))
        if any(queue.senders is None for queue in parties):
            # With those of what is likely to be acknowledged next.
            more = [one.queue for one in self._waiting.values() if one.origin]
            read_senders(self._connection, [*parties, *more])
        for queue, some in parties.items():
            self._known.keep_senders(queue)
            if queue.senders is not None and queue.senders.acknowledged(some, now):
                self._heard_of[queue.recipient_id] = queue

    def _mark(self, work: Marking) -> Outcome:
        if any(not marked.keys().isdisjoint(work.ids) for marked in self._marks.values()):
            self._flush()  # one update changes a message once
        for id_ in work.ids:
            if id_ in self._waiting:
                self._waiting[id_].pushes += 1
        self._marks.setdefault(work.node, {}).update(dict.fromkeys(work.ids))
        return Outcome()

    def _look_again(self, work: Removing) -> None:
        """It may be for what this run has deposited."""
        unknown = [id_ for id_ in work.ids if id_ not in self._waiting]
        if not unknown:
            return
        if self._brought is None:
            orders = [work.order for work in self._works if isinstance(work, Depositing)]
            self._brought = {payload.id for order in orders for payload in order.payloads}
        if not self._brought.isdisjoint(unknown):
            self._flush()
            self._waiting |= find_waiting(self._connection, self._known, work.ids)

    def _flush(self) -> None:
        gone, self._gone = self._gone, []
        rows, self._rows = self._rows, []
        delete(self._connection, gone)
        insert_all(self._connection, rows)
        if self._heard_of:
            write_senders(self._connection, self._heard_of.values())
            self._heard_of = {}
        marks, self._marks = self._marks, {}
        for node, ids in marks.items():
            mark_delivered(self._connection, ids, node)
