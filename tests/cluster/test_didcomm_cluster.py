"""DIDComm across nodes, on in-memory sockets and a manual clock."""

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

NEXT_ROUND = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1
MEMBER_TASKS = (
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
    """Bob is enrolled and may use either node."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes
        self.bob = self.new_wallet(self.a)
        self.bob_at_b = InMemoryWallet(self.b, self.bob.identity)

    def open_live_socket(self, in_memory: InMemoryNode) -> FakeSocket:
        """A live socket of Bob's at this node, without frames."""
        socket = InMemoryWallet(in_memory, self.bob.identity).go_live()
        socket.frames.clear()
        return socket

    def forward(self, in_memory: InMemoryNode, text: str = "hello", **headers: Any) -> None:
        """Forward an anonymous message to Bob at this node."""
        raw = pack_forward(in_memory, self.bob.did, self.bob.make_payload(text), **headers)
        self.assertEqual(in_memory.receive(raw).status, 202)

    def read_texts(self, socket: FakeSocket) -> list[str]:
        """Texts pushed since the last call."""
        frames, socket.frames = socket.frames, []
        return [
            self.bob.open(delivered.payload).text
            for frame in frames
            for delivered in read_delivery(self.bob.open(frame).message)
        ]

    def count_notifications(self, in_memory: InMemoryNode, outcome: str) -> float:
        """Number of this node's notifications with this outcome."""
        return in_memory.counter("mediator_cluster_pushes_total", outcome=outcome)

    def list_methods(self, in_memory: InMemoryNode) -> list[str]:
        """How accepted messages were delivered, by the event log."""
        return [event["method"] for event in in_memory.events("msg.accept")]

    def list_presence(self) -> list[str]:
        """Names of the nodes that have sockets of Bob's, by the store."""
        found = self.successResultOf(self.store.cluster.find_presence([self.bob.did]))
        return sorted(item.node.name if item.node else "?" for item in found)


class PushTests(DIDCommClusterTestCase):
    """Messages accepted at one node are pushed at another."""

    def test_pushes_to_other_node(self) -> None:
        """A push is immediate and counts as live; the message stays until it is acknowledged, at either node."""
        for acknowledging in (self.bob, self.bob_at_b):
            socket = self.open_live_socket(self.b)
            self.forward(self.a)
            (delivered,) = read_delivery(self.bob.open(socket.frames.pop()).message)
            self.assertEqual(self.bob.count_queued(), 1)
            acknowledging.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
            self.assertEqual(self.bob_at_b.count_queued(), 0)
            self.b.base.connections.closed(socket)
            self.settle()
        self.assertEqual(self.list_methods(self.a), ["live", "live"])
        self.assertEqual(self.count_notifications(self.a, "pushed"), 2)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 0)
        self.assertEqual([event["path"] for event in self.a.events("msg.ack")], ["live"])
        self.assertEqual([event["path"] for event in self.b.events("msg.ack")], ["live"])
        self.assertEqual(self.b.counter("mediator_cluster_hint_duration_seconds_count"), 0)
        self.assertEqual(self.a.counter("mediator_cluster_hint_duration_seconds_count"), 2)

    def test_sockets_at_both_nodes(self) -> None:
        """Sockets at both nodes get the message, each once."""
        local_socket, remote_socket = self.open_live_socket(self.a), self.open_live_socket(self.b)
        self.forward(self.a)
        self.advance(2 * NEXT_ROUND)
        self.assertEqual((self.read_texts(local_socket), self.read_texts(remote_socket)), (["hello"], ["hello"]))
        self.assertEqual(self.list_methods(self.a), ["live"])

    def test_no_socket_no_notification(self) -> None:
        """Without a socket no node is notified."""
        self.forward(self.a)
        self.assertEqual((self.network.requests, self.list_methods(self.a)), (0, ["queue"]))

    def test_local_sockets_need_no_notification(self) -> None:
        """Sockets of this node involve no other."""
        socket = self.open_live_socket(self.a)
        self.forward(self.a)
        self.assertEqual((self.network.requests, self.read_texts(socket)), (0, ["hello"]))

    def test_notifications_are_batched_in_order(self) -> None:
        """Many messages are pushed in order, with fewer requests than messages."""
        socket = self.open_live_socket(self.b)
        raws = [pack_forward(self.a, self.bob.did, self.bob.make_payload(str(number))) for number in range(20)]
        replies = [
            Deferred.fromCoroutine(self.a.didcomm.dispatcher.receive(raw, MessageOrigin("192.0.2.1", None)))
            for raw in raws
        ]
        self.settle()
        self.assertEqual({self.successResultOf(reply).status for reply in replies}, {202})
        self.assertEqual(self.read_texts(socket), [str(number) for number in range(20)])
        self.assertEqual(self.network.requests, 1)

    def test_sender_does_not_wait(self) -> None:
        """The sender gets its 202 before the notification's outcome; the event log waits for that."""
        self.open_live_socket(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.assertEqual(self.list_methods(self.a), [])
        self.advance(2)
        self.assertEqual(self.list_methods(self.a), ["queue"])
        self.assertEqual(
            (self.count_notifications(self.a, "failed"), self.count_notifications(self.a, "pushed")), (1, 0)
        )
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 1)

    def test_endpoint_delivery_if_no_socket_accepts(self) -> None:
        """An account with an endpoint gets by POST what no socket of any node accepted."""
        offered: list[str] = []
        dispatch: Any = self.a.didcomm.due._dispatch
        dispatch.__self__.fail_over = lambda message: offered.append(message.id)
        dispatch.__self__.fail_over_prefix = ""
        socket = self.open_live_socket(self.b)
        self.forward(self.a)
        self.assertEqual(offered, [])
        socket.takes = False
        self.forward(self.a)
        self.assertEqual(len(offered), 1)
        self.assertEqual(self.count_notifications(self.a, "no_session"), 1)

    def test_programming_error_is_logged(self) -> None:
        """A programming error in a remote push is logged."""
        self.open_live_socket(self.b).takes = False
        dispatch: Any = self.a.didcomm.due._dispatch
        dispatch.__self__.fail_over = lambda message: 1 // 0
        dispatch.__self__.fail_over_prefix = ""
        self.forward(self.a)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_delayed_message(self) -> None:
        """A delayed message is pushed when due, wherever its socket is then."""
        self.forward(self.a, delay_milli=5000)
        socket = self.open_live_socket(self.b)
        self.advance(4)
        self.assertEqual(self.read_texts(socket), [])
        self.advance(1.5)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_delayed_message_of_stopped_node(self) -> None:
        """Another node dispatches messages that came due at a stopped one."""
        socket = self.open_live_socket(self.b)
        self.forward(self.a, delay_milli=20_000)
        self.a.freeze()
        self.advance(20 + NODE_LEASE)
        self.assertEqual(self.read_texts(socket), ["hello"])


