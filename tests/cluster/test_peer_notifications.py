"""Hints on their way to other nodes: batches, retries, limits, and nodes that are gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

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
    MAX_MESSAGE_AGE,
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
    decode_request,
    encode_names,
)
from mediatord.protocol import encoding
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import StoredMessage

BEA = ClusterNode("bea", "bbbb", "tcp:host=10.0.0.2:port=7070", b"seal")
CAL = ClusterNode("cal", "cccc", "tcp:host=10.0.0.3:port=7070", b"seal")


def make_message(id_: str) -> StoredMessage:
    """One that waits."""
    return StoredMessage(id_, "did:x:bob", "did:x:bob", b"{}", "json", 1000.25, 2000.5)


class Counts:
    """What is counted."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.took: list[float] = []
        self.cluster_pushes = self.peer_notification_duration = self

    def inc(self, outcome: str) -> None:
        """A hint came to this end."""
        self.outcomes[outcome] += 1

    def observe(self, seconds: float) -> None:
        """It was answered."""
        self.took.append(seconds)


def all_of(names: NotificationNames) -> NotificationNames:
    """Push everything."""
    return names


class PeersTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.counts = Counts()
        self.asked: list[tuple[ClusterNode, bytes, Deferred[bytes]]] = []
        self.peers = PeerQueues(self.clock, self.call, cast(Any, self.counts))

    def call(self, node: ClusterNode, body: bytes) -> Deferred[bytes]:
        """Note a request and wait for the test to answer it."""
        self.asked.append((node, body, Deferred()))
        return self.asked[-1][2]

    def enqueue(
        self,
        name: str = "m",
        *,
        node: ClusterNode = BEA,
        did: str = "",
        payload_bytes: int = 0,
        message: StoredMessage | None = None,
    ) -> Deferred[bool | None]:
        """One hint, in a lane of its own unless another one is named."""
        return self.peers.enqueue(node, PeerNotification("messages", name, did or name, payload_bytes), message)

    def many(self, count: int, prefix: str = "m") -> list[Deferred[bool | None]]:
        """So many."""
        return [self.enqueue(f"{prefix}{number}") for number in range(count)]

    def requests(self) -> list[list[str]]:
        """What is asked for now, request by request."""
        self.clock.advance(0)
        return [decode_names("hints", body)["messages"] for _, body, _ in self.asked]

    def answer(self, push: Callable[[NotificationNames], NotificationNames] = all_of) -> None:
        """Answer the oldest request."""
        self.clock.advance(0)
        _, body, answer = self.asked.pop(0)
        answer.callback(encode_names("pushed", push(decode_names("hints", body))))

    def fail_with(self, error: type[Exception]) -> None:
        """Let the oldest request come to nothing."""
        self.clock.advance(0)
        self.asked.pop(0)[2].errback(error())


