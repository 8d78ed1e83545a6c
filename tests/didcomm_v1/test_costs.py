"""What a forward, a delivery and a handshake of DIDComm v1 cost, in calls of libsodium that take a key pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from nacl import bindings
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.envelope import pack_authcrypt
from mediatord.protocol.didcomm_v1.keys import derive_agreement_key
from tests.didcomm_v1.in_memory_wallet import compose, pack_forward
from tests.didcomm_v1.test_handshake import HandshakeTestCase
from tests.didcomm_v1.test_pickup import MESSAGES_RECEIVED, PickupTestCase

# Each takes one multiplication on the curve or more; keys and passwords are all that costs as much.
OPERATIONS = (
    "crypto_box",
    "crypto_box_open",
    "crypto_box_seal",
    "crypto_box_seal_open",
    "crypto_scalarmult",
    "crypto_scalarmult_base",
    "crypto_sign",
    "crypto_sign_ed25519_pk_to_curve25519",
    "crypto_sign_open",
    "crypto_sign_seed_keypair",
)


def count_operations(test: SynchronousTestCase) -> Counter[str]:
    """Number of calls of each operation from now on."""
    counts: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any], *args: Any) -> Any:
        counts[name] += 1
        return function(*args)

    for name in OPERATIONS:
        test.patch(bindings, name, partial(count, name, getattr(bindings, name)))
    return counts


class MessageCostTests(PickupTestCase):
    """One forward, its delivery, and its acknowledgement."""

    def test_forward(self) -> None:
        """The envelope is opened, which takes one agreement."""
        forward = pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload())
        counts = count_operations(self)
        self.assertEqual(self.in_memory.receive(forward).status, 202)
        self.assertEqual(counts, {"crypto_box_seal_open": 1})

    def test_live_delivery(self) -> None:
        """A delivery is packed once: its key is agreed on, and the sender sealed."""
        socket = self.go_live()
        forwards = [
            pack_forward(self.in_memory, self.wallet.recipient_base58, self.wallet.make_payload(text))
            for text in ("first", "second")
        ]
        for forward in forwards:
            counts = count_operations(self)
            self.assertEqual(self.in_memory.receive(forward).status, 202)
            self.assertEqual(counts, {"crypto_box_seal_open": 1, "crypto_box": 1, "crypto_box_seal": 1})
        self.assertEqual(len(socket.frames), 2)

    def test_acknowledgement(self) -> None:
        """The request of an authenticated sender takes two agreements, and its answer what a delivery does."""
        socket = self.go_live()
        self.forward("message")
        members: dict[str, Any] = {"~transport": {"return_route": "all"}}
        received = compose(MESSAGES_RECEIVED, message_id_list=list(self.take_pushes(socket)), **members)
        packed = self.wallet.pack(received)
        counts = count_operations(self)
        self.assertEqual(self.in_memory.receive(packed, socket).status, 200)
        opening = {"crypto_box_seal_open": 1, "crypto_box_open": 1}
        self.assertEqual(counts, {**opening, "crypto_box": 1, "crypto_box_seal": 1})


class HandshakeCostTests(HandshakeTestCase):
    """One handshake."""

    def test_did_exchange(self) -> None:
        """The wallet's key is converted, one for the connection derived, and the DID signed by the invitation's."""
        handshake = self.start()
        request = pack_authcrypt(encoding.dumps(handshake.make_request()), self.invitation.key, handshake.key)
        derive_agreement_key.cache_clear()
        counts = count_operations(self)
        self.assertEqual(self.in_memory.receive(request).status, 200)
        expected = {
            "crypto_box_seal_open": 1,
            "crypto_box_open": 1,
            "crypto_sign_ed25519_pk_to_curve25519": 1,
            "crypto_sign_seed_keypair": 1,
            "crypto_scalarmult_base": 1,
            "crypto_sign": 1,
            "crypto_box": 1,
            "crypto_box_seal": 1,
        }
        self.assertEqual(counts, expected)
