"""What nodes do for each other in the DIDComm part: no socket is real, and no second passes by itself."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed

from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, MIN_MESSAGE_AGE, SCAN_WINDOW, SWEEP_INTERVAL
from mediatord.cluster.membership import NODE_LEASE, NOT_JOINED, RENEWAL_INTERVAL, UNRENEWED_LEASE_AGE
from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY
from mediatord.delivery import connections
from mediatord.didcomm.messages import MessageOrigin
from mediatord.errors import StoreUnavailable
from mediatord.wallet.didcomm_client import read_delivery
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase, InMemoryNode
from tests.from_prior import FromPriorClaims, make_from_prior
from tests.in_memory_mediator import MP, FakeSocket, InMemoryWallet, pack_forward

SOON = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1
OF_MEMBERS = (
    "join",
    "renew",
    "drop",
    "list_nodes",
    "list_lapsed_nodes",
    "add_presence",
    "remove_presence",
    "find_presence",
    "acquire_lease",
)


class DIDCommClusterTestCase(InMemoryClusterTestCase):
    """Bob is enrolled; he may ask either node."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes
        self.bob = self.new_wallet(self.a)
        self.bob_at_b = InMemoryWallet(self.b, self.bob.identity)

    def live_at(self, in_memory: InMemoryNode) -> FakeSocket:
        """A live socket of Bob's at this node, with nothing on it yet."""
        socket = InMemoryWallet(in_memory, self.bob.identity).go_live()
        socket.frames.clear()
        return socket

    def forward(self, in_memory: InMemoryNode, text: str = "hello", **headers: Any) -> None:
        """A stranger leaves something for Bob at this node."""
        raw = pack_forward(in_memory, self.bob.did, self.bob.letter(text), **headers)
        self.assertEqual(in_memory.receive(raw).status, 202)

    def texts(self, socket: FakeSocket) -> list[str]:
        """What was pushed since this was asked last."""
        frames, socket.frames = socket.frames, []
        return [
            self.bob.open(delivered.payload).text
            for frame in frames
            for delivered in read_delivery(self.bob.open(frame).message)
        ]

    def pushes(self, in_memory: InMemoryNode, outcome: str) -> float:
        """How many hints of this node came to this."""
        return in_memory.counter("mediator_cluster_pushes_total", outcome=outcome)

    def methods(self, in_memory: InMemoryNode) -> list[str]:
        """How accepted messages went, by the event log."""
        return [event["method"] for event in in_memory.events("msg.accept")]

    def places(self) -> list[str]:
        """The names of the nodes that the store says have sockets of Bob's."""
        found = self.successResultOf(self.store.cluster.find_presence([self.bob.did]))
        return sorted(one.node.name if one.node else "?" for one in found)


