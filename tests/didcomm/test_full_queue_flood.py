"""What is left of a recipient's mail while others fill the queue."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.store.fair_share import PROBATION_SECONDS
from mediatord.wallet.didcomm_messages import authcrypt, compose_message
from tests.in_memory_mediator import MP, InMemoryMediator, InMemoryWallet, pack_forward
from tests.integration.daemon import PLENTY

FULL = 40
REAL = "198.51.100.1"


class FloodTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits=PLENTY["limits"], queue={"max_messages": FULL})
        self.bob, self.alice = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory)

    def anonymous(self, text: str, peer: str) -> None:
        """Somebody who proves nothing leaves a message."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.letter(text))
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

    def proven(self, text: str, sender: InMemoryWallet, peer: str) -> None:
        """Somebody leaves a message in a forward of their own."""
        attachments: Any = [{"data": {"base64": encoding.encode_base64url(self.bob.letter(text))}}]
        headers = {"from": sender.did, "to": [self.in_memory.did]}
        message = compose_message(FORWARD, {"next": self.bob.did}, attachments=attachments, **headers)
        raw = authcrypt(message, sender.identity, self.in_memory.document)
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

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
            self.in_memory.clock.advance(PROBATION_SECONDS)
        for _ in range(10):
            self.proven("real", self.alice, REAL)
        for one in range(2 * FULL):
            self.proven("flood", InMemoryWallet(self.in_memory), f"203.0.113.{one}")
        self.assertEqual(self.real(), 10)

    def test_known_address(self) -> None:
        """An address that Bob has acknowledged anonymous mail of before loses nothing to others."""
        for _ in range(2):
            self.anonymous("first", REAL)
            ids = [one.id for one in self.bob.fetch()]
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": ids})
            self.in_memory.clock.advance(PROBATION_SECONDS)
        for _ in range(10):
            self.anonymous("real", REAL)
        self.flood(2 * FULL, 3 * FULL)
        self.assertEqual(self.real(), 10)
