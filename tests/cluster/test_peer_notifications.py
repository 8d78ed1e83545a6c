"""Notifications to other nodes: batches, retries, limits, and nodes that are gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import peer_notifications
from mediatord.cluster.peer_connection import (
    MAX_BODY_BYTES,
    PeerCallFailed,
    PeerCallRejected,
    PeerReplaced,
)
from mediatord.cluster.peer_notifications import (
    DEAD_PEER_TTL,
    ENVELOPE_BYTES,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_NOTIFICATIONS,
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    NOTIFICATION_KINDS,
    PROTOCOL_VERSION,
    RETRY_DELAYS,
    NotificationNames,
    PeerNotification,
    PeerQueues,
    decode_names,
    encode_names,
)
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import StoredMessage

BEA = ClusterNode("bea", "bbbb", "tcp:host=10.0.0.2:port=7070", b"seal")
CAL = ClusterNode("cal", "cccc", "tcp:host=10.0.0.3:port=7070", b"seal")


def make_message(id_: str) -> StoredMessage:
    """A queued message."""
    return StoredMessage(id_, "did:x:bob", "did:x:bob", b"{}", "json", 1000.25, 2000.5)


class FakeMetrics:
    """Counters and observations."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.durations: list[float] = []
        self.cluster_pushes = self.peer_notification_duration = self

    def inc(self, outcome: str) -> None:
        """Count an outcome."""
        self.outcomes[outcome] += 1

    def observe(self, seconds: float) -> None:
        """Record a duration."""
        self.durations.append(seconds)


def push_all(names: NotificationNames) -> NotificationNames:
    """Push everything."""
    return names


