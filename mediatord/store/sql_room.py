"""
Room in a queue, in SQL; each function runs inside a transaction of the caller, and all messages of the queue are in
the table.

Who has how much of a queue is read from an index, since the table has it behind the payloads, and remembered: a queue
that is full gets the next deposit soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from sqlite3 import Connection

from mediatord.errors import QueueFull
from mediatord.interfaces import QueueLimits, Reason
from mediatord.store.known_queues import Queue, known_queues
from mediatord.store.shares import (
    ANONYMOUS,
    AUTHENTICATED,
    NETWORK,
    SENDER,
    Amount,
    Part,
    Usage,
    excess,
    is_counted,
    may_be_refused,
)
from mediatord.store.sql_rows import gather
from mediatord.store.sql_senders import read_senders
from mediatord.store.sql_waiting import COLUMNS, Waiting, read_waiting
from mediatord.store.standings import Standing

# Of large messages, of which a few may do.
_AT_A_TIME = 32
_OF_QUEUE = "FROM message INDEXED BY message_of_recipient WHERE recipient_id = ?"
# The subquery is answered by the index alone. CROSS JOIN, because its order is to be kept.
_OLDEST = f"""
    FROM (SELECT seq AS place, origin AS came {_OF_QUEUE} AND seq > ? AND {{}} ORDER BY seq LIMIT ?) some
    CROSS JOIN message ON seq = some.place
