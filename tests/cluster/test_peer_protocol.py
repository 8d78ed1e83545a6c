"""What nodes of different versions say to each other: recorded, and what a newer one might say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_protocol import (
    ENVELOPE_BYTES,
    MAC_HEADER,
    MAX_NOTIFICATIONS,
    NONCE_HEADER,
    NOTIFICATION_KINDS,
    NOTIFICATIONS_PATH,
    PROBE_PATH,
    PROTOCOL_VERSION,
    RECEIVER_HEADER,
    SENDER_HEADER,
    TIME_HEADER,
    MessageAuthenticator,
    PeerNotification,
    decode_notifications,
    decode_push_result,
    derive_cluster_keys,
    encode_notifications,
    encode_push_result,
)

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("protocol-1.json").read_text("utf-8"))

HINTS = [
    PeerNotification("messages", "0190aa"),
    PeerNotification("events", "0190bb"),
    PeerNotification("contracts", "did:x:bob"),
    PeerNotification("messages", "0190cc"),
]


class RecordedTests(SynchronousTestCase):
    """
    The record was made by the first version that had nodes. It is not to be changed: nodes of that version run beside
    those of this one while a deployment is under way.
    """

    def authenticator(self) -> MessageAuthenticator:
        """With the record's secret, time and nonce."""
        clock = Clock()
        clock.advance(RECORDED["time_ms"] / 1000)
        return MessageAuthenticator(
            clock, derive_cluster_keys(bytes.fromhex(RECORDED["secret"])), lambda: RECORDED["nonce"]
        )

    def test_paths(self) -> None:
        """Are where they were."""
        self.assertEqual((NOTIFICATIONS_PATH, PROBE_PATH), (RECORDED["hints_path"], RECORDED["probe_path"]))

    def test_request(self) -> None:
        """We write to the byte what was written then, seal included, and understand it."""
        body = RECORDED["request"]["body"].encode()
        self.assertEqual(encode_notifications(HINTS), body)
        authenticator = self.authenticator()
        request_id = authenticator.new_request_id(RECORDED["sender"], RECORDED["receiver"])
        headers = authenticator.authenticate_request(request_id, "POST", NOTIFICATIONS_PATH, body)
        self.assertEqual(headers, RECORDED["request"]["headers"])
        self.assertEqual(set(headers), {SENDER_HEADER, RECEIVER_HEADER, TIME_HEADER, NONCE_HEADER, MAC_HEADER})
        self.assertEqual(authenticator.verify_request(headers, "POST", NOTIFICATIONS_PATH, body), request_id)
        self.assertEqual(
            decode_notifications(body),
            {"messages": ["0190aa", "0190cc"], "events": ["0190bb"], "contracts": ["did:x:bob"]},
        )

    def test_response(self) -> None:
        """Likewise."""
        body = RECORDED["response"]["body"].encode()
        self.assertEqual(encode_push_result({"messages": ["0190aa"], "events": [], "contracts": ["did:x:bob"]}), body)
        authenticator = self.authenticator()
        request_id = authenticator.new_request_id(RECORDED["sender"], RECORDED["receiver"])
        headers = authenticator.authenticate_response(request_id, RECORDED["receiver"], 200, body)
        self.assertEqual(headers, RECORDED["response"]["headers"])
        self.assertEqual(set(headers), {SENDER_HEADER, MAC_HEADER})
        self.assertEqual(authenticator.verify_response(request_id, headers, 200, body), RECORDED["receiver"])
        self.assertEqual(decode_push_result(body), {("messages", "0190aa"), ("contracts", "did:x:bob")})

    def test_seal_of_the_store(self) -> None:
        """What nodes compare before they join."""
        self.assertEqual(derive_cluster_keys(bytes.fromhex(RECORDED["secret"])).seal.hex(), RECORDED["seal"])


class NewerTests(SynchronousTestCase):
    """A node of the next version may say more; what we know of it counts."""

    def test_request_of_a_newer_node(self) -> None:
        """Its number, members, kinds and forms of names that we do not know are passed over."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "priority": {"high": True},
            "hints": {"messages": ["0190aa", {"id": "0190dd", "urgent": True}], "drafts": ["0190ee"], "events": {}},
        }
        found = decode_notifications(json.dumps(body).encode())
        self.assertEqual(found, {"messages": ["0190aa"], "events": [], "contracts": []})

    def test_response_of_a_newer_node(self) -> None:
        """Likewise."""
        body = {
            "protocol": PROTOCOL_VERSION + 1,
            "pushed": {"messages": ["0190aa"], "drafts": ["0190ee"]},
            "load": 0.5,
        }
        self.assertEqual(decode_push_result(json.dumps(body).encode()), {("messages", "0190aa")})

    def test_response_of_an_older_node(self) -> None:
        """A kind that it does not know is one of which it has pushed nothing."""
        self.assertEqual(decode_push_result(b'{"protocol":0,"pushed":{}}'), frozenset())


class BodyTests(SynchronousTestCase):
    def test_no_request(self) -> None:
        """Whatever does not say what it hints at."""
        for body in (b"", b"x", b"[]", b"{}", b'{"hints":[]}', b'{"hints":null}', b'{"pushed":{}}', b"\xff"):
            self.assertRaises(ValueError, decode_notifications, body)
        self.assertRaises(ValueError, decode_push_result, b'{"hints":{}}')

    def test_too_many(self) -> None:
        """More than anybody sends."""
        names = [str(number) for number in range(MAX_NOTIFICATIONS + 1)]
        self.assertRaises(ValueError, decode_notifications, json.dumps({"hints": {"messages": names}}).encode())
        decode_notifications(json.dumps({"hints": {"messages": names[1:]}}).encode())

    def test_once(self) -> None:
        """A name that is there twice counts once."""
        self.assertEqual(decode_notifications(b'{"hints":{"messages":["a","b","a"]}}')["messages"], ["a", "b"])

    def test_size(self) -> None:
        """A body is no larger than its hints say."""
        for name in ("0190aa", 'a"b\\c', "did:x:é", "\x00"):
            notifications = [PeerNotification(kind, name * 50) for kind in NOTIFICATION_KINDS]
            self.assertLessEqual(
                len(encode_notifications(notifications)),
                ENVELOPE_BYTES + sum(notification.size for notification in notifications),
            )
