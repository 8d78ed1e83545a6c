"""Which messages of a recipient remain while others fill the queue."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm_v1.envelope import pack_anoncrypt, pack_authcrypt
from mediatord.store.fair_share import PROBATION_SECONDS
from mediatord.wallet.didcomm_messages import authcrypt, compose_message
from tests.didcomm_v1.in_memory_wallet import compose_forward, get_identity, make_key
from tests.in_memory_mediator import MP, InMemoryMediator, InMemoryWallet, pack_forward
from tests.integration.daemon import PLENTY

FULL = 40
REAL = "198.51.100.1"


class FloodTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, limits=PLENTY["limits"], queue={"max_messages": FULL})
        self.bob, self.alice = InMemoryWallet(self.in_memory).enrol(), InMemoryWallet(self.in_memory)

    def forward_anonymously(self, text: str, peer: str) -> None:
        """Forward a message anonymously."""
        raw = pack_forward(self.in_memory, self.bob.did, self.bob.make_payload(text))
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

    def forward_authenticated(self, text: str, sender: InMemoryWallet, peer: str) -> None:
        """Forward a message in an authenticated forward."""
        attachments: Any = [{"data": {"base64": encoding.encode_base64url(self.bob.make_payload(text))}}]
        headers = {"from": sender.did, "to": [self.in_memory.did]}
        message = compose_message(FORWARD, {"next": self.bob.did}, attachments=attachments, **headers)
        raw = authcrypt(message, sender.identity, self.in_memory.document)
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

    def flood(self, addresses: int, number: int = 2 * FULL) -> None:
        """Send from `addresses` addresses of an attacker."""
        for item in range(number):
            self.forward_anonymously("flood", f"203.0.113.{item % addresses}")

    def remaining(self) -> int:
        """Count the legitimate messages that remain."""
        return sum(self.bob.open(delivered.payload).text == "real" for delivered in self.bob.fetch(FULL))

    def test_anonymous_messages_survive(self) -> None:
        """A few messages of one address survive after each of the attacker's has sent more."""
        for _ in range(4):
            self.forward_anonymously("real", REAL)
        self.flood(3)
        self.assertEqual(self.remaining(), 4)

    def test_oldest_are_evicted_without_shares(self) -> None:
        """With sender shares and ranks disabled, the oldest message of any sender makes room."""
        queue = {"max_messages": FULL, "sender_share": 1, "reserved_for_known": 0}
        self.in_memory = InMemoryMediator(self, limits=PLENTY["limits"], queue=queue)
        self.bob = InMemoryWallet(self.in_memory).enrol()
        for _ in range(4):
            self.forward_anonymously("real", REAL)
        self.flood(3, FULL - 1)
        self.assertEqual(self.remaining(), 1)

    def test_authenticated_messages_survive(self) -> None:
        """Messages of an authenticated sender lose nothing to anonymous ones, from however many addresses."""
        for _ in range(10):
            self.forward_authenticated("real", self.alice, REAL)
        self.flood(2 * FULL, 3 * FULL)
        self.assertEqual(self.remaining(), 10)

    def test_known_sender_survives_invented_senders(self) -> None:
        """Messages of a known sender lose nothing to invented senders at many addresses."""
        for _ in range(2):
            self.forward_authenticated("first", self.alice, REAL)
            ids = [delivered.id for delivered in self.bob.fetch()]
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": ids})
            self.in_memory.clock.advance(PROBATION_SECONDS)
        for _ in range(10):
            self.forward_authenticated("real", self.alice, REAL)
        for item in range(2 * FULL):
            self.forward_authenticated("flood", InMemoryWallet(self.in_memory), f"203.0.113.{item}")
        self.assertEqual(self.remaining(), 10)

    def test_known_address_survives(self) -> None:
        """An address with acknowledged anonymous messages loses nothing to others."""
        for _ in range(2):
            self.forward_anonymously("first", REAL)
            ids = [delivered.id for delivered in self.bob.fetch()]
            self.bob.answer(f"{MP}/messages-received", {"message_id_list": ids})
            self.in_memory.clock.advance(PROBATION_SECONDS)
        for _ in range(10):
            self.forward_anonymously("real", REAL)
        self.flood(2 * FULL, 3 * FULL)
        self.assertEqual(self.remaining(), 10)


class V1FloodTests(FloodTests):
    """The same with forwards of DIDComm v1, which share the queue with those of v2."""

    def forward_anonymously(self, text: str, peer: str) -> None:
        raw = pack_anoncrypt(compose_forward(self.bob.did, self.bob.make_payload(text)), self.routing_key())
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

    def forward_authenticated(self, text: str, sender: InMemoryWallet, peer: str) -> None:
        plaintext = compose_forward(self.bob.did, self.bob.make_payload(text))
        raw = pack_authcrypt(plaintext, self.routing_key(), make_key(sender.did))
        self.assertEqual(self.in_memory.receive(raw, peer=peer).status, 202)

    def routing_key(self) -> str:
        """The key that forwards are encrypted to."""
        return get_identity(self.in_memory).routing_key.did_key
