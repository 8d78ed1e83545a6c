"""Resource exhaustion attacks on a mediator, and their cost in calls and bytes."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm.jwe import encrypt_anoncrypt, encrypt_authcrypt
from tests.fuzz.fuzz_mediator import MeasuredCost, measure_cost, problem_code
from tests.fuzz.targets.http import statuses
from tests.http.in_memory_site import HTTPResponse, InMemorySite, InMemoryTransport
from tests.in_memory_mediator import PING, InMemoryWallet
from tests.integration.daemon import PLENTY
from tests.protocol.didcomm.foreign_jwe import JWEWriter

# Three times the calls of a common message, about 1000.
USUAL = 3_000
# Bytes of memory, constant and per byte received, which exists as HTTP, as JSON, decoded and decrypted.
ROOM = 600_000
COPIES = 20


class BombTestCase(SynchronousTestCase):
    """A mediator without rate limits, and a wallet with an account."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, **PLENTY, listen=["tcp:0"])
        self.guest = InMemoryWallet(self.site_fixture).enrol()
        self.to = [(method.id, method.key) for method in self.site_fixture.document.key_agreement]

    def message(self, type_: str = PING, body: Any = None, **headers: Any) -> bytes:
        """A plaintext message of the wallet to the mediator."""
        value = {
            "id": "b-1",
            "type": type_,
            "body": body or {},
            "from": self.guest.did,
            "to": [self.site_fixture.did],
        }
        return json.dumps({**value, **headers}).encode()

    def anoncrypted(self, plaintext: bytes) -> bytes:
        """Encrypt anonymously."""
        return encrypt_anoncrypt(plaintext, self.to)

    def authcrypted(self, plaintext: bytes) -> bytes:
        """Encrypt as the wallet."""
        key = self.guest.identity.agreement
        return encrypt_authcrypt(plaintext, (key.kid, key.private), self.to)

    def encrypt_by_writer(self, plaintext: bytes = b"{}", **writing: Any) -> dict[str, Any]:
        """Encrypt with the independent writer."""
        return JWEWriter(**writing).write(plaintext, self.to[0])

    def post(self, body: bytes, *, most_calls: int = USUAL, most: int = 0, **headers: str) -> HTTPResponse:
        """
        Post an envelope within a cost, and return the response.

        :param most: bytes of memory; by default 20 times the request and a constant.
        """
        self.site_fixture.post(self.anoncrypted(b"{}"))  # warm up caches
        responses: list[HTTPResponse] = []
        work = measure_cost(lambda: responses.append(self.site_fixture.post(body, **headers)))
        self.assert_cost(work, most_calls, most or ROOM + COPIES * len(body))
        return responses[0]

    def refusal_code(self, body: bytes, status: int = 400, **options: Any) -> str:
        """The code with which an envelope is refused in the clear."""
        waiting = self.guest.count_queued()
        response = self.post(body, **options)
        self.assertEqual(response.status, status, response.body)
        self.assertEqual(self.guest.count_queued(), waiting)
        return problem_code(response.body)

    def statuses_of(self, *pieces: bytes, most_calls: int, most: int) -> tuple[list[int], InMemoryTransport]:
        """The statuses of the responses on one connection."""
        transport = self.site_fixture.connect()

        def feed() -> None:
            for piece in pieces:
                transport.feed(piece)
            self.site_fixture.run_due_calls()

        self.assert_cost(measure_cost(feed), most_calls, most)
        return statuses(transport.take_output()), transport

    def assert_cost(self, work: MeasuredCost, most_calls: int, most: int) -> None:
        """Run within this cost."""
        self.assertLess(work.calls, most_calls)
        self.assertLess(work.peak, most)