class SendingTests(PeersTestCase):
    def test_one_turn_one_request(self) -> None:
        """What comes in one turn of the reactor goes together; each learns what became of it."""
        first, second = self.many(2)
        self.assertEqual(self.requests(), [["m0", "m1"]])
        self.clock.advance(0.5)
        self.answer(lambda names: {"messages": ["m1"]})
        self.assertEqual((self.successResultOf(first), self.successResultOf(second)), (False, True))
        self.assertEqual(self.counts.outcomes, {"pushed": 1, "no_session": 1})
        self.assertEqual(self.counts.took, [0.5, 0.5])

    def test_one_at_a_time(self) -> None:
        """One request is under way, of a hundred hints at most; the rest waits for its turn."""
        notifications = self.many(2 * MAX_BATCH + 1)
        for count in (MAX_BATCH, MAX_BATCH, 1):
            self.assertEqual([len(names) for names in self.requests()], [count])
            self.answer()
        self.assertEqual(self.requests(), [])
        self.assertTrue(all(self.successResultOf(notification) for notification in notifications))

    def test_long_names(self) -> None:
        """A request is never longer than what the other side reads."""
        names = [f"{number:02d}" * 2000 for number in range(50)]
        for name in names:
            self.enqueue(name)
        sent: list[str] = []
        while self.requests():
            self.assertLessEqual(len(self.asked[0][1]), MAX_BODY_BYTES)
            sent += decode_names("hints", self.asked[0][1])["messages"]
            self.answer()
        self.assertEqual(sent, names)

    def test_heavy_messages(self) -> None:
        """The other node is not made to read more than a few megabytes at once."""
        for number in range(4):
            self.enqueue(f"m{number}", payload_bytes=MAX_BATCH_BYTES // 2)
        self.assertEqual(self.requests(), [["m0", "m1"]])
        self.answer()
        self.assertEqual(self.requests(), [["m2", "m3"]])

    def test_in_order(self) -> None:
        """What comes while a request is under way waits, also for its next attempt, and goes together."""
        self.enqueue("m0")
        self.requests()
        for name in ("m1", "m2", "m3"):
            self.enqueue(name)
        self.assertEqual(self.requests(), [["m0"]])
        self.fail_with(PeerCallFailed)
        self.assertEqual(self.requests(), [])
        self.clock.advance(RETRY_DELAYS[0])
        self.answer()
        self.assertEqual(self.requests(), [["m1", "m2", "m3"]])

    def test_other_nodes_do_not_wait(self) -> None:
        """A node that is slow is in the way of its own hints only."""
        self.many(3 * MAX_BATCH)
        self.enqueue("x", node=CAL)
        self.clock.advance(0)
        self.assertEqual([node for node, _, _ in self.asked].count(CAL), 1)


class MessageTests(PeersTestCase):
    """Messages that are sent with their notifications."""

    def send(self, *messages: StoredMessage | None) -> None:
        """Notify of these; None for one that is not at hand."""
        for number, message in enumerate(messages):
            self.enqueue(message.id if message else f"none {number}", message=message)
        self.clock.advance(0)

    def received(self) -> list[StoredMessage]:
        """The messages in the oldest request."""
        body = self.asked[0][1]
        self.assertLessEqual(len(body), MAX_BODY_BYTES)
        return list(decode_request(body, 0.0)[1].values())

    def test_as_they_are(self) -> None:
        """The other node gets what it would have read from the store."""
        messages = [make_message("a"), replace(make_message("b"), payload=bytes(range(256)), form="base64")]
        self.send(*messages)
        self.assertEqual(self.requests(), [["a", "b"]])
        self.assertEqual(self.received(), messages)

    def test_all_or_none(self) -> None:
        """With one that the other node has to read it reads all of them, to keep their order."""
        self.send(make_message("a"), None, make_message("b"))
        self.assertEqual(self.received(), [])
        self.assertEqual(self.requests(), [["a", "none 1", "b"]])

    def test_too_large(self) -> None:
        """A request never becomes too long by them, and the batch no smaller; nothing is encoded in vain."""
        encode = Mock(wraps=encoding.encode_base64url)
        self.patch(encoding, "encode_base64url", encode)
        self.send(*(replace(make_message(f"m{number}"), payload=bytes(16_384)) for number in range(4)))
        self.assertEqual(self.received(), [])
        self.assertEqual([len(names) for names in self.requests()], [4])
        encode.assert_not_called()

    def test_nearly_too_large(self) -> None:
        """What only the members beside the payloads make too long is noticed as well."""
        self.send(*(replace(make_message(f"m{number}"), payload=bytes(491)) for number in range(MAX_BATCH)))
        self.assertEqual(self.received(), [])
        self.assertEqual([len(names) for names in self.requests()], [MAX_BATCH])

    def test_queued_for_long(self) -> None:
        """While the other node was slow the recipient may have acknowledged a message elsewhere."""
        self.send(make_message("a"))
        self.send(make_message("b"))
        self.clock.advance(2 * MAX_MESSAGE_AGE)
        self.answer()
        self.assertEqual(self.received(), [])
        self.assertEqual(self.requests(), [["b"]])

    def test_queued_for_a_moment(self) -> None:
        """An answer of usual speed delays nothing by much."""
        self.send(make_message("a"))
        self.send(make_message("b"))
        self.clock.advance(MAX_MESSAGE_AGE / 2)
        self.answer()
        self.assertEqual(self.received(), [make_message("b")])

    def test_no_second_time(self) -> None:
        """Until the next attempt the recipient may have acknowledged a message."""
        self.send(make_message("a"))
        self.fail_with(PeerCallFailed)
        self.clock.advance(RETRY_DELAYS[0])
        self.assertEqual(self.received(), [])
        self.assertEqual(self.requests(), [["a"]])


class LimitTests(PeersTestCase):
    def test_full(self) -> None:
        """What is too much is dropped at once, and counted; there is room again when something was answered."""
        notifications = self.many(MAX_QUEUED)
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.counts.outcomes, {"dropped": 1})
        self.requests()  # two batches have left the queue
        self.assertNoResult(self.enqueue("fits"))
        self.assertNoResult(notifications[0])

    def test_bytes(self) -> None:
        """The messages themselves are in memory meanwhile; but one always fits."""
        self.assertNoResult(self.enqueue("huge", payload_bytes=2 * MAX_QUEUED_BYTES))
        self.assertIsNone(self.successResultOf(self.enqueue("more", payload_bytes=1)))
        self.requests()
        self.assertNoResult(self.enqueue("again", payload_bytes=1))

    def test_bytes_that_have_gone(self) -> None:
        """However much has been sent, only what waits is counted."""
        self.enqueue("huge", payload_bytes=2 * MAX_QUEUED_BYTES)
        self.requests()
        self.assertNoResult(self.enqueue("again", payload_bytes=1))
        self.assertNoResult(self.enqueue("and again", payload_bytes=1))