class PushTests(DIDCommClusterTestCase):
    """What is accepted at one node is pushed at another."""

    def test_push(self) -> None:
        """At once, and counted as live; it stays until it is acknowledged, which may be done at either node."""
        for acknowledging in (self.bob, self.bob_at_b):
            socket = self.live_at(self.b)
            self.forward(self.a)
            (delivered,) = read_delivery(self.bob.open(socket.frames.pop()).message)
            self.assertEqual(self.bob.waiting(), 1)
            acknowledging.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
            self.assertEqual(self.bob_at_b.waiting(), 0)
            self.b.base.connections.closed(socket)
            self.settle()
        self.assertEqual(self.methods(self.a), ["live", "live"])
        self.assertEqual(self.pushes(self.a, "pushed"), 2)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 0)
        self.assertEqual([event["path"] for event in self.a.events("msg.ack")], ["live"])
        self.assertEqual([event["path"] for event in self.b.events("msg.ack")], ["live"])
        self.assertEqual(self.b.counter("mediator_cluster_hint_duration_seconds_count"), 0)
        self.assertEqual(self.a.counter("mediator_cluster_hint_duration_seconds_count"), 2)

    def test_both(self) -> None:
        """Sockets at both nodes get it, each once."""
        here, there = self.live_at(self.a), self.live_at(self.b)
        self.forward(self.a)
        self.later(2 * SOON)
        self.assertEqual((self.texts(here), self.texts(there)), (["hello"], ["hello"]))
        self.assertEqual(self.methods(self.a), ["live"])

    def test_nobody(self) -> None:
        """Without a socket anywhere nobody is asked."""
        self.forward(self.a)
        self.assertEqual((self.network.requests, self.methods(self.a)), (0, ["queue"]))

    def test_only_here(self) -> None:
        """Sockets of this node need no other."""
        socket = self.live_at(self.a)
        self.forward(self.a)
        self.assertEqual((self.network.requests, self.texts(socket)), (0, ["hello"]))

    def test_many(self) -> None:
        """In order, and in fewer requests than messages where they come together."""
        socket = self.live_at(self.b)
        raws = [pack_forward(self.a, self.bob.did, self.bob.letter(str(number))) for number in range(20)]
        replies = [
            Deferred.fromCoroutine(self.a.didcomm.dispatcher.receive(raw, MessageOrigin("192.0.2.1", None)))
            for raw in raws
        ]
        self.settle()
        self.assertEqual({self.successResultOf(reply).status for reply in replies}, {202})
        self.assertEqual(self.texts(socket), [str(number) for number in range(20)])
        self.assertEqual(self.network.requests, 1)

    def test_nobody_waits(self) -> None:
        """The sender has its 202 before anybody knows what became of the hint; the log waits for that."""
        self.live_at(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.assertEqual(self.methods(self.a), [])
        self.later(2)
        self.assertEqual(self.methods(self.a), ["queue"])
        self.assertEqual((self.pushes(self.a, "failed"), self.pushes(self.a, "pushed")), (1, 0))
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 1)

    def test_endpoint_only_when_nobody_took_it(self) -> None:
        """An account with an endpoint gets by POST what no socket of any node took."""
        offered: list[str] = []
        dispatch: Any = self.a.didcomm.due._dispatch
        dispatch.__self__.fail_over = lambda message: offered.append(message.id)
        socket = self.live_at(self.b)
        self.forward(self.a)
        self.assertEqual(offered, [])
        socket.takes = False
        self.forward(self.a)
        self.assertEqual(len(offered), 1)
        self.assertEqual(self.pushes(self.a, "no_session"), 1)

    def test_fault_in_telling(self) -> None:
        """A mistake of ours in what follows a push elsewhere is logged."""
        self.live_at(self.b).takes = False
        dispatch: Any = self.a.didcomm.due._dispatch
        dispatch.__self__.fail_over = lambda message: 1 // 0
        self.forward(self.a)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_delayed(self) -> None:
        """When it is due, wherever its socket is by then."""
        self.forward(self.a, delay_milli=5000)
        socket = self.live_at(self.b)
        self.later(4)
        self.assertEqual(self.texts(socket), [])
        self.later(1.5)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_delayed_at_a_node_that_is_gone(self) -> None:
        """Another one looks after what came due there."""
        socket = self.live_at(self.b)
        self.forward(self.a, delay_milli=20_000)
        self.a.freeze()
        self.later(20 + NODE_LEASE)
        self.assertEqual(self.texts(socket), ["hello"])


