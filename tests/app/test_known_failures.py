"""What other mediators are known to have done wrong as time goes by, each once, with the clock in the test's hand."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_mediator import MP, InMemoryMediator, InMemoryWallet, code_of, pack_forward

# Many times as long as a node of a cluster is known for without saying anything.
LONG = 120


class TimeTests(SynchronousTestCase):
    """
    Failures of what runs by itself, and of reads:

    * the expiry loop dies of one exception;
    * a store that fails is reported as "0 messages".
    """

    def setUp(self) -> None:
        self.make_node = InMemoryMediator(self, queue={"ttl": "60s"})
        self.bob = InMemoryWallet(self.make_node).enrol()
        self.make_node.receive(pack_forward(self.make_node, self.bob.did, self.bob.letter()))

    def test_an_expiry_loop_that_dies(self) -> None:
        """Whatever goes wrong in a round, once or for long, the next one that can does the work."""
        for error in (ZeroDivisionError(), StoreUnavailable(), KeyError("x")):
            with self.make_node.failing("expire_messages", error):
                self.make_node.clock.pump([15] * 5)
        self.flushLoggedErrors(ZeroDivisionError, KeyError)
        self.assertEqual(self.make_node.counter("mediator_messages_expired_total"), 0)
        self.make_node.clock.advance(15)
        self.assertEqual(self.make_node.counter("mediator_messages_expired_total"), 1)

    def test_a_store_failure_is_no_empty_queue(self) -> None:
        """Whichever question the store does not answer, the wallet is not told that nothing is there."""
        requests: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("get_queue_status", "status-request", {}),
            ("fetch_messages", "delivery-request", {"limit": 1}),
            ("acknowledge_once", "messages-received", {"message_id_list": ["x"]}),
        )
        for operation, type_, body in requests:
            with self.make_node.failing(operation, StoreUnavailable()):
                reply = self.bob.ask(f"{MP}/{type_}", body)
            self.assertEqual((reply.status, code_of(reply, self.bob)), (503, "e.p.me.res.storage"), operation)
        self.assertEqual(self.bob.waiting(), 1)


class PresenceTests(InMemoryClusterTestCase):
    """
    A failure of clusters:

    * the record that a socket is somewhere expires while it is open.
    """

    def test_presence_under_a_live_socket(self) -> None:
        """However long nothing was said on it, what another node accepts is pushed."""
        here, there = self.in_memory_nodes
        bob, dave, eve = self.new_wallet(here), self.new_identity(here, "dave"), self.new_identity(here, "eve")
        dave.register()
        dave.befriend(eve)
        socket, dialogue = bob.go_live(), dave.connect()
        self.advance(LONG)
        socket.frames.clear()
        dialogue.heard()
        self.assertEqual(there.receive(pack_forward(there, bob.did, bob.letter())).status, 202)
        self.assertEqual(len(socket.frames), 1)
        raw = eve.command("sealed", to=dave.did, channel="TWO_WAY_PRIVATE")
        self.assertEqual(there.obey(raw).status, 200)
        self.assertEqual([one["type"] for one in dialogue.heard()], ["PENDING_EVENTS"])
