"""
Room in a queue, in SQL; each function runs inside a transaction of the caller, and all messages of the queue are in
the table.

Who has how much of a queue is read from an index, since the table has it behind the payloads, and remembered: a queue
that is full gets the next deposit soon.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Sequence
from sqlite3 import Connection

from mediatord.interfaces import QueueLimits, Reason
from mediatord.store.known_queues import Queue, known_queues
from mediatord.store.shares import (
    NETWORK,
    SENDER,
    Amount,
    counting_parties,
    excess,
    is_over_share,
    parties_of,
    refuse_excess,
)
from mediatord.store.sql_rows import gather
from mediatord.store.sql_waiting import COLUMNS, Waiting, read_waiting
from mediatord.store.standings import Standing

# Of large messages, of which a few may do.
_AT_A_TIME = 32
_OF_QUEUE = "FROM message INDEXED BY message_of_recipient WHERE recipient_id = ?"
# The subquery is answered by the index alone. CROSS JOIN, because its order is to be kept.
_OLDEST = f"""
    FROM (SELECT seq AS place, origin AS came {_OF_QUEUE} AND seq > ? AND origin & ? = ? ORDER BY seq LIMIT ?) some
    CROSS JOIN message ON seq = some.place
"""
_ANYBODY = 0

# A message and its origin.
_Candidate = tuple[Waiting, int]
# With the limit that its queue was over.
Victim = tuple[Waiting, int, Reason]


def check_room(connection: Connection, limits: QueueLimits, orders: Sequence[tuple[Queue, int, int, int]]) -> None:
    """
    Deposits in order, each with its queue, origin, messages and bytes.

    :raise QueueFull: one of them is to be refused.
    """
    coming: defaultdict[tuple[int, int], Amount] = defaultdict(Amount)
    for queue, origin, messages, size in orders:
        parties = counting_parties(limits, origin)
        whole, *more = [coming[queue.recipient_id, party] for party in (_ANYBODY, *parties)]
        for amount in (whole, *more):
            amount.add(messages, size)
        sums = [Amount(whole.messages + queue.messages, whole.size + queue.size)]
        # Nobody has more than there is.
        if parties and is_over_share(limits, sums[0].messages, sums[0].size):
            there = standing_in(connection, queue)
            sums += [there.amount(party).plus(one) for party, one in zip(parties, more, strict=True)]
        refuse_excess(limits, sums[0], sums[1:])


def victims(connection: Connection, limits: QueueLimits, queue: Queue, origin: int, coming: Amount) -> list[Victim]:
    """
    What has to go so that a deposit fits beside the rest, in order.

    :param coming: what of it will be kept.
    """
    whole = Amount(queue.messages, queue.size).plus(coming)
    if excess(limits, whole.messages, whole.size) is None:
        return []
    standing = standing_in(connection, queue) if counting_parties(limits, origin) else Standing(())
    # Who has nothing there has nothing that could go.
    parties = [party for party in counting_parties(limits, origin) if standing.amount(party).messages]
    amounts = {party: standing.amount(party).plus(coming) for party in parties}
    lanes = {party: _Lane(connection, queue, party, standing.behind.get(party, -1)) for party in (*parties, _ANYBODY)}
    found: list[Victim] = []
    taken: set[int] = set()
    while reason := excess(limits, whole.messages, whole.size):
        number = max(whole.messages - limits.max_messages, 1 if whole.size <= limits.max_bytes else _AT_A_TIME)
        greedy = [party for party, one in amounts.items() if is_over_share(limits, one.messages, one.size)]
        for party in (*greedy, _ANYBODY):
            oldest = lanes[party].oldest(taken, number)
            if oldest is not None:
                break
        else:
            break
        victim, came = oldest
        taken.add(victim.seq)
        if party != _ANYBODY:
            standing.behind[party] = victim.seq
        for amount in (whole, *[amounts[one] for one in parties_of(came) if one in amounts]):
            amount.add(-1, -victim.size)
        found.append((victim, came, reason))
    return found


def standing_in(connection: Connection, queue: Queue) -> Standing:
    """Who has how much of a queue."""
    if queue.standing is None:
        rows = gather(connection, "origin, size", _OF_QUEUE, (queue.recipient_id,))
        known_queues(connection).keep_standing(queue, Standing(rows))
    assert queue.standing is not None
    return queue.standing


class _Lane:
    """
    The messages of a party in a queue, or of anybody, the oldest first; read when they are asked for.

    :param after: where in the order of arrival to begin.
    """

    def __init__(self, connection: Connection, queue: Queue, party: int, after: int) -> None:
        self._connection = connection
        self._queue = queue
        self._party = party
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
        parameters = queue.recipient_id, self._after, _mask(self._party), self._party, number
        rows = gather(self._connection, f"{COLUMNS}, some.came", _OLDEST, parameters)
        self._read += [(read_waiting(queue, row[:-1]), row[-1]) for row in rows]
        if rows:
            self._after = rows[-1][0]
        return bool(rows)


def _mask(party: int) -> int:
    """The bits of an origin that tell of such a party; none of anybody."""
    if party == _ANYBODY:
        return 0
    return SENDER if party <= SENDER else NETWORK