class LostHintTests(DIDCommClusterTestCase):
    def test_caught_up(self) -> None:
        """A hint that never arrives delays and does not lose; and nothing comes twice."""
        socket = self.live_at(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])
        self.later(3 * SCAN_WINDOW)
        self.assertEqual(self.texts(socket), [])
        self.assertEqual(self.bob.waiting(), 1)

    def test_answer_lost(self) -> None:
        """The hint is sent again, and the message is not pushed again."""
        socket = self.live_at(self.b)
        answers = iter([True, True, False])
        self.network.lost = lambda node: next(answers)
        self.forward(self.a)
        self.later(1)
        self.assertEqual(self.network.requests, 3)
        self.assertEqual((self.texts(socket), self.methods(self.a)), (["hello"], ["live"]))

    def test_no_backlog(self) -> None:
        """What came before the socket asked for it is not pushed by a later round either, but for the very last."""
        self.forward(self.a)
        self.later(MAX_VISIBILITY_DELAY + 1)
        socket = self.live_at(self.b)
        self.later(2 * SOON)
        self.assertEqual(self.texts(socket), [])

    def test_backlog_of_the_second_socket(self) -> None:
        """A round pushes to the sockets that were there when the message came, as far as clocks can tell."""
        first = self.live_at(self.b)
        first.takes = False
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.later(MAX_VISIBILITY_DELAY + 1)
        second = self.live_at(self.b)
        first.takes = True
        self.later(SOON)
        self.assertEqual((self.texts(first), self.texts(second)), (["hello"], []))

    def test_store_away_for_the_lookup(self) -> None:
        """Nobody knows where the sockets are: the message waits, and is found."""
        socket = self.live_at(self.b)
        self.store.cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.forward(self.a)
        self.assertEqual((self.methods(self.a), self.texts(socket)), (["queue"], []))
        del self.store.cluster.find_presence
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_pushed_elsewhere_meanwhile(self) -> None:
        """What a socket of another node has got is no less missing here: both get it, each once."""
        here, there = self.live_at(self.a), self.live_at(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.later(2 * SOON)
        self.assertEqual((self.texts(here), self.texts(there)), (["hello"], ["hello"]))


class GoingLiveTests(DIDCommClusterTestCase):
    """A message that came before is in the status, one that comes after is pushed."""

    def hold(self) -> Deferred[None]:
        """Let the store be slow to take announcements; fires for it to be done."""
        cluster, held = self.store.cluster, Deferred[None]()
        announce = cluster.add_presence

        def slow(boot: str, dids: list[str]) -> Deferred[None]:
            return held.addCallback(lambda _: announce(boot, dids))

        cluster.add_presence = slow
        self.addCleanup(delattr, cluster, "add_presence")
        return held

    def ask_to_be_live(self, socket: FakeSocket) -> Deferred[Any]:
        """The reply, when it is there."""
        raw = self.bob_at_b.pack(f"{MP}/live-delivery-change", {"live_delivery": True}, return_route="all")
        reply = Deferred.fromCoroutine(self.b.didcomm.dispatcher.receive(raw, MessageOrigin(socket.client, socket)))
        self.settle()
        return reply

    def test_before_others_know(self) -> None:
        """There is no answer yet; what comes meanwhile is in it."""
        held = self.hold()
        socket = self.b.socket()
        reply = self.ask_to_be_live(socket)
        self.assertNoResult(reply)
        self.forward(self.a, "before")
        held.callback(None)
        self.settle()
        body = self.bob.open(self.successResultOf(reply).body).body
        self.assertEqual((body["message_count"], body["live_delivery"]), (1, True))
        self.assertEqual(self.texts(socket), [])
        self.forward(self.a, "after")
        self.assertEqual(self.texts(socket), ["after"])

    def test_store_away(self) -> None:
        """It cannot be promised: try again later, within the time of any answer. When the store is back, it is so."""
        cluster = self.store.cluster
        cluster.add_presence = lambda boot, dids: fail(StoreUnavailable())
        socket = self.b.socket()
        reply = self.successResultOf(self.ask_to_be_live(socket))
        self.assertEqual((reply.status, reply.retry_after), (503, 5))
        del cluster.add_presence
        self.later(1.5)
        self.assertEqual(self.places(), ["b"])
        self.forward(self.a)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_by_default(self) -> None:
        """Where every socket is live, the first answer waits likewise."""
        in_memory = self.in_memory("c", didcomm={"live_default_on": True}).start()
        new_wallet = InMemoryWallet(in_memory, self.bob.identity)
        socket = in_memory.socket()
        held = self.hold()
        raw = new_wallet.pack(f"{MP}/status-request", {}, return_route="all")
        reply = Deferred.fromCoroutine(
            in_memory.didcomm.dispatcher.receive(raw, MessageOrigin(socket.client, socket))
        )
        self.settle()
        self.assertNoResult(reply)
        held.callback(None)
        self.settle()
        self.assertEqual(self.successResultOf(reply).status, 200)
        self.forward(self.a)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_off_again(self) -> None:
        """The store knows at once."""
        socket = self.live_at(self.b)
        self.assertEqual(self.places(), ["b"])
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": False}, socket=socket)
        self.assertEqual(self.places(), [])

    def test_hang_up(self) -> None:
        """Likewise; and the other socket goes on."""
        first, second = self.live_at(self.b), self.live_at(self.b)
        self.b.base.connections.closed(first)
        self.settle()
        self.assertEqual(self.places(), ["b"])
        self.b.base.connections.closed(second)
        self.settle()
        self.assertEqual(self.places(), [])

    def test_rotation(self) -> None:
        """An account that goes by a new DID is found under that one, and under the old one no longer."""
        socket = self.live_at(self.b)
        new = InMemoryWallet(self.b)
        signing = self.bob.identity.signing
        prior = FromPriorClaims(kid=signing.kid, iss=self.bob.did, sub=new.did, iat=int(self.clock.seconds()))
        token = make_from_prior(prior, signing.private)
        new.answer(f"{MP}/status-request", from_prior=token, socket=socket)
        socket.frames.clear()
        self.assertEqual(self.places(), [])
        self.forward(self.a)
        self.assertEqual(len(socket.frames), 1)
        (delivered,) = read_delivery(new.open(socket.frames[0]).message)
        self.assertEqual(self.bob.open(delivered.payload).text, "hello")

    def test_rotation_while_a_hint_is_lost(self) -> None:
        """What came for the old one while the socket was live is not taken for what waited before."""
        self.forward(self.a, "backlog")
        socket = self.live_at(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        new = InMemoryWallet(self.b)
        signing = self.bob.identity.signing
        prior = FromPriorClaims(kid=signing.kid, iss=self.bob.did, sub=new.did, iat=int(self.clock.seconds()))
        token = make_from_prior(prior, signing.private)
        new.answer(f"{MP}/status-request", from_prior=token, socket=socket)
        socket.frames.clear()
        self.later(SOON)
        (delivered,) = read_delivery(new.open(socket.frames.pop()).message)
        self.assertEqual((self.bob.open(delivered.payload).text, socket.frames), ("hello", []))


class NodeDeathTests(DIDCommClusterTestCase):
    def test_killed(self) -> None:
        """What it had pushed is pending again when its lease is over; meanwhile nobody waits for it."""
        self.live_at(self.b)
        self.forward(self.a)
        self.b.freeze()
        self.forward(self.a, "late")
        self.later(1)
        self.assertEqual((self.pushes(self.a, "failed"), self.methods(self.a)), (1, ["live", "queue"]))
        before = self.a.counter("mediator_messages_stored_total")
        self.later(NODE_LEASE + 2 * SWEEP_INTERVAL)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), before + 1)
        self.assertEqual((self.live(), self.places()), (["a"], []))
        statuses = [
            one.status
            for one in self.successResultOf(
                self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999)
            )
        ]
        self.assertEqual(statuses, ["pending", "pending"])

    def test_stale_presence(self) -> None:
        """Between the end of the lease and the sweep a record may be stale: it is counted and passed over."""
        self.live_at(self.b)
        self.b.freeze()
        self.store.cluster.list_lapsed_nodes = lambda: succeed([])
        self.later(NODE_LEASE + SWEEP_INTERVAL)
        self.assertEqual(self.places(), ["?"])
        self.forward(self.a)
        self.assertEqual(self.a.counter("mediator_cluster_stale_presence_total"), 1)
        self.assertEqual(self.methods(self.a), ["queue"])

    def test_stopped(self) -> None:
        """A node that stops in order leaves nothing behind for others to wait for."""
        self.live_at(self.b)
        self.forward(self.a)
        self.b.stop()
        self.assertEqual((self.live(), self.places()), (["a"], []))
        found = self.successResultOf(self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([one.status for one in found], ["pending"])

    def test_nothing_after_the_end(self) -> None:
        """An answer of the store that comes when a node has stopped to send hints makes it send none."""
        self.live_at(self.b)
        late: Deferred[None] = Deferred()
        whereabouts = self.store.cluster.find_presence
        self.store.cluster.find_presence = lambda dids: late.addCallback(lambda _: whereabouts(dids))
        self.forward(self.a)
        self.get(self.a.cluster.stop())
        before = self.network.requests
        late.callback(None)
        self.later(1)
        self.assertEqual(self.network.requests, before)
        del self.store.cluster.find_presence

    def test_one_socket_of_many(self) -> None:
        """What a socket makes other nodes know of has a limit; the wallet is told."""
        socket = self.b.socket()
        self.patch(connections, "MAX_DIDS_PER_SOCKET", 2)
        answers = [
            self.new_wallet(self.b).answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
            for _ in range(3)
        ]
        codes = [answer.body.get("code") for answer in answers]
        self.assertEqual(codes, [None, None, "e.m.live-mode-not-supported"])

    def test_cut_off_from_the_store(self) -> None:
        """A node that lost its lease takes it up again with all its sockets, and what it missed is pushed."""
        socket = self.live_at(self.b)
        renew = self.store.cluster.renew
        self.store.cluster.renew = lambda boot, lease: (
            fail(StoreUnavailable()) if boot == self.b.boot else renew(boot, lease)
        )
        self.later(NODE_LEASE + 2 * SWEEP_INTERVAL)
        self.assertEqual(self.live(), ["a"])
        self.forward(self.a)
        self.assertEqual(self.texts(socket), [])
        del self.store.cluster.renew
        self.later(RENEWAL_INTERVAL)
        self.assertEqual((self.live(), self.places()), (["a", "b"], ["b"]))
        self.later(SOON)
        self.assertEqual(self.texts(socket), ["hello"])
        self.forward(self.a, "next")
        self.assertEqual(self.texts(socket), ["next"])

    def test_cannot_renew(self) -> None:
        """
        A node that others take for gone says so itself, though it can reach the store, and comes back. Meanwhile
        others keep house.
        """
        self.later(RENEWAL_INTERVAL)
        one = next(
            in_memory for in_memory in self.in_memory_nodes if self.get(in_memory.cluster.leader_lease.is_leader())
        )
        (other,) = (in_memory for in_memory in self.in_memory_nodes if in_memory is not one)
        names = [other.config.node_name]
        socket, node_health = self.live_at(one), one.base.node_health
        self.forward(one, "pushed")
        self.assertEqual((self.texts(socket), node_health.trouble), (["pushed"], ""))
        renew = self.store.cluster.renew
        self.store.cluster.renew = lambda boot, lease: (
            fail(StoreUnavailable()) if boot == one.boot else renew(boot, lease)
        )
        self.later(2 * NODE_LEASE + SWEEP_INTERVAL + RENEWAL_INTERVAL)
        self.assertEqual((self.live(), node_health.trouble, one.membership.is_settled), (names, NOT_JOINED, False))
        self.assertTrue(self.get(other.cluster.leader_lease.is_leader()))
        found = self.successResultOf(self.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([message.status for message in found], ["pending"])
        del self.store.cluster.renew
        self.later(RENEWAL_INTERVAL)
        self.assertEqual((self.live(), node_health.trouble, self.places()), (["a", "b"], "", [one.config.node_name]))
        self.forward(other)
        self.assertEqual(self.texts(socket), ["hello"])

    def test_store_away_from_all(self) -> None:
        """However long: all are back within 3 s of its return, with their sockets, and push nothing again."""
        for seconds in (NODE_LEASE - RENEWAL_INTERVAL, NODE_LEASE + 1, 6 * NODE_LEASE):
            here, there = self.live_at(self.a), self.live_at(self.b)
            self.forward(self.a, "before")
            self.assertEqual((self.texts(here), self.texts(there)), (["before"], ["before"]))
            with ExitStack() as outage:
                for operation in OF_MEMBERS:
                    outage.enter_context(self.a.failing(operation, StoreUnavailable()))
                self.later(seconds)
            self.later(RENEWAL_INTERVAL)
            self.assertEqual((self.live(), self.places()), (["a", "b"], ["a", "b"]))
            self.assertEqual([in_memory.base.node_health.trouble for in_memory in self.in_memory_nodes], ["", ""])
            self.forward(self.a, "after")
            self.assertEqual((self.texts(here), self.texts(there)), (["after"], ["after"]))
            self.later(2 * SOON)
            self.assertEqual((self.texts(here), self.texts(there)), ([], []))
            for in_memory, socket in ((self.a, here), (self.b, there)):
                in_memory.base.connections.closed(socket)
            self.later(1)

    def test_replaced(self) -> None:
        """A node of that name that starts after a crash takes the place of the old one before its lease is over."""
        self.live_at(self.b)
        self.forward(self.a)
        self.b.freeze()
        again = self.in_memory("b").start()
        self.later(UNRENEWED_LEASE_AGE)
        self.assertEqual((again.said, self.live()), ([], ["a", "b"]))
        found = self.successResultOf(self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([one.status for one in found], ["pending"])

    def test_same_name(self) -> None:
        """A second node of the same name is refused with one line; the first one does not notice."""
        twin = self.in_memory("b").start()
        (line,) = twin.said
        self.assertTrue(line.startswith("node: the name b is in use"))
        self.later(NODE_LEASE)
        self.assertEqual((self.live(), self.b.said), (["a", "b"], []))

    def test_three(self) -> None:
        """Whichever node accepts, and whichever has the socket."""
        third = self.in_memory("c").start()
        sockets = [self.live_at(in_memory) for in_memory in (self.b, third)]
        self.forward(self.a)
        self.forward(third, "again")
        self.assertEqual([self.texts(socket) for socket in sockets], [["hello", "again"]] * 2)
        self.later(RENEWAL_INTERVAL)
        self.assertEqual(self.a.counter("mediator_cluster_nodes"), 3)


class OverdueTests(DIDCommClusterTestCase):
    settings = {"queue": {"delivered_timeout": "40s"}}

    def test_overdue(self) -> None:
        """A push that is not acknowledged in time is pending again, counted where it was pushed."""
        self.live_at(self.b)
        self.forward(self.a)
        self.later(42)
        self.assertEqual(self.b.counter("mediator_messages_stored_total"), 1)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.bob.waiting(), 1)

    def test_acknowledged_elsewhere(self) -> None:
        """Then nothing is pending again."""
        self.live_at(self.b)
        self.forward(self.a)
        (delivered,) = self.bob.fetch()
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.later(42)
        self.assertEqual(self.b.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.bob.waiting(), 0)