class FailureTests(PeersTestCase):
    def test_three_attempts(self) -> None:
        """With pauses between them; then the hint is given up."""
        notification = self.enqueue()
        for pause in RETRY_DELAYS:
            self.fail_with(PeerCallFailed)
            self.assertEqual(self.requests(), [])
            self.clock.advance(pause)
            self.assertEqual(self.requests(), [["m"]])
        self.assertNoResult(notification)
        self.fail_with(PeerCallFailed)
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual((self.counts.outcomes, self.counts.took), ({"failed": 1}, []))
        self.clock.advance(60)
        self.assertEqual(self.asked, [])

    def test_answer_at_last(self) -> None:
        """An attempt that succeeds is enough, also after an answer that is none."""
        notification = self.enqueue()
        self.clock.advance(0)
        self.asked.pop(0)[2].callback(b"<html>")
        self.clock.advance(RETRY_DELAYS[0])
        self.answer()
        self.assertIs(self.successResultOf(notification), True)

    def test_another_secret(self) -> None:
        """There is no use in trying again; it is said once a minute."""
        for _ in range(3):
            notification = self.enqueue()
            self.fail_with(PeerCallRejected)
            self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(self.counts.outcomes, {"failed": 3})

    def test_next_one_after_a_failure(self) -> None:
        """That nobody listens may change: it is tried again, for this hint and for the next."""
        notification = self.enqueue()
        for pause in (*RETRY_DELAYS, 0):
            self.fail_with(PeerCallFailed)
            self.clock.advance(pause)
        self.assertIsNone(self.successResultOf(notification))
        notification = self.enqueue()
        self.answer()
        self.assertIs(self.successResultOf(notification), True)

    def test_gone(self) -> None:
        """Another node is there: hints fail at once, those that wait and those that come."""
        notifications = self.many(3 * MAX_BATCH)
        self.replace()
        self.assertTrue(all(self.successResultOf(notification) is None for notification in notifications))
        self.assertEqual(self.counts.outcomes, {"failed": 3 * MAX_BATCH})
        self.assertEqual(self.peers.pending, (0, 0))
        self.asked.clear()
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.requests(), [])
        self.assertNoResult(self.enqueue("other", node=CAL))

    def test_gone_is_forgotten_with_the_node(self) -> None:
        """Boots do not come back, and are not remembered for longer than the store lists them."""
        self.enqueue()
        self.replace()
        self.peers.set_live_nodes({BEA.boot})
        self.assertIsNone(self.successResultOf(self.enqueue()))
        for _ in range(2):
            self.peers.set_live_nodes(set())
        self.assertNoResult(self.enqueue())

    def test_gone_for_a_while(self) -> None:
        """A node that is live by its lease is asked again later: its address may have led elsewhere for a moment."""
        self.enqueue()
        self.replace()
        self.clock.advance(DEAD_PEER_TTL - 0.5)
        self.peers.set_live_nodes({BEA.boot})
        self.assertIsNone(self.successResultOf(self.enqueue()))
        self.clock.advance(0.5)
        notification = self.enqueue()
        self.answer()
        self.assertIs(self.successResultOf(notification), True)

    def test_gone_before_the_clock_was_set_back(self) -> None:
        """For no longer than that."""
        for is_live in (lambda: None, lambda: self.peers.set_live_nodes({BEA.boot})):
            self.enqueue()
            self.replace()
            self.clock.rightNow -= 7200
            is_live()
            notification = self.enqueue()
            self.answer()
            self.assertIs(self.successResultOf(notification), True)

    def replace(self) -> None:
        """Let the oldest request be answered by another boot."""
        self.clock.advance(0)
        self.asked.pop(0)[2].errback(PeerReplaced("dddd"))

    def test_not_live_any_more(self) -> None:
        """What waits for a node that the store does not list is given up; one miss may be because it is so new."""
        notification = self.enqueue()
        self.peers.set_live_nodes(set())
        self.assertNoResult(notification)
        self.peers.set_live_nodes({BEA.boot})
        self.peers.set_live_nodes(set())
        self.assertNoResult(notification)
        self.peers.set_live_nodes(set())
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(len(self.peers), 0)

    def test_end(self) -> None:
        """Everything is given up, wherever it is: before it is sent, under way, in a pause; and no timer is left."""
        waiting = self.enqueue("w", node=CAL)
        paused = self.enqueue("p")
        self.fail_with(PeerCallFailed)
        self.fail_with(PeerCallFailed)
        under_way = self.many(3)
        self.peers.end()
        for notification in (waiting, paused, *under_way):
            self.assertIsNone(self.successResultOf(notification))
        self.assertIsNone(self.successResultOf(self.enqueue("late")))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_end_while_asking(self) -> None:
        """A request that fails because it is given up is not tried again."""
        notification = self.enqueue()
        self.requests()
        answer = self.asked[0][2]
        answer._canceller = lambda cancelled: cancelled.errback(PeerCallFailed())
        self.peers.end()
        self.assertIsNone(self.successResultOf(notification))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_fault(self) -> None:
        """A mistake of ours costs the batch and is logged."""

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