"""

# A message and its origin.
_Candidate = tuple[Waiting, int]
# With the limit that its queue was over.
Victim = tuple[Waiting, int, Reason]


def check_room(connection: Connection, limits: QueueLimits, orders: Sequence[tuple[Queue, int, int, int]]) -> None:
    """
    Deposits in order, each with its queue, origin, messages and bytes.

    :raise QueueFull: one of them is to be refused.
    """
    wholes: dict[int, Amount] = {}
    coming: list[tuple[Usage, int, Amount]] = []
    try:
        for queue, origin, messages, size in orders:
            whole = wholes.setdefault(queue.recipient_id, Amount(queue.messages, queue.size))
            whole.add(messages, size)
            if excess(limits, whole.messages, whole.size) is not None:
                raise QueueFull()
            if len(orders) > 1 or may_be_refused(limits, origin, whole):
                usage, amount = standing_in(connection, limits, queue).usage, Amount(messages, size)
                usage.check(origin, amount)
                usage.change(origin, messages, size)
                coming.append((usage, origin, amount))
    finally:
        # It is counted when it is deposited.
        for usage, origin, amount in coming:
            usage.change(origin, -amount.messages, -amount.size)


def victims(connection: Connection, limits: QueueLimits, queue: Queue, origin: int, coming: Amount) -> list[Victim]:
    """
    What has to go so that a deposit fits beside the rest, in order.

    :param coming: what of it will be kept.
    """
    whole = Amount(queue.messages, queue.size).plus(coming)
    if excess(limits, whole.messages, whole.size) is None:
        return []
    if not is_counted(limits, origin):
        return _Eviction(connection, queue, Standing(Usage(limits, frozenset()))).victims(
            limits, origin, coming, whole
        )
    standing = standing_in(connection, limits, queue)
    found = _Eviction(connection, queue, standing).victims(limits, origin, coming, whole)
    # They are counted out when they are deleted.
    for victim, came, _ in found:
        standing.change(came, 1, victim.size)
    return found


class _Eviction:
    """Looks for what makes room for a deposit."""

    def __init__(self, connection: Connection, queue: Queue, standing: Standing) -> None:
        self._connection = connection
        self._queue = queue
        self._standing = standing
        self._taken: set[int] = set()
        self._lanes: dict[Part, _Lane] = {}
        self._number = 1

    def victims(self, limits: QueueLimits, origin: int, coming: Amount, whole: Amount) -> list[Victim]:
        """
        Until there is room, in order; counted out of the standing.

        :param whole: what waits, with what comes; is changed.
        """
        found: list[Victim] = []
        while reason := excess(limits, whole.messages, whole.size):
            self._number = max(
                whole.messages - limits.max_messages, 1 if whole.size <= limits.max_bytes else _AT_A_TIME
            )
            part = self._standing.usage.victim(origin, coming, self._origin)
            candidate = None if part is None else self._oldest(part)
            if part is None or candidate is None:
                break
            victim, came = candidate
            self._taken.add(victim.seq)
            if part != Part():
                self._standing.behind[part] = victim.seq
            whole.add(-1, -victim.size)
            if is_counted(limits, origin):
                self._standing.change(came, -1, -victim.size)
            found.append((victim, came, reason))
        return found

    def _oldest(self, part: Part) -> _Candidate | None:
        lane = self._lanes.get(part)
        if lane is None:
            condition = _condition(part, self._standing.usage.known)
            lane = _Lane(self._connection, self._queue, condition, self._standing.behind.get(part, -1))
            self._lanes[part] = lane
        return lane.oldest(self._taken, self._number)

    def _origin(self, part: Part) -> int | None:
        candidate = self._oldest(part)
        return None if candidate is None else candidate[1]


def standing_in(connection: Connection, limits: QueueLimits, queue: Queue) -> Standing:
    """Who has how much of a queue."""
    if queue.standing is None:
        read_senders(connection, [queue])
        known = queue.senders.known if queue.senders is not None else frozenset[int]()
        rows = gather(connection, "origin, size", _OF_QUEUE, (queue.recipient_id,))
        usage = Usage(limits, known, [(origin, 1, size) for origin, size in rows])
        known_queues(connection).keep_standing(queue, Standing(usage))
    assert queue.standing is not None
    return queue.standing


class _Lane:
    """
    Some messages of a queue, the oldest first; read when they are asked for.

    :param condition: what finds them.
    :param after: where in the order of arrival to begin.
    """

    def __init__(self, connection: Connection, queue: Queue, condition: str, after: int) -> None:
        self._connection = connection
        self._queue = queue
        self._source = _OLDEST.format(condition)
        self._after = after
        self._read: deque[_Candidate] = deque()

    def oldest(self, taken: Container[int], number: int) -> _Candidate | None:
        """
        The first that is not taken.

        :param number: as many as may be wanted soon.
        """
        while True:
            while self._read and self._read[0][0].seq in taken:
                self._read.popleft()
            if self._read or not self._read_more(number):
                return self._read[0] if self._read else None

    def _read_more(self, number: int) -> bool:
        queue = self._queue
        parameters = queue.recipient_id, self._after, number
        rows = gather(self._connection, f"{COLUMNS}, some.came", self._source, parameters)
        self._read += [(read_waiting(queue, row[:-1]), row[-1]) for row in rows]
        if rows:
            self._after = rows[-1][0]
        return bool(rows)


def _condition(part: Part, known: frozenset[int]) -> str:
    """What finds some messages by their origin; numbers only."""
    rank, network, sender = part
    conditions = ["1"]
    if sender is not None:
        conditions.append(f"origin & {SENDER} = {sender}")
    if network is not None:
        conditions.append(f"origin & {NETWORK} = {network}")
    if rank is not None:
        numbers = ", ".join(map(str, sorted(known)))
        # The party of an origin, see :func:`~mediatord.store.shares.party_of`.
        is_known = f"CASE origin & {SENDER} WHEN 0 THEN origin & {NETWORK} ELSE origin & {SENDER} END IN ({numbers})"
        if rank == ANONYMOUS:
            conditions.append(f"origin & {SENDER} = 0 AND NOT {is_known}")
        elif rank == AUTHENTICATED:
            conditions.append(f"origin & {SENDER} <> 0 AND NOT {is_known}")
        else:
            conditions.append(is_known)
    return " AND ".join(conditions)
