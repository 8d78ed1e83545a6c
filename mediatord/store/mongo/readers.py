"""Reading for accounts in their turn."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from twisted.internet.defer import Deferred

from mediatord.store.mongo.decentrl_locks import Locks
from mediatord.store.mongo.duplicates import begin
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transactions import Work

T = TypeVar("T")


class Readers:
    """
    Reads once at a time for each account: one that has a lot that waits, and asks again and again, would keep all
    others from reading.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._turns = Locks(server.clock)

    def read(self, name: str, account: str, work: Work[T]) -> Deferred[T]:
        """
        :param name: of the operation, for the metric.
        :raise StoreUnavailable: it could not be read, or its turn did not come in time.
        """

        def in_turn(operations: Operations, deadline: float) -> Awaitable[T]:
            read = partial(operations.transact, work, deadline, reading=True)
            return self._turns.holding(account, read, deadline)

        return begin(self._server.operate(name, in_turn))
