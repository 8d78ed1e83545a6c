"""Known failures of other mediators over time, with a manual clock."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_mediator import MP, InMemoryMediator, InMemoryWallet, code_of, pack_forward

# Many times the lease of a node.
LONG = 120


class TimeTests(SynchronousTestCase):
    """
    Failures of periodic tasks, and of reads:

    * one exception ends the expiry loop;
    * a store failure is reported as "0 messages".
    """

    def setUp(self) -> None:
        self.node = InMemoryMediator(self, queue={"ttl": "60s"})
        self.bob = InMemoryWallet(self.node).enrol()
        self.node.receive(pack_forward(self.node, self.bob.did, self.bob.make_payload()))

    def test_expiry_loop_survives_failures(self) -> None:
        """Whatever fails in one run or several, the next possible run does the work."""
        for error in (ZeroDivisionError(), StoreUnavailable(), KeyError("x")):
            with self.node.failing("expire_messages", error):
                self.node.clock.pump([15] * 5)
        self.flushLoggedErrors(ZeroDivisionError, KeyError)
        self.assertEqual(self.node.counter("mediator_messages_expired_total"), 0)
        self.node.clock.advance(15)
        self.assertEqual(self.node.counter("mediator_messages_expired_total"), 1)

    def test_store_failure_is_no_empty_queue(self) -> None:
        """Whichever read fails, the wallet is not told that its queue is empty."""
        requests: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("get_queue_status", "status-request", {}),
            ("fetch_messages", "delivery-request", {"limit": 1}),
            ("acknowledge_each", "messages-received", {"message_id_list": ["x"]}),
        )
        for operation, type_, body in requests:
            with self.node.failing(operation, StoreUnavailable()):
                reply = self.bob.ask(f"{MP}/{type_}", body)
            self.assertEqual((reply.status, code_of(reply, self.bob)), (503, "e.p.me.res.storage"), operation)
        self.assertEqual(self.bob.count_queued(), 1)


class PresenceTests(InMemoryClusterTestCase):
    """
    A failure of clusters:

    * the presence record of an open socket expires.
    """

    def test_presence_of_idle_socket(self) -> None:
        """However long a socket was idle, messages accepted by other nodes are pushed to it."""
        here, there = self.in_memory_nodes
        bob, dave, eve = self.new_wallet(here), self.new_identity(here, "dave"), self.new_identity(here, "eve")
        dave.register()
        dave.save_contract_with(eve)
        socket, dialogue = bob.go_live(), dave.connect()
        self.advance(LONG)
        socket.frames.clear()
        dialogue.take_frames()
        self.assertEqual(there.receive(pack_forward(there, bob.did, bob.make_payload())).status, 202)
        self.assertEqual(len(socket.frames), 1)
        raw = eve.command("sealed", to=dave.did, channel="TWO_WAY_PRIVATE")
        self.assertEqual(there.receive_command(raw).status, 200)
        self.assertEqual([item["type"] for item in dialogue.take_frames()], ["PENDING_EVENTS"])
