"""
Many deposits in few statements.

SQLite gives the interpreter's lock back at every step of a statement, and has it again when the reactor lets it: what
a deposit costs is mostly the number of steps. Deposits that stand next to each other in a batch share a statement
that looks up their queues and another one that inserts their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from mediatord.errors import RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.sql_messages import Deposit, Queue, deposit, find_queues, insert_all


@dataclass(frozen=True, slots=True)
class Depositing:
    """A deposit as an operation of a batch."""

    order: Deposit
    limits: QueueLimits

    def __call__(self, connection: Connection) -> Deposited:
        """By itself; see :func:`~mediatord.store.sql_messages.deposit`."""
        return deposit(connection, self.limits, self.order)

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the deposits after it."""
        run = _Run(connection, self.limits, [work.order for work in works if isinstance(work, Depositing)])
        return run.outcomes()


def deposit_all(connection: Connection, limits: QueueLimits, orders: Sequence[Deposit]) -> list[Deposited]:
    """
    Several deposits, all or none.

    :raise RecipientUnknown: nobody has registered one of the DIDs.
    """
    dids = {order.recipient_did for order in orders}
    if len(find_queues(connection, dids)) < len(dids):
        raise RecipientUnknown()
    return [deposit(connection, limits, order) for order in orders]


class _Run:
    """Deposits in a row, with what is known of their queues."""

    def __init__(self, connection: Connection, limits: QueueLimits, orders: Sequence[Deposit]) -> None:
        self._connection = connection
        self._limits = limits
        self._orders = orders
        self._queues = find_queues(connection, {order.recipient_did for order in orders})
        self._rows: list[tuple[Queue, Deposit, Payload]] = []

    def outcomes(self) -> list[Outcome]:
        """What became of each, in order."""
        outcomes = [self._deposit(order) for order in self._orders]
        self._insert()
        return outcomes

    def _deposit(self, order: Deposit) -> Outcome:
        queue = self._queues.get(order.recipient_did)
        if queue is None:
            return Outcome(error=RecipientUnknown())
        grown = queue.grown(order.payloads)
        if grown.messages > self._limits.max_messages or grown.size > self._limits.max_bytes:
            return Outcome(self._deposit_alone(order))
        self._queues[order.recipient_did] = grown
        self._rows += [(queue, order, payload) for payload in order.payloads]
        return Outcome(order.deposited(queue.account))

    def _deposit_alone(self, order: Deposit) -> Deposited:
        """Where something has to make room; what came before is inserted first, so that the order is kept."""
        self._insert()
        deposited = deposit(self._connection, self._limits, order)
        self._queues |= find_queues(self._connection, {order.recipient_did})
        return deposited

    def _insert(self) -> None:
        insert_all(self._connection, self._rows)
        self._rows = []
