"""What is left of a recipient's mail while others fill the queue."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import jsontext
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.store.known_senders import PROBATION
from mediatord.wallet.packing import authcrypt, compose
from tests.house import MP, Guest, House, sealed_forward
from tests.integration.daemon import PLENTY

FULL = 40
REAL = "198.51.100.1"


class FloodTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.house = House(self, limits=PLENTY["limits"], queue={"max_messages": FULL})
        self.bob, self.alice = Guest(self.house).enrol(), Guest(self.house)

    def anonymous(self, text: str, peer: str) -> None:
        """Somebody who proves nothing leaves a message."""
        raw = sealed_forward(self.house, self.bob.did, self.bob.letter(text))
        self.assertEqual(self.house.receive(raw, peer=peer).status, 202)

    def proven(self, text: str, sender: Guest, peer: str) -> None:
        """Somebody leaves a message in a forward of their own."""
        attachments: Any = [{"data": {"base64": jsontext.b64url_encode(self.bob.letter(text))}}]
        headers = {"from": sender.did, "to": [self.house.did]}
        message = compose(FORWARD, {"next": self.bob.did}, attachments=attachments, **headers)
        raw = authcrypt(message, sender.identity, self.house.document)
        self.assertEqual(self.house.receive(raw, peer=peer).status, 202)

    def flood(self, addresses: int, number: int = 2 * FULL) -> None:
        """An attacker who has so many addresses."""
        for one in range(number):
            self.anonymous("flood", f"203.0.113.{one % addresses}")

    def real(self) -> int:
        """How many real messages are still there."""
        return sum(self.bob.open(one.payload).text == "real" for one in self.bob.fetch(FULL))

    def test_anonymous(self) -> None:
        """A few messages of one address are still there when each of the attacker's has sent more."""
        for _ in range(4):
            self.anonymous("real", REAL)
        self.flood(3)
        self.assertEqual(self.real(), 4)

    def test_proven(self) -> None:
        """Messages of a proven sender lose nothing to anonymous ones, from however many addresses."""
        for _ in range(10):
            self.proven("real", self.alice, REAL)
        self.flood(2 * FULL, 3 * FULL)
        self.assertEqual(self.real(), 10)

    def test_made_up_senders(self) -> None:
        """Nor do those of a sender whom Bob has acknowledged before, to made-up ones at many addresses."""
        for _ in range(2):
            self.proven("first", self.alice, REAL)
            ids = [one.id for one in self.bob.fetch()]
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": ids})
            self.house.clock.advance(PROBATION)
        for _ in range(10):
            self.proven("real", self.alice, REAL)
        for one in range(2 * FULL):
            self.proven("flood", Guest(self.house), f"203.0.113.{one}")
        self.assertEqual(self.real(), 10)

    def test_known_address(self) -> None:
        """An address that Bob has acknowledged anonymous mail of before loses nothing to others."""
        for _ in range(2):
            self.anonymous("first", REAL)
            ids = [one.id for one in self.bob.fetch()]
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": ids})
            self.house.clock.advance(PROBATION)
        for _ in range(10):
            self.anonymous("real", REAL)
        self.flood(2 * FULL, 3 * FULL)
        self.assertEqual(self.real(), 10)
