"""What nodes of different versions say to each other: recorded, and what a newer one might say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.hint import (
    ENVELOPE_BYTES,
    HINTS_PATH,
    KINDS,
    MAX_HINTS,
    PROBE_PATH,
    PROTOCOL,
    Hint,
    read_hints,
    read_pushed,
    write_hints,
    write_pushed,
)
from mediatord.cluster.sealing import NONCE, RECEIVER, SEAL, SENDER, TIME, Sealing
from mediatord.cluster.secret import derive

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("protocol-1.json").read_text("utf-8"))

HINTS = [
    Hint("messages", "0190aa"),
    Hint("events", "0190bb"),
    Hint("contracts", "did:x:bob"),
    Hint("messages", "0190cc"),
]


class RecordedTests(SynchronousTestCase):
    """
    The record was made by the first version that had nodes. It is not to be changed: nodes of that version run beside
    those of this one while a deployment is under way.
    """

    def sealing(self) -> Sealing:
        """With the record's secret, time and nonce."""
        clock = Clock()
        clock.advance(RECORDED["time_ms"] / 1000)
        return Sealing(clock, derive(bytes.fromhex(RECORDED["secret"])), lambda: RECORDED["nonce"])

    def test_paths(self) -> None:
        """Are where they were."""
        self.assertEqual((HINTS_PATH, PROBE_PATH), (RECORDED["hints_path"], RECORDED["probe_path"]))

    def test_request(self) -> None:
        """We write to the byte what was written then, seal included, and understand it."""
        body = RECORDED["request"]["body"].encode()
        self.assertEqual(write_hints(HINTS), body)
        sealing = self.sealing()
        stamp = sealing.stamp(RECORDED["sender"], RECORDED["receiver"])
        headers = sealing.seal_request(stamp, "POST", HINTS_PATH, body)
        self.assertEqual(headers, RECORDED["request"]["headers"])
        self.assertEqual(set(headers), {SENDER, RECEIVER, TIME, NONCE, SEAL})
        self.assertEqual(sealing.open_request(headers, "POST", HINTS_PATH, body), stamp)
        self.assertEqual(
            read_hints(body),
            {"messages": ["0190aa", "0190cc"], "events": ["0190bb"], "contracts": ["did:x:bob"]},
        )

    def test_response(self) -> None:
        """Likewise."""
        body = RECORDED["response"]["body"].encode()
        self.assertEqual(write_pushed({"messages": ["0190aa"], "events": [], "contracts": ["did:x:bob"]}), body)
        sealing = self.sealing()
        stamp = sealing.stamp(RECORDED["sender"], RECORDED["receiver"])
        headers = sealing.seal_response(stamp, RECORDED["receiver"], 200, body)
        self.assertEqual(headers, RECORDED["response"]["headers"])
        self.assertEqual(set(headers), {SENDER, SEAL})
        self.assertEqual(sealing.open_response(stamp, headers, 200, body), RECORDED["receiver"])
        self.assertEqual(read_pushed(body), {("messages", "0190aa"), ("contracts", "did:x:bob")})

    def test_seal_of_the_store(self) -> None:
        """What nodes compare before they join."""
        self.assertEqual(derive(bytes.fromhex(RECORDED["secret"])).seal.hex(), RECORDED["seal"])


class NewerTests(SynchronousTestCase):
    """A node of the next version may say more; what we know of it counts."""

    def test_request_of_a_newer_node(self) -> None:
        """Its number, members, kinds and forms of names that we do not know are passed over."""
        body = {
            "protocol": PROTOCOL + 1,
            "priority": {"high": True},
            "hints": {"messages": ["0190aa", {"id": "0190dd", "urgent": True}], "drafts": ["0190ee"], "events": {}},
        }
        found = read_hints(json.dumps(body).encode())
        self.assertEqual(found, {"messages": ["0190aa"], "events": [], "contracts": []})

    def test_response_of_a_newer_node(self) -> None:
        """Likewise."""
        body = {"protocol": PROTOCOL + 1, "pushed": {"messages": ["0190aa"], "drafts": ["0190ee"]}, "load": 0.5}
        self.assertEqual(read_pushed(json.dumps(body).encode()), {("messages", "0190aa")})

    def test_response_of_an_older_node(self) -> None:
        """A kind that it does not know is one of which it has pushed nothing."""
        self.assertEqual(read_pushed(b'{"protocol":0,"pushed":{}}'), frozenset())


class BodyTests(SynchronousTestCase):
    def test_no_request(self) -> None:
        """Whatever does not say what it hints at."""
        for body in (b"", b"x", b"[]", b"{}", b'{"hints":[]}', b'{"hints":null}', b'{"pushed":{}}', b"\xff"):
            self.assertRaises(ValueError, read_hints, body)
        self.assertRaises(ValueError, read_pushed, b'{"hints":{}}')

    def test_too_many(self) -> None:
        """More than anybody sends."""
        names = [str(number) for number in range(MAX_HINTS + 1)]
        self.assertRaises(ValueError, read_hints, json.dumps({"hints": {"messages": names}}).encode())
        read_hints(json.dumps({"hints": {"messages": names[1:]}}).encode())

    def test_once(self) -> None:
        """A name that is there twice counts once."""
        self.assertEqual(read_hints(b'{"hints":{"messages":["a","b","a"]}}')["messages"], ["a", "b"])

    def test_size(self) -> None:
        """A body is no larger than its hints say."""
        for name in ("0190aa", 'a"b\\c', "did:x:é", "\x00"):
            hints = [Hint(kind, name * 50) for kind in KINDS]
            self.assertLessEqual(len(write_hints(hints)), ENVELOPE_BYTES + sum(hint.size for hint in hints))