class PeersTestCase(SynchronousTestCase):
    """Notifications to one peer, whose responses the test gives."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.counts = FakeMetrics()
        self.pending_calls: list[tuple[ClusterNode, bytes, Deferred[bytes]]] = []
        self.peers = PeerQueues(self.clock, self.call, cast(Any, self.counts))

    def call(self, node: ClusterNode, body: bytes) -> Deferred[bytes]:
        """Record a request and wait for the test to respond."""
        self.pending_calls.append((node, body, Deferred()))
        return self.pending_calls[-1][2]

    def enqueue(
        self,
        name: str = "m",
        *,
        node: ClusterNode = BEA,
        did: str = "",
        payload_bytes: int = 0,
    ) -> Deferred[bool | None]:
        """Enqueue one notification, for a DID of its own unless one is given."""
        return self.peers.enqueue(node, PeerNotification("messages", name, did or name, payload_bytes))

    def enqueue_many(self, count: int, prefix: str = "m") -> list[Deferred[bool | None]]:
        """Enqueue so many."""
        return [self.enqueue(f"{prefix}{number}") for number in range(count)]

    def list_requests(self) -> list[list[str]]:
        """Notifications by pending request."""
        self.clock.advance(0)
        return [decode_names("hints", body)["messages"] for _, body, _ in self.pending_calls]

    def respond(self, push: Callable[[NotificationNames], NotificationNames] = push_all) -> None:
        """Respond to the oldest request."""
        self.clock.advance(0)
        _, body, answer = self.pending_calls.pop(0)
        answer.callback(encode_names("pushed", push(decode_names("hints", body))))

    def fail_with(self, error: type[Exception]) -> None:
        """Fail the oldest request."""
        self.clock.advance(0)
        self.pending_calls.pop(0)[2].errback(error())


class SendingTests(PeersTestCase):
    def test_one_request_per_iteration(self) -> None:
        """Notifications of one reactor iteration share a request; each gets its outcome."""
        first, second = self.enqueue_many(2)
        self.assertEqual(self.list_requests(), [["m0", "m1"]])
        self.clock.advance(0.5)
        self.respond(lambda names: {"messages": ["m1"]})
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (False, True))
        self.assertEqual(self.counts.outcomes, {"pushed": 1, "no_session": 1})
        self.assertEqual(self.counts.durations, [0.5, 0.5])

    def test_one_request_at_a_time(self) -> None:
        """One request of at most a hundred notifications is pending; the rest waits."""
        notifications = self.enqueue_many(2 * MAX_BATCH + 1)
        for count in (MAX_BATCH, MAX_BATCH, 1):
            self.assertEqual([len(names) for names in self.list_requests()], [count])
            self.respond()
        self.assertEqual(self.list_requests(), [])
        self.assertTrue(all(self.successResultOf(notification) for notification in notifications))

    def test_long_names(self) -> None:
        """A request is never longer than the peer reads."""
        names = [f"{number:02d}" * 2000 for number in range(50)]
        for name in names:
            self.enqueue(name)
        sent: list[str] = []
        while self.list_requests():
            self.assertLessEqual(len(self.pending_calls[0][1]), MAX_BODY_BYTES)
            sent += decode_names("hints", self.pending_calls[0][1])["messages"]
            self.respond()
        self.assertEqual(sent, names)

    def test_large_messages(self) -> None:
        """A request never makes the peer read more than a few megabytes."""
        for number in range(4):
            self.enqueue(f"m{number}", payload_bytes=MAX_BATCH_BYTES // 2)
        self.assertEqual(self.list_requests(), [["m0", "m1"]])
        self.respond()
        self.assertEqual(self.list_requests(), [["m2", "m3"]])

    def test_order_is_kept(self) -> None:
        """Notifications that arrive during a request wait, also for its retries, and share the next one."""
        self.enqueue("m0")
        self.list_requests()
        for name in ("m1", "m2", "m3"):
            self.enqueue(name)
        self.assertEqual(self.list_requests(), [["m0"]])
        self.fail_with(PeerCallFailed)
        self.assertEqual(self.list_requests(), [])
        self.clock.advance(RETRY_DELAYS[0])
        self.respond()
        self.assertEqual(self.list_requests(), [["m1", "m2", "m3"]])

    def test_peers_are_independent(self) -> None:
        """A slow peer delays only its own notifications."""
        self.enqueue_many(3 * MAX_BATCH)
        self.enqueue("x", node=CAL)
        self.clock.advance(0)
        self.assertEqual([node for node, _, _ in self.pending_calls].count(CAL), 1)


class LimitTests(PeersTestCase):
    def test_queue_is_limited(self) -> None:
        """Notifications beyond the limit are dropped at once and counted; responses make room."""
        notifications = self.enqueue_many(MAX_QUEUED)
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.counts.outcomes, {"dropped": 1})
        self.list_requests()  # two batches have left the queue
        self.assertNoResult(self.enqueue("fits"))
        self.assertNoResult(notifications[0])

    def test_bytes_are_limited(self) -> None:
        """Messages are held in memory meanwhile, so bytes are limited; one always fits."""
        self.assertNoResult(self.enqueue("huge", payload_bytes=2 * MAX_QUEUED_BYTES))
        self.assertIsNone(self.successResultOf(self.enqueue("more", payload_bytes=1)))
        self.list_requests()
        self.assertNoResult(self.enqueue("again", payload_bytes=1))

    def test_sent_bytes_do_not_count(self) -> None:
        """Only waiting bytes are counted."""
        self.enqueue("huge", payload_bytes=2 * MAX_QUEUED_BYTES)
        self.list_requests()
        self.assertNoResult(self.enqueue("again", payload_bytes=1))
        self.assertNoResult(self.enqueue("and again", payload_bytes=1))


class FailureTests(PeersTestCase):
    def test_three_attempts(self) -> None:
        """After three attempts with pauses the notification is given up."""
        notification = self.enqueue()
        for pause in RETRY_DELAYS:
            self.fail_with(PeerCallFailed)
            self.assertEqual(self.list_requests(), [])
            self.clock.advance(pause)
            self.assertEqual(self.list_requests(), [["m"]])
        self.assertNoResult(notification)
        self.fail_with(PeerCallFailed)
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual((self.counts.outcomes, self.counts.durations), ({"failed": 1}, []))
        self.clock.advance(60)
        self.assertEqual(self.pending_calls, [])

    def test_later_attempt_succeeds(self) -> None:
        """One successful attempt is enough, also after an invalid response."""
        notification = self.enqueue()
        self.clock.advance(0)
        self.pending_calls.pop(0)[2].callback(b"<html>")
        self.clock.advance(RETRY_DELAYS[0])
        self.respond()
        self.assertIs(self.successResultOf(notification), True)

    def test_another_secret(self) -> None:
        """There is no retry; it is logged once a minute."""
        for _ in range(3):
            notification = self.enqueue()
            self.fail_with(PeerCallRejected)
            self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(self.counts.outcomes, {"failed": 3})

    def test_retries_after_refused_connection(self) -> None:
        """A refused connection is retried, for this notification and the next."""
        notification = self.enqueue()
        for pause in (*RETRY_DELAYS, 0):
            self.fail_with(PeerCallFailed)
            self.clock.advance(pause)
        self.assertIsNone(self.successResultOf(notification))
        notification = self.enqueue()
        self.respond()
        self.assertIs(self.successResultOf(notification), True)

    def test_replaced_node(self) -> None:
        """If another boot answers, waiting and new notifications fail at once."""
        notifications = self.enqueue_many(3 * MAX_BATCH)
        self.replace()
        self.assertTrue(all(self.successResultOf(notification) is None for notification in notifications))
        self.assertEqual(self.counts.outcomes, {"failed": 3 * MAX_BATCH})
        self.assertEqual(self.peers.pending, (0, 0))
        self.pending_calls.clear()
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.list_requests(), [])
        self.assertNoResult(self.enqueue("other", node=CAL))

    def test_replaced_nodes_are_forgotten(self) -> None:
        """Boots do not return, and are remembered only while the store lists them."""
        self.enqueue()
        self.replace()
        self.peers.set_live_nodes({BEA.boot})
        self.assertIsNone(self.successResultOf(self.enqueue()))
        for _ in range(2):
            self.peers.set_live_nodes(set())
        self.assertNoResult(self.enqueue())

    def test_replaced_node_is_retried_later(self) -> None:
        """A node with a valid lease is retried later: its address may have led elsewhere for a moment."""
        self.enqueue()
        self.replace()
        self.clock.advance(DEAD_PEER_TTL - 0.5)
        self.peers.set_live_nodes({BEA.boot})
        self.assertIsNone(self.successResultOf(self.enqueue()))
        self.clock.advance(0.5)
        notification = self.enqueue()
        self.respond()
        self.assertIs(self.successResultOf(notification), True)

    def test_retry_time_after_clock_set_back(self) -> None:
        """A clock set back does not prolong that."""
        for is_live in (lambda: None, lambda: self.peers.set_live_nodes({BEA.boot})):
            self.enqueue()
            self.replace()
            self.clock.rightNow -= 7200
            is_live()
            notification = self.enqueue()
            self.respond()
            self.assertIs(self.successResultOf(notification), True)

    def replace(self) -> None:
        """Respond to the oldest request with another boot."""
        self.clock.advance(0)
        self.pending_calls.pop(0)[2].errback(PeerReplaced("dddd"))

    def test_node_not_listed(self) -> None:
        """Notifications for a node that the store does not list are given up; one miss may mean that it is new."""
        notification = self.enqueue()
        self.peers.set_live_nodes(set())
        self.assertNoResult(notification)
        self.peers.set_live_nodes({BEA.boot})
        self.peers.set_live_nodes(set())
        self.assertNoResult(notification)
        self.peers.set_live_nodes(set())
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(len(self.peers), 0)

    def test_stop(self) -> None:
        """All notifications are given up, in the queue, in a request or in a pause, and no timer is left."""
        waiting = self.enqueue("w", node=CAL)
        paused = self.enqueue("p")
        self.fail_with(PeerCallFailed)
        self.fail_with(PeerCallFailed)
        under_way = self.enqueue_many(3)
        self.peers.end()
        for notification in (waiting, paused, *under_way):
            self.assertIsNone(self.successResultOf(notification))
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stop_during_request(self) -> None:
        """A request that fails because it is cancelled is not retried."""
        notification = self.enqueue()
        self.list_requests()
        answer = self.pending_calls[0][2]
        answer._canceller = lambda cancelled: cancelled.errback(PeerCallFailed())
        self.peers.end()
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_programming_error(self) -> None:
        """A programming error fails the batch and is logged."""

        async def broken(node: ClusterNode, body: bytes) -> bytes:
            raise RuntimeError("boom")

        self.peers = PeerQueues(self.clock, broken, cast(Any, self.counts))
        notification = self.enqueue()
        self.clock.advance(0)
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.patch(peer_notifications, "encode_names", lambda *args: 1 // 0)
        notification = self.enqueue()
        self.clock.advance(0)
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])


NAMES: NotificationNames = {"messages": ["0190aa", "0190cc"], "events": ["0190bb"], "contracts": ["did:x:bob"]}


class BodyTests(SynchronousTestCase):
    """Bodies of requests and responses."""

    def test_recorded_bodies(self) -> None:
        """Bodies are as in the recording, which is not to be changed without need."""
        hints = (
            b'{"protocol":1,"hints":{"messages":["0190aa","0190cc"],"events":["0190bb"],"contracts":["did:x:bob"]}}'
        )
        pushed = b'{"protocol":1,"pushed":{"messages":["0190aa"],"contracts":["did:x:bob"]}}'
        self.assertEqual((encode_names("hints", NAMES), decode_names("hints", hints)), (hints, NAMES))
        names: NotificationNames = {"messages": ["0190aa"], "contracts": ["did:x:bob"]}
        self.assertEqual((encode_names("pushed", names), decode_names("pushed", pushed)), (pushed, names))

    def test_request_of_newer_node(self) -> None:
        """Unknown versions, members, kinds and forms of names are ignored."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "priority": {"high": True},
            "hints": {"messages": ["0190aa", {"id": "0190dd", "urgent": True}], "drafts": ["0190ee"], "events": {}},
        }
        self.assertEqual(decode_names("hints", json.dumps(body).encode()), {"messages": ["0190aa"]})

    def test_response_of_newer_node(self) -> None:
        """Unknown members of a response are ignored."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "pushed": {"messages": ["0190aa"], "drafts": ["0190ee"]},
            "load": 0.5,
        }
        self.assertEqual(decode_names("pushed", json.dumps(body).encode()), {"messages": ["0190aa"]})

    def test_response_of_older_node(self) -> None:
        """A kind that it does not know counts as not pushed."""
        self.assertEqual(decode_names("pushed", b'{"protocol":0,"pushed":{}}'), {})

    def test_invalid_requests(self) -> None:
        """Requests without names are invalid."""
        for body in (b"", b"x", b"[]", b"{}", b'{"hints":[]}', b'{"hints":null}', b'{"pushed":{}}', b"\xff"):
            self.assertRaises(ValueError, decode_names, "hints", body)
        self.assertRaises(ValueError, decode_names, "pushed", b'{"hints":{}}')

    def test_too_many_names(self) -> None:
        """More names than any node sends are refused."""
        names = [str(number) for number in range(MAX_NOTIFICATIONS + 1)]
        self.assertRaises(ValueError, decode_names, "hints", json.dumps({"hints": {"messages": names}}).encode())
        decode_names("hints", json.dumps({"hints": {"messages": names[1:]}}).encode())

    def test_repeated_name_counts_once(self) -> None:
        """A repeated name counts once."""
        self.assertEqual(decode_names("hints", b'{"hints":{"messages":["a","b","a"]}}'), {"messages": ["a", "b"]})

    def test_envelope_size(self) -> None:
        """A body with all kinds and no names."""
        self.assertLess(len(encode_names("hints", {kind: [] for kind in NOTIFICATION_KINDS})), ENVELOPE_BYTES)
