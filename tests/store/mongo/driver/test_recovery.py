"""Recovery of a client: the probe of a suspected server, and the undo of uncertain commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.store import ignore_observation
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.errors import ServerUnreachable
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.driver.uri import parse_mongo_uri


class RecoveryTests(SynchronousTestCase):
    """A client without connections, whose server is down."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.states: list[bool] = []
        self.client = ReplicaSetClient(
            parse_mongo_uri("mongodb://127.0.0.1:1/x?replicaSet=rs0"),
            self.clock,
            observe=ignore_observation,
            on_up=self.states.append,
        )
        self.is_reachable = True
        self.patch(Operation, "write", self.probe)
        self.client._accepting = True
        self.client._set_up(True)

    async def probe(self, *_: Any) -> Sequence[Any]:
        if not self.is_reachable:
            raise ServerUnreachable("no reply")
        return []

    def lose_server(self) -> None:
        self.is_reachable = False
        self.client.report_failure("test", ServerUnreachable("no connection", connected=False))

    def wait(self) -> None:
        for _ in range(20):
            self.clock.advance(0.1)

    def test_failing_listener_does_not_end_recovery(self) -> None:
        """A listener that fails when a commit was undone does not end the recovery."""
        undone: list[float] = []

        async def transact(*_: Any) -> Callable[[], None]:
            undone.append(self.clock.seconds())
            return self.fail_to_report

        self.patch(self.client.transactions, "_transact", transact)
        self.lose_server()
        self.client.transactions.schedule_undo(self.undo)
        self.wait()
        self.is_reachable = True
        self.wait()
        self.assertEqual((self.states, len(undone)), ([True, False, True], 1))
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.successResultOf(self.client.close())

    async def undo(self, _transaction: Transaction) -> None:
        raise AssertionError

    def fail_to_report(self) -> None:
        raise ValueError

    def test_close_does_not_wait_for_probe(self) -> None:
        """Closing does not wait for the next probe, although a connection attempt that is cancelled just fails."""
        connecting: Deferred[None] = Deferred()

        async def connect(*_: Any) -> None:
            try:
                await connecting
            except CancelledError:
                raise ServerUnreachable("no connection", connected=False) from None

        self.patch(Operation, "write", connect)
        self.lose_server()
        self.successResultOf(self.client.close())
        self.assertEqual(self.states, [True, False])