HINTS: NotificationNames = {"messages": ["0190aa", "0190cc"], "events": ["0190bb"], "contracts": ["did:x:bob"]}


class BodyTests(SynchronousTestCase):
    """The bodies of requests and answers."""

    def test_recorded(self) -> None:
        """They are as the first version that had nodes wrote them, and not to be changed without a need."""
        hints = (
            b'{"protocol":1,"hints":{"messages":["0190aa","0190cc"],"events":["0190bb"],"contracts":["did:x:bob"]}}'
        )
        pushed = b'{"protocol":1,"pushed":{"messages":["0190aa"],"contracts":["did:x:bob"]}}'
        self.assertEqual((encode_names("hints", HINTS), decode_names("hints", hints)), (hints, HINTS))
        names: NotificationNames = {"messages": ["0190aa"], "contracts": ["did:x:bob"]}
        self.assertEqual((encode_names("pushed", names), decode_names("pushed", pushed)), (pushed, names))

    def test_request_of_a_newer_node(self) -> None:
        """Its number, members, kinds and forms of names that we do not know are passed over."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "priority": {"high": True},
            "hints": {"messages": ["0190aa", {"id": "0190dd", "urgent": True}], "drafts": ["0190ee"], "events": {}},
        }
        self.assertEqual(decode_names("hints", json.dumps(body).encode()), {"messages": ["0190aa"]})

    def test_answer_of_a_newer_node(self) -> None:
        """Likewise."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "pushed": {"messages": ["0190aa"], "drafts": ["0190ee"]},
            "load": 0.5,
        }
        self.assertEqual(decode_names("pushed", json.dumps(body).encode()), {"messages": ["0190aa"]})

    def test_answer_of_an_older_node(self) -> None:
        """A kind that it does not know is one of which it has pushed nothing."""
        self.assertEqual(decode_names("pushed", b'{"protocol":0,"pushed":{}}'), {})

    def test_no_request(self) -> None:
        """Whatever does not say what it hints at."""
        for body in (b"", b"x", b"[]", b"{}", b'{"hints":[]}', b'{"hints":null}', b'{"pushed":{}}', b"\xff"):
            self.assertRaises(ValueError, decode_names, "hints", body)
        self.assertRaises(ValueError, decode_names, "pushed", b'{"hints":{}}')

    def test_too_many(self) -> None:
        """More than anybody sends."""
        names = [str(number) for number in range(MAX_NOTIFICATIONS + 1)]
        self.assertRaises(ValueError, decode_names, "hints", json.dumps({"hints": {"messages": names}}).encode())
        decode_names("hints", json.dumps({"hints": {"messages": names[1:]}}).encode())

    def test_once(self) -> None:
        """A name that is there twice counts once."""
        self.assertEqual(decode_names("hints", b'{"hints":{"messages":["a","b","a"]}}'), {"messages": ["a", "b"]})

    def test_malformed_messages(self) -> None:
        """What is no message; a node that reads from the store itself does not mind."""
        good = (["a", "did:x:b", "did:x:b", "e30", "json"], [1, 2.5])
        malformed: tuple[Any, ...] = (
            5,
            [5],
            [[]],
            [good, [good[0], [1, "x"]]],
            [[["a", "did:x:b", "did:x:b", "e30"], good[1]]],
            [[["a", "did:x:b", "did:x:b", "e30", "yaml"], good[1]]],
            [[["a", "did:x:b", "did:x:b", "?", "json"], good[1]]],
        )
        for contents in malformed:
            body = json.dumps({"hints": {"messages": ["a"]}, "contents": contents}).encode()
            self.assertRaises(ValueError, decode_request, body, 0.0)
            self.assertEqual(decode_names("hints", body), {"messages": ["a"]})
        names, messages = decode_request(json.dumps({"hints": {}, "contents": [good]}).encode(), 0.0)
        self.assertEqual((names, messages["a"].payload), ({}, b"{}"))

    def test_envelope(self) -> None:
        """A body with all kinds and no names."""
        self.assertLess(len(encode_names("hints", {kind: [] for kind in NOTIFICATION_KINDS})), ENVELOPE_BYTES)