class LostNotificationTests(DIDCommClusterTestCase):
    def test_round_finds_message(self) -> None:
        """A lost notification delays and loses nothing, and no message comes twice."""
        socket = self.open_live_socket(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["hello"])
        self.advance(3 * SCAN_WINDOW)
        self.assertEqual(self.read_texts(socket), [])
        self.assertEqual(self.bob.count_queued(), 1)

    def test_lost_response(self) -> None:
        """The notification is repeated and the message is not pushed again."""
        socket = self.open_live_socket(self.b)
        answers = iter([True, True, False])
        self.network.lost = lambda node: next(answers)
        self.forward(self.a)
        self.advance(1)
        self.assertEqual(self.network.requests, 3)
        self.assertEqual((self.read_texts(socket), self.list_methods(self.a)), (["hello"], ["live"]))

    def test_backlog_is_not_pushed(self) -> None:
        """Messages older than the subscription are not pushed by a later round, except for the very last."""
        self.forward(self.a)
        self.advance(MAX_VISIBILITY_DELAY + 1)
        socket = self.open_live_socket(self.b)
        self.advance(2 * NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), [])

    def test_backlog_of_second_socket(self) -> None:
        """A round pushes to sockets that existed when the message came, as far as clocks can tell."""
        first = self.open_live_socket(self.b)
        first.takes = False
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.advance(MAX_VISIBILITY_DELAY + 1)
        second = self.open_live_socket(self.b)
        first.takes = True
        self.advance(NEXT_ROUND)
        self.assertEqual((self.read_texts(first), self.read_texts(second)), (["hello"], []))

    def test_store_outage_during_lookup(self) -> None:
        """If the presence lookup fails the message waits and is found later."""
        socket = self.open_live_socket(self.b)
        self.store.cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.forward(self.a)
        self.assertEqual((self.list_methods(self.a), self.read_texts(socket)), (["queue"], []))
        del self.store.cluster.find_presence
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_pushed_elsewhere_meanwhile(self) -> None:
        """A push to a socket of another node does not replace one here: both get it, each once."""
        local_socket, remote_socket = self.open_live_socket(self.a), self.open_live_socket(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        self.advance(2 * NEXT_ROUND)
        self.assertEqual((self.read_texts(local_socket), self.read_texts(remote_socket)), (["hello"], ["hello"]))


class GoingLiveTests(DIDCommClusterTestCase):
    """Earlier messages are in the status, later ones are pushed."""

    def hold_announcements(self) -> Deferred[None]:
        """Delay the store's presence writes until the returned Deferred fires."""
        cluster, held = self.store.cluster, Deferred[None]()
        announce = cluster.add_presence

        def hold(boot: str, dids: list[str]) -> Deferred[None]:
            return held.addCallback(lambda _: announce(boot, dids))

        cluster.add_presence = hold
        self.addCleanup(delattr, cluster, "add_presence")
        return held

    def request_live_mode(self, socket: FakeSocket) -> Deferred[Any]:
        """The reply, if there is one."""
        raw = self.bob_at_b.pack(f"{MP}/live-delivery-change", {"live_delivery": True}, return_route="all")
        reply = Deferred.fromCoroutine(self.b.didcomm.dispatcher.receive(raw, MessageOrigin(socket.client, socket)))
        self.settle()
        return reply

    def test_reply_waits_for_announcement(self) -> None:
        """Until the socket is announced there is no reply; messages that arrive meanwhile are in it."""
        held = self.hold_announcements()
        socket = self.b.socket()
        reply = self.request_live_mode(socket)
        self.assertNoResult(reply)
        self.forward(self.a, "before")
        held.callback(None)
        self.settle()
        body = self.bob.open(self.successResultOf(reply).body).body
        self.assertEqual((body["message_count"], body["live_delivery"]), (1, True))
        self.assertEqual(self.read_texts(socket), [])
        self.forward(self.a, "after")
        self.assertEqual(self.read_texts(socket), ["after"])

    def test_store_outage(self) -> None:
        """Live mode is refused in time for any reply; it works once the store is back."""
        cluster = self.store.cluster
        cluster.add_presence = lambda boot, dids: fail(StoreUnavailable())
        socket = self.b.socket()
        reply = self.successResultOf(self.request_live_mode(socket))
        self.assertEqual((reply.status, reply.retry_after), (503, 5))
        del cluster.add_presence
        self.advance(1.5)
        self.assertEqual(self.list_presence(), ["b"])
        self.forward(self.a)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_live_by_default(self) -> None:
        """Where every socket is live the first reply waits too."""
        in_memory = self.make_node("c", didcomm={"live_default_on": True}).start()
        new_wallet = InMemoryWallet(in_memory, self.bob.identity)
        socket = in_memory.socket()
        held = self.hold_announcements()
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
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_live_mode_off(self) -> None:
        """The presence is withdrawn at once."""
        socket = self.open_live_socket(self.b)
        self.assertEqual(self.list_presence(), ["b"])
        self.bob_at_b.answer(f"{MP}/live-delivery-change", {"live_delivery": False}, socket=socket)
        self.assertEqual(self.list_presence(), [])

    def test_closed_socket(self) -> None:
        """The presence of a closed socket is withdrawn at once; the other socket goes on."""
        first, second = self.open_live_socket(self.b), self.open_live_socket(self.b)
        self.b.base.connections.closed(first)
        self.settle()
        self.assertEqual(self.list_presence(), ["b"])
        self.b.base.connections.closed(second)
        self.settle()
        self.assertEqual(self.list_presence(), [])

    def test_rotation(self) -> None:
        """An account with a new DID is found under that one and no longer under the old one."""
        socket = self.open_live_socket(self.b)
        new = InMemoryWallet(self.b)
        signing = self.bob.identity.signing
        prior = FromPriorClaims(kid=signing.kid, iss=self.bob.did, sub=new.did, iat=int(self.clock.seconds()))
        token = make_from_prior(prior, signing.private)
        new.answer(f"{MP}/status-request", from_prior=token, socket=socket)
        socket.frames.clear()
        self.assertEqual(self.list_presence(), [])
        self.forward(self.a)
        self.assertEqual(len(socket.frames), 1)
        (delivered,) = read_delivery(new.open(socket.frames[0]).message)
        self.assertEqual(self.bob.open(delivered.payload).text, "hello")

    def test_rotation_with_lost_notification(self) -> None:
        """Messages for the old DID from the time of the live socket do not count as backlog."""
        self.forward(self.a, "backlog")
        socket = self.open_live_socket(self.b)
        self.network.cut = lambda node: True
        self.forward(self.a)
        new = InMemoryWallet(self.b)
        signing = self.bob.identity.signing
        prior = FromPriorClaims(kid=signing.kid, iss=self.bob.did, sub=new.did, iat=int(self.clock.seconds()))
        token = make_from_prior(prior, signing.private)
        new.answer(f"{MP}/status-request", from_prior=token, socket=socket)
        socket.frames.clear()
        self.advance(NEXT_ROUND)
        (delivered,) = read_delivery(new.open(socket.frames.pop()).message)
        self.assertEqual((self.bob.open(delivered.payload).text, socket.frames), ("hello", []))


class NodeDeathTests(DIDCommClusterTestCase):
    def test_killed_node(self) -> None:
        """Its pushes are requeued when its lease ends; until then nobody waits for it."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        self.b.freeze()
        self.forward(self.a, "late")
        self.advance(1)
        self.assertEqual(
            (self.count_notifications(self.a, "failed"), self.list_methods(self.a)), (1, ["live", "queue"])
        )
        before = self.a.counter("mediator_messages_stored_total")
        self.advance(NODE_LEASE + 2 * SWEEP_INTERVAL)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), before + 1)
        self.assertEqual((self.list_live_names(), self.list_presence()), (["a"], []))
        statuses = [
            item.status
            for item in self.successResultOf(
                self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999)
            )
        ]
        self.assertEqual(statuses, ["pending", "pending"])

    def test_stale_presence(self) -> None:
        """Between the end of the lease and the sweep stale records are counted and skipped."""
        self.open_live_socket(self.b)
        self.b.freeze()
        self.store.cluster.list_lapsed_nodes = lambda: succeed([])
        self.advance(NODE_LEASE + SWEEP_INTERVAL)
        self.assertEqual(self.list_presence(), ["?"])
        self.forward(self.a)
        self.assertEqual(self.a.counter("mediator_cluster_stale_presence_total"), 1)
        self.assertEqual(self.list_methods(self.a), ["queue"])

    def test_stopped_node(self) -> None:
        """A stopped node leaves no records that others wait for."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        self.b.stop()
        self.assertEqual((self.list_live_names(), self.list_presence()), (["a"], []))
        found = self.successResultOf(self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([item.status for item in found], ["pending"])

    def test_no_notifications_after_stop(self) -> None:
        """A lookup that completes after the node has stopped sends no notifications."""
        self.open_live_socket(self.b)
        response: Deferred[None] = Deferred()
        whereabouts = self.store.cluster.find_presence
        self.store.cluster.find_presence = lambda dids: response.addCallback(lambda _: whereabouts(dids))
        self.forward(self.a)
        self.result_of(self.a.cluster.stop())
        before = self.network.requests
        response.callback(None)
        self.advance(1)
        self.assertEqual(self.network.requests, before)
        del self.store.cluster.find_presence

    def test_presence_per_socket_is_limited(self) -> None:
        """The presence of one socket is limited; the wallet gets an error."""
        socket = self.b.socket()
        self.patch(connections, "MAX_DIDS_PER_SOCKET", 2)
        answers = [
            self.new_wallet(self.b).answer(f"{MP}/live-delivery-change", {"live_delivery": True}, socket=socket)
            for _ in range(3)
        ]
        codes = [answer.body.get("code") for answer in answers]
        self.assertEqual(codes, [None, None, "e.m.live-mode-not-supported"])

    def test_node_cut_off_from_store(self) -> None:
        """A node that lost its lease joins again with all its sockets, and pushes what it missed."""
        socket = self.open_live_socket(self.b)
        renew = self.store.cluster.renew
        self.store.cluster.renew = lambda boot, lease: (
            fail(StoreUnavailable()) if boot == self.b.boot else renew(boot, lease)
        )
        self.advance(NODE_LEASE + 2 * SWEEP_INTERVAL)
        self.assertEqual(self.list_live_names(), ["a"])
        self.forward(self.a)
        self.assertEqual(self.read_texts(socket), [])
        del self.store.cluster.renew
        self.advance(RENEWAL_INTERVAL)
        self.assertEqual((self.list_live_names(), self.list_presence()), (["a", "b"], ["b"]))
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_texts(socket), ["hello"])
        self.forward(self.a, "next")
        self.assertEqual(self.read_texts(socket), ["next"])

    def test_failed_renewal(self) -> None:
        """
        A node that others take for lapsed reports that itself, though it reaches the store, and joins again.
        Meanwhile others are leader.
        """
        self.advance(RENEWAL_INTERVAL)
        one = next(
            in_memory
            for in_memory in self.in_memory_nodes
            if self.result_of(in_memory.cluster.leader_lease.is_leader())
        )
        (other,) = (in_memory for in_memory in self.in_memory_nodes if in_memory is not one)
        names = [other.config.node_name]
        socket, node_health = self.open_live_socket(one), one.base.node_health
        self.forward(one, "pushed")
        self.assertEqual((self.read_texts(socket), node_health.trouble), (["pushed"], ""))
        renew = self.store.cluster.renew
        self.store.cluster.renew = lambda boot, lease: (
            fail(StoreUnavailable()) if boot == one.boot else renew(boot, lease)
        )
        self.advance(2 * NODE_LEASE + SWEEP_INTERVAL + RENEWAL_INTERVAL)
        self.assertEqual(
            (self.list_live_names(), node_health.trouble, one.membership.is_settled), (names, NOT_JOINED, False)
        )
        self.assertTrue(self.result_of(other.cluster.leader_lease.is_leader()))
        found = self.successResultOf(self.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([message.status for message in found], ["pending"])
        del self.store.cluster.renew
        self.advance(RENEWAL_INTERVAL)
        self.assertEqual(
            (self.list_live_names(), node_health.trouble, self.list_presence()),
            (["a", "b"], "", [one.config.node_name]),
        )
        self.forward(other)
        self.assertEqual(self.read_texts(socket), ["hello"])

    def test_store_outage_for_all(self) -> None:
        """After an outage of any length all nodes are back within 3 s with their sockets, and push nothing again."""
        for seconds in (NODE_LEASE - RENEWAL_INTERVAL, NODE_LEASE + 1, 6 * NODE_LEASE):
            local_socket, remote_socket = self.open_live_socket(self.a), self.open_live_socket(self.b)
            self.forward(self.a, "before")
            self.assertEqual(
                (self.read_texts(local_socket), self.read_texts(remote_socket)), (["before"], ["before"])
            )
            with ExitStack() as outage:
                for operation in MEMBER_TASKS:
                    outage.enter_context(self.a.failing(operation, StoreUnavailable()))
                self.advance(seconds)
            self.advance(RENEWAL_INTERVAL)
            self.assertEqual((self.list_live_names(), self.list_presence()), (["a", "b"], ["a", "b"]))
            self.assertEqual([in_memory.base.node_health.trouble for in_memory in self.in_memory_nodes], ["", ""])
            self.forward(self.a, "after")
            self.assertEqual((self.read_texts(local_socket), self.read_texts(remote_socket)), (["after"], ["after"]))
            self.advance(2 * NEXT_ROUND)
            self.assertEqual((self.read_texts(local_socket), self.read_texts(remote_socket)), ([], []))
            for in_memory, socket in ((self.a, local_socket), (self.b, remote_socket)):
                in_memory.base.connections.closed(socket)
            self.advance(1)

    def test_replacement_of_crashed_node(self) -> None:
        """A node with the name of a crashed one replaces it before its lease ends."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        self.b.freeze()
        replacement = self.make_node("b").start()
        self.advance(UNRENEWED_LEASE_AGE)
        self.assertEqual((replacement.fatal_errors, self.list_live_names()), ([], ["a", "b"]))
        found = self.successResultOf(self.a.store.fetch_messages(self.bob.did, None, limit=9, max_bytes=99_999))
        self.assertEqual([item.status for item in found], ["pending"])

    def test_three_nodes(self) -> None:
        """It works with any accepting node and any node of the socket."""
        third = self.make_node("c").start()
        sockets = [self.open_live_socket(in_memory) for in_memory in (self.b, third)]
        self.forward(self.a)
        self.forward(third, "again")
        self.assertEqual([self.read_texts(socket) for socket in sockets], [["hello", "again"]] * 2)
        self.advance(RENEWAL_INTERVAL)
        self.assertEqual(self.a.counter("mediator_cluster_nodes"), 3)


class OverdueTests(DIDCommClusterTestCase):
    settings = {"queue": {"delivered_timeout": "40s"}}

    def test_requeues_overdue_push(self) -> None:
        """A push that is not acknowledged in time is requeued and counted where it was pushed."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        self.advance(42)
        self.assertEqual(self.b.counter("mediator_messages_stored_total"), 1)
        self.assertEqual(self.a.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.bob.count_queued(), 1)

    def test_acknowledged_at_other_node(self) -> None:
        """Then nothing is requeued."""
        self.open_live_socket(self.b)
        self.forward(self.a)
        (delivered,) = self.bob.fetch()
        self.bob.answer(f"{MP}/messages-received", {"message_id_list": [delivered.id]})
        self.advance(42)
        self.assertEqual(self.b.counter("mediator_messages_stored_total"), 0)
        self.assertEqual(self.bob.count_queued(), 0)
